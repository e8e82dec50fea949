"""AdamW: Decoupled Weight Decay Regularization, Loshchilov and Hutter 2019 (arXiv:1711.05101).

    m ← lerp(m, g, 1 − β₁)      v ← β₂ v + (1 − β₂) g²
    update = −lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)  −  lr · decay · p

The arithmetic is that of torch.optim.AdamW, in its order. Knows no ranks.
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
from .scaling import Rate, decayed, rate_at, weights_of


class AdamState(NamedTuple):
    """``step``: steps made; ``m`` and ``v``: moving averages of the gradients and of their squares."""

    step: Tensor
    m: Tree
    v: Tree


class _Now(NamedTuple):
    """The numbers of one step."""

    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float
    step: Tensor
    fused: bool | None
    donate: bool


def adamw(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    mask: Mask | None = None,
    dtype: torch.dtype | None = None,
    fused: bool | None = None,
    donate: bool = False,
) -> Transform:
    """AdamW, with torch's defaults; ``lr`` is a number or a function of the step, which counts from 0.

    ``mask`` says which leaves decay (see :func:`weight_decay`). ``dtype`` is that of the state and of the updates
    (default: the parameter's). ``fused=False`` takes torch's foreach arithmetic step by step, to the bit; the default
    takes the one-pass kernel where there is one, which may differ from it in the last bit. ``donate=True`` writes the
    new state into the memory of the old one, which must not be used again.

    >>> params = [{"w": torch.ones(2)}, None]
    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> updates, state = tx.update([{"w": torch.ones(2)}, None], tx.init(params), params)
    >>> updates, state.step.item()
    ([{'w': tensor([-0.1000, -0.1000])}, None], 1)
    """
    if not all(0 <= beta < 1 for beta in betas) or eps < 0 or weight_decay < 0:
        raise TransformError(
            f"betas={betas}, eps={eps}, weight_decay={weight_decay}; "
            f"adamw needs betas in [0, 1), eps >= 0 and weight_decay >= 0"
        )

    def init(params: Tree) -> State:
        return AdamState(count(), zeros(params, dtype), zeros(params, dtype))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        ms, vs = at.of(state.m, "the state"), at.of(state.v, "the state")
        weights: Column = weights_of(at, params, "adamw with weight decay") if weight_decay else [None] * len(ms)
        on = flags(at, mask, params) if weight_decay else [False] * len(ms)
        now = _Now(rate_at(lr, state.step), weight_decay, betas, eps, state.step + 1, fused, donate)
        with recording(at.leaves):
            us, ms, vs = by_kind(lambda *columns: _adam(now, *columns), ms, vs, at.leaves, weights, on)
        return at.tree(us), AdamState(now.step, at.tree(ms, base=state.m), at.tree(vs, base=state.v))

    donating(update, donate=donate)
    return Transform(init, update)


def _adam(now: _Now, ms: Column, vs: Column, gs: Column, ps: Column, on: Column) -> tuple[Column, Column, Column]:
    """The leaves of one device and dtype: updates, m and v."""
    if not ms:
        return [], [], []
    us = decayed(ps, on, -now.rate * now.decay, ms)  # the updates start as the decay alone
    columns = us, F.cast(gs, ms[0].dtype), ms, vs
    if not ms[0].is_complex():
        return _moments(now, *columns)
    real = _moments(now, *([torch.view_as_real(x) for x in column] for column in columns))
    us, ms, vs = ([torch.view_as_complex(x) for x in column] for column in real)
    return us, ms, vs


def _moments(now: _Now, us: Column, gs: Column, ms: Column, vs: Column) -> tuple[Column, Column, Column]:
    fused = now.fused if now.fused is not None else us[0].device.type in F.FUSED_DEVICES
    if fused and not F.differentiated():
        ms, vs = (F.laid_out(x, us) if now.donate else F.copies(x, like=us) for x in (ms, vs))
        F.fused_adam(us, F.laid_out(gs, us), ms, vs, now.step, now.rate, now.betas, now.eps)
        return us, ms, vs
    steps, (beta1, beta2) = float(now.step.item()), now.betas
    ms = F.lerp(ms, gs, 1 - beta1, own=now.donate)
    vs = F.addcmul(F.mul(vs, beta2, own=now.donate), gs, gs, 1 - beta2, own=True)
    roots = F.shift(F.div(F.sqrt(vs), (1 - beta2**steps) ** 0.5, own=True), now.eps, own=True)
    return F.addcdiv(us, ms, roots, now.rate / (1 - beta1**steps) * -1, own=True), ms, vs
