"""A data loader for a pipeline (DataLoader, shuffle, epochs, resume): ``fpipe.Epochs`` gives each step its batch.

``data(step)`` is a function of the number of the step: each process reads the same rows without a message, and a run
that continues in the middle of an epoch reads the rows that come next. Each epoch has another order of the rows. Other
options, such as ``num_workers=2``, go to torch's DataLoader.

The loss is the cross entropy of a class. Its mean over an epoch falls, because a linear rule determines the classes.
The second run stops in the middle of an epoch and continues with new objects; its losses are those of the first.

python examples/data_loader.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/data_loader.py              # or a process for each
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fpipe

STAGES, WIDTH, CLASSES, ROWS, BATCH = 8, 16, 4, 200, 32


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def last(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer(p, x) @ p["out"]


def data_set() -> TensorDataset:
    """Any data set of torch with a length."""
    draw = torch.Generator().manual_seed(0)
    x, rule = torch.randn(ROWS, WIDTH, generator=draw), torch.randn(WIDTH, CLASSES, generator=draw)
    return TensorDataset(x, (x @ rule).argmax(-1))


def main(steps: int = 30) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=draw) / WIDTH
    params = [{"w": normal(WIDTH, WIDTH)} for _ in range(STAGES)]
    params[-1]["out"] = normal(WIDTH, CLASSES)

    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline([*[layer] * (STAGES - 1), last], "ZBV", loss=cross_entropy, microbatches=8, group=group)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(5e-3)

    def train(params: list, state: tuple, first: int, end: int) -> tuple[list, tuple, list[float]]:
        data, losses = fpipe.Epochs(data_set(), BATCH), []
        for number in range(first, end):
            value, grads = step(params, *data(number))
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)
            losses.append(value.item())
        return params, state, losses

    start = pipe.place(params)
    _, _, losses = train(start, tx.init(start), 0, steps)
    middle = steps // 2
    params, state, before = train(start, tx.init(start), 0, middle)
    _, _, after = train(params, state, middle, steps)  # params and state may come from a checkpoint
    assert before + after == losses
    if 0 in group.here:
        batches = ROWS // BATCH  # of an epoch; the rows that are left over are dropped
        for epoch in range(steps // batches):
            part = losses[epoch * batches : (epoch + 1) * batches]
            print(f"epoch {epoch + 1}  steps {epoch * batches + 1:2d} to {(epoch + 1) * batches:2d}  ", end="")
            print(f"mean loss {sum(part) / len(part):.4f}")
        print(f"continued after step {middle}, in the middle of an epoch: the same losses")
    return losses


if __name__ == "__main__":
    main()
