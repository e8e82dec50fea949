"""Training steps for any group, which return hashes of their results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fpipe

WIDTH = 8


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w1"]) @ p["w2"]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


def parameters(stages: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for name in ("w1", "w2")}
        for _ in range(stages)
    ]


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(
        rows, WIDTH, generator=generator
    )


def bits(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else str(tensor.item()).encode()
        )
    return digest.hexdigest()[:12]


def steps(group: Any, name: str, plans: Sequence[tuple[int, int]]) -> dict[Any, str]:
    """(stage, step) and ("loss", step) -> hash, for every step (microbatches, rows of each) of
    ``plans``.
    """
    first = fpipe.make_schedule(name, ranks=group.size, microbatches=plans[0][0])
    digests: dict[Any, str] = {}
    pipe = fpipe.pipeline(
        [block] * first.stages, schedule=name, loss=loss, microbatches=plans[0][0], group=group
    )
    params = pipe.place(parameters(first.stages))
    for step, (microbatches, rows) in enumerate(plans):
        x, y = batch(microbatches * rows, step)
        parts = [fpipe.Microbatches(list(torch.split(each, rows))) for each in (x, y)]
        value, grads = fpipe.value_and_grad(pipe)(params, *parts)
        digests["loss", step] = bits(value)
        digests |= {
            (stage, step): bits(*grad.values())
            for stage, grad in enumerate(grads)
            if grad is not None
        }
        params = [
            p and {k: p[k] - 0.1 * g[k] for k in p} for p, g in zip(params, grads, strict=True)
        ]
    return digests


def steps_under(
    names: Sequence[str], plans: Sequence[tuple[int, int]]
) -> dict[str, dict[Any, str]]:
    """The steps under each schedule, in one process of a group."""
    group = fpipe.init(timeout=60)
    return {name: steps(group, name, plans) for name in names}
