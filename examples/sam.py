"""Sharpness-aware minimization (SAM): the gradient is taken where the loss is highest nearby.

Two steps of the pipeline for each update: the first gradient says where the loss rises most, over all stages, and the
second is taken RADIUS away in that direction. It is applied to the parameters as they were.

The loss is the mean squared error at the parameters, not that RADIUS away. It falls as 32 rows are learned by heart.

python examples/sam.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/sam.py              # or a process for each
"""

from __future__ import annotations

import torch
from torch import Tensor

import fpipe

STAGES, WIDTH, RADIUS = 8, 16, 0.05


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def main(steps: int = 20) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    params = [{"w": normal(WIDTH, WIDTH) / 4, "b": torch.zeros(WIDTH)} for _ in range(STAGES)]
    x, t = normal(32, WIDTH), normal(32, WIDTH)

    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline([block] * STAGES, "ZBV", loss=loss, microbatches=8, group=group)
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        value, rise = step(params, x, t)
        far = RADIUS / fpipe.global_norm(rise, over=pipe)  # the norm over all ranks
        there = [p and {name: p[name] + far * g[name] for name in p} for p, g in zip(params, rise, strict=True)]
        _, grads = step(there, x, t)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
