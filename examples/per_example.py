"""Differentially private training (DP-SGD): each example's gradient is clipped, over all stages, and noise is added.

The loss is the mean squared error to random targets. It falls slowly: all examples have gradients longer than LIMIT, of
which only the direction is left, and the noise changes that of their sum. The norms are those before clipping.

python examples/per_example.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/per_example.py              # or a process for each
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import fpipe

STAGES, WIDTH, ROWS, LIMIT, NOISE = 4, 16, 32, 1.0, 0.1


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def main() -> None:
    group = fpipe.init() if "RANK" in os.environ else fpipe.local(4)
    pipe = fpipe.pipeline([block] * STAGES, "ZB1P", loss=loss, microbatches=8, group=group)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    params = pipe.place([{"w": normal(WIDTH, WIDTH) / 4, "b": torch.zeros(WIDTH)} for _ in range(STAGES)])
    private = fpipe.per_example(pipe, LIMIT)  # no example counts for more than LIMIT
    tx = fpipe.chain(fpipe.transforms.add_noise((NOISE * LIMIT / ROWS) ** 2, gamma=0, seed=1), fpipe.adamw(0.01))
    state = tx.init(params)
    x, t = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    for step in range(10):
        value, grads, norms = private(params, x, t)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        if 0 in group.here:
            print(f"step {step}  loss {value:.4f}  median norm {norms.median():.3f}  clipped {(norms > LIMIT).sum()}")


if __name__ == "__main__":
    main()
