"""Lion: Symbolic Discovery of Optimization Algorithms, Chen et al. 2023 (arXiv:2302.06675).

    update = −lr · (sign(β₁ m + (1 − β₁) g) + decay · p)      m ← β₂ m + (1 − β₂) g

Knows no ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree
from . import _foreach as F
from ._base import State, Transform
from ._labels import Mask, flags
from ._late import donating
from ._places import Column, by_kind, count, places, recording, zeros
from .scaling import Rate, decay, rate_at, weights_of


class LionState(NamedTuple):
    """``step``: steps made; ``m``: the moving average of the gradients."""

    step: Tensor
    m: Tree


def lion(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 1e-3,
    *,
    mask: Mask | None = None,
    dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Transform:
    """Lion, with optax's defaults; ``lr`` is a number or a function of the step, which counts from 0.

    ``mask`` says which leaves decay. ``dtype`` is that of the state and of the updates (default: the parameter's).
    ``donate=True`` writes the new state into the memory of the old one.

    >>> tx = lion(0.1, weight_decay=0.0)
    >>> tx.update([torch.tensor([3.0, -0.2])], tx.init([torch.zeros(2)]))[0]
    [tensor([-0.1000,  0.1000])]
    """
    if not all(0 <= beta < 1 for beta in betas) or weight_decay < 0:
        raise TransformError(f"betas={betas}, weight_decay={weight_decay}; lion needs betas in [0, 1) and decay >= 0")

    def init(params: Tree) -> State:
        return LionState(count(), zeros(params, dtype))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        ms = at.of(state.m, "the state")
        weights: Column = weights_of(at, params, "lion with weight decay") if weight_decay else [None] * len(ms)
        on = flags(at, mask, params) if weight_decay else [False] * len(ms)
        rate = rate_at(lr, state.step)

        def kernel(ms: Column, gs: Column, ps: Column, on: Column) -> tuple[Column, Column]:
            gs = F.cast_like(gs, ms)
            us = F.mul(F.sign(F.lerp(ms, gs, 1 - betas[0])), -rate, own=True)
            us = decay(us, ps, on, -rate * weight_decay, own=True) if any(on) else us
            return us, F.lerp(ms, gs, 1 - betas[1], own=donate)

        with recording(at.leaves):
            us, ms = by_kind(kernel, ms, at.leaves, weights, on)
        return at.tree(us), LionState(state.step + 1, at.tree(ms, base=state.m))

    donating(update, donate=donate)
    return Transform(init, update)
