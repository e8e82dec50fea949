"""The same initialisation for any cut of a model on "meta" (initialization, seeds): parameters are drawn by name.

The model is built on the device "meta", without values. Each tensor is drawn from a generator whose seed is a function
of its name, so it does not depend on which tensors were drawn before it, on which process, or in how many stages the
model is. ``fpipe.receive`` calls the functions of this rank's stages alone: no process has the whole model.

The loss is the cross entropy of a class. It falls in the same way, to the last bit, with two, four and eight stages.

python examples/same_start.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/same_start.py              # or a process for each
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn

import fpipe

WIDTH, CLASSES, SEED = 32, 8, 0


def draw(name: str, shape: torch.Size) -> Tensor:
    """The first value of a parameter, by its name and shape."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # the scale of a norm
        return torch.ones(shape)
    digest = sha256(f"{SEED} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator) / shape[1] ** 0.5


def network() -> nn.Module:
    layer = lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with torch.device("meta"):
        return nn.Sequential(*(layer() for _ in range(7)), nn.Linear(WIDTH, CLASSES))


def schedules() -> list[fpipe.Schedule]:
    """For two, four and eight stages on four ranks."""
    make = partial(fpipe.make_schedule, ranks=4, microbatches=8)
    return [make("1F1B", replicas=(2, 2)), make("1F1B"), make("ZBV")]


def main(steps: int = 20) -> list[float]:
    torch.set_num_threads(1)
    data = torch.Generator().manual_seed(0)
    x = torch.randn(64, WIDTH, generator=data)
    t = torch.randint(CLASSES, (64,), generator=data)
    group = fpipe.init(pp=4)
    found: list[list[float]] = []
    for schedule in schedules():
        model = network()
        named = {name: partial(draw, name, p.shape) for name, p in model.named_parameters()}
        size = 8 // schedule.stages
        stages, _ = fpipe.from_module(model, cuts=[str(first) for first in range(size, 8, size)])
        pipe = fpipe.pipeline(stages, schedule, loss=nn.functional.cross_entropy, group=group)
        params = fpipe.receive(pipe, named)
        numbers = sum(p.numel() for part in params if part for p in part.values())
        step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
        state, losses = tx.init(params), []
        for _ in range(steps):
            value, grads = step(params, x, t)
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)
            losses.append(value.item())
        found.append(losses)
        if 0 in group.here:
            whole = sum(p.numel() for p in model.parameters())
            line = f"{schedule.stages} stages: this process drew {numbers:,} of {whole:,} numbers"
            print(f"{line}; losses", " ".join(f"{loss:.6f}" for loss in losses[::5]))
    assert found[0] == found[1] == found[2]
    return found[0]


if __name__ == "__main__":
    main()
