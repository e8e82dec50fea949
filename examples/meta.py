"""Meta-gradients through one inner step: the initial parameters and the step size for which one step on a task is best.

python examples/meta.py

The inner step is ``fpipe.grad`` and a gradient transform; the outer gradient is by torch.func, through both.
Under a torch.func transform a pipeline on a local group is the plain function of its stages, and its gradient that of
torch.func, so derivatives of any order are exact. On several processes this raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optree import tree_map
from torch import Tensor

import fpipe

STAGES, WIDTH, ROWS = 4, 8, 16
Function = Callable[..., Any]


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def unsplit(params: Any, x: Tensor, t: Tensor) -> Tensor:
    """The same model in one piece."""
    for p in params:
        x = layer(p, x)
    return squares(x, t)


def after_one_step(meta: Any, task: tuple[Tensor, ...], loss: Function, gradient: Function) -> Tensor:
    """The loss on a task's second half, after a clipped step by its first half at a learned rate a stage."""
    params, rates = meta["params"], meta["rates"]
    x, t, new_x, new_t = task
    grads = gradient(params, x, t)
    tx = fpipe.clip_by_global_norm(1.0)  # over=pipe is for several processes
    grads, _ = tx.update(grads, tx.init(params), params)
    steps = [tree_map(lambda g, rate=rate: -rate.exp() * g, g) for g, rate in zip(grads, rates, strict=True)]
    return loss(fpipe.apply_updates(params, steps), new_x, new_t)


def tasks(draw: torch.Generator) -> Callable[[], tuple[Tensor, ...]]:
    """Each task turns its rows by another matrix."""
    base = torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5

    def task() -> tuple[Tensor, ...]:
        turn = base + 0.3 * torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5
        x = torch.randn(2 * ROWS, WIDTH, generator=draw)
        return (*(half for pair in zip(x.chunk(2), (x @ turn).chunk(2), strict=True) for half in pair),)

    return task


def main(steps: int = 60) -> list[float]:
    """Train by meta-gradients; the losses after the inner step. The first gradient is compared with torch's."""
    pipe = fpipe.pipeline([layer] * STAGES, "1F1B", loss=squares, microbatches=4, group=fpipe.local(STAGES))
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(STAGES)]
    meta = {"params": [{"w": w, "b": torch.zeros(WIDTH)} for w in weights], "rates": [torch.tensor(-1.0)] * STAGES}
    task, tx, losses = tasks(draw), fpipe.adamw(0.02, weight_decay=0.0), []
    state = tx.init(meta)
    outer = torch.func.grad_and_value(after_one_step)
    for step in range(steps):
        given = task()
        grads, value = outer(meta, given, pipe, fpipe.grad(pipe))
        if step == 0:
            tree_map(torch.testing.assert_close, grads, outer(meta, given, unsplit, torch.func.grad(unsplit))[0])
        updates, state = tx.update(grads, state, meta)
        meta = fpipe.apply_updates(meta, updates)
        losses.append(value.item())
        if step % 10 == 9:
            rates = " ".join(f"{rate.exp():.2f}" for rate in meta["rates"])
            print(f"step {step + 1:3d}  loss after one inner step {value:.4f}  rates {rates}")
    return losses


if __name__ == "__main__":
    main()
