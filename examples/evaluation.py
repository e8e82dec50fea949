"""Evaluation during training (validation): loss and accuracy on held-out data every few steps.

A call of the pipeline runs forwards alone: without gradients, and nothing is kept for a backward. ``each=`` counts the
rows of a microbatch that are right, on the rank of the last stage. The loss comes back on every rank.

The loss on the training data falls. That on held-out data falls too, and rises again once the model learns rows by
heart, because the labels have noise. The parameters of the best evaluation are kept (early stopping).

python examples/evaluation.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/evaluation.py              # or a process for each
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fpipe

STAGES, WIDTH, CLASSES, EVERY = 8, 16, 4, 5


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def last(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer(p, x) @ p["out"]


def main(steps: int = 40) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    params = [{"w": normal(WIDTH, WIDTH) / 16, "b": torch.zeros(WIDTH)} for _ in range(STAGES)]
    params[-1]["out"] = normal(WIDTH, CLASSES) / 4
    rule = normal(WIDTH, CLASSES)
    label = lambda x: (x @ rule + 2 * normal(len(x), CLASSES)).argmax(-1)  # with noise
    x, held_x = normal(64, WIDTH), normal(128, WIDTH)
    t, held_t = label(x), label(held_x)

    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline([*[layer] * (STAGES - 1), last], "ZBV", loss=cross_entropy, microbatches=8, group=group)
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1.5e-3)
    state, losses = tx.init(params), []
    targets = held_t.chunk(8)  # by microbatch
    right = lambda number, y, loss: int((y.argmax(-1) == targets[number]).sum())

    def evaluate() -> tuple[float, float]:
        loss, counts = pipe(params, held_x, held_t, each=right)
        counts = group.gather_objects(counts)[pipe.output_rank]  # every rank decides the same
        return loss.item(), sum(counts) / len(held_t)

    best, kept = float("inf"), params
    for number in range(steps):
        value, grads = step(params, x, t)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if number % EVERY == EVERY - 1:
            held_loss, accuracy = evaluate()
            if held_loss < best:
                best, kept = held_loss, params
            if 0 in group.here:
                line = f"step {number + 1:3d}  loss {losses[-1]:.4f}  held-out loss {held_loss:.4f}"
                print(f"{line}  accuracy {accuracy:.1%}")
    params = kept
    if 0 in group.here:
        print(f"the parameters of the best held-out loss are kept: {best:.4f}")
    return losses


if __name__ == "__main__":
    main()
