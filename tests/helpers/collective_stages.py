"""Small stages with collectives, segments and random numbers, for tests of weaving. Each is cached,
so traced once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.passes import ops

WIDTH = 4


@cache
def moe_stage(members: Any, draws: bool = True) -> Callable[[Any, Tensor], Tensor]:
    """Attention-like, all_to_all, a shared expert beside it, experts, all_to_all; dropout in three
    segments.
    """
    drop = (lambda x: F.dropout(x, 0.25)) if draws else (lambda x: x)

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x + drop(torch.tanh(x @ p["a"]) @ p["o"])
        d = ops.all_to_all(h, members)
        s = drop(torch.relu(h @ p["s"]))
        d = fpipe.remat(lambda q, y: torch.tanh(y @ q["b"]) @ q["c"])(p, d)
        return drop(s + ops.all_to_all(d, members))

    return stage


@cache
def all_collectives(members: Any, size: int, rank: int) -> Callable[[Any, Tensor], Tensor]:
    """Every collective, with uneven splits."""

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        sends = [[1, 3], [2, 2]]  # of four rows
        receives = [[row[rank] for row in sends], sends[rank]]
        h = ops.all_to_all(x @ p["a"], members, send=sends[rank], receive=receives[0])
        h = ops.all_to_all(torch.tanh(h), members, send=receives[0], receive=receives[1])
        g = ops.all_gather(h @ p["b"], members)
        return (
            x
            + ops.reduce_scatter(torch.tanh(g), members)
            + 0.1 * ops.all_reduce(h @ p["c"], members)
        )

    return stage


def parameters(stages: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """One dict per stage."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: torch.randn(WIDTH, WIDTH, generator=generator) / 2 for k in "aobcs"}
        for _ in range(stages)
    ]
