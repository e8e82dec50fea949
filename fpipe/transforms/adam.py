# SPDX-License-Identifier: Apache-2.0
"""AdamW: Decoupled Weight Decay Regularization, Loshchilov and Hutter 2019 (arXiv:1711.05101).

    m ← lerp(m, g, 1 − β₁)      v ← β₂ v + (1 − β₂) g²
    update = −lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)  −  lr · decay · p

The arithmetic is that of torch.optim.AdamW, in the same order. This module must not know ranks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import Transform, Updates
from ._masks import Mask
from ._optimizer import Rate, Step, decayed, optimizer
from ._places import Column, by_kind


class AdamState(NamedTuple):
    """``step``: number of steps; ``m`` and ``v``: moving averages of the gradients and of their squares."""

    step: Tensor
    m: Updates
    v: Updates


class _Options(NamedTuple):
    betas: tuple[float, float]
    eps: float
    decay: float
    fused: bool | None
    donate: bool


def adamw(
    lr: Rate, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, *,
    mask: Mask | None = None, dtype: torch.dtype | None = None, fused: bool | None = None, donate: bool = False,
) -> Transform:  # fmt: skip
    """AdamW, with torch's defaults.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        betas: the decay of both moving averages.
        eps: what is added to the root.
        weight_decay: decoupled, times the learning rate.
        mask: which leaves decay (see :func:`weight_decay`).
        dtype: that of the state and of the updates; by default the parameter's.
        fused: False uses torch's foreach arithmetic step by step, to the bit. By default the one-pass kernel runs
            where there is one; its last bit may differ.
        donate: write the new state into the memory of the old one, which must not be used again.

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
    arithmetic = partial(_adam, _Options(betas, eps, weight_decay, fused, donate))
    return optimizer(
        "adamw", AdamState, arithmetic, lr, moments=2, decay=weight_decay, mask=mask, dtype=dtype, donate=donate
    )


def _adam(options: _Options, step: Step, ms: Column, vs: Column) -> list[Column]:
    return by_kind(partial(_of_one_kind, options, step), ms, vs, step.grads, step.params, step.decays)


def _of_one_kind(
    options: _Options, step: Step, ms: Column, vs: Column, gs: Column, ps: Column, on: Column
) -> tuple[Column, ...]:
    """Updates, m and v for the leaves of one device and dtype."""
    if not ms:
        return [], [], []
    us = decayed(ps, on, -step.rate * options.decay, ms)  # the updates start as the decay alone
    columns = us, F.cast(gs, ms[0].dtype), ms, vs
    if not ms[0].is_complex():
        return _moments(options, step, *columns)
    real = _moments(options, step, *([torch.view_as_real(x) for x in column] for column in columns))
    return tuple([torch.view_as_complex(x) for x in column] for column in real)


def _moments(
    options: _Options, step: Step, us: Column, gs: Column, ms: Column, vs: Column
) -> tuple[Column, Column, Column]:
    (beta1, beta2), donate = options.betas, options.donate
    fused = us[0].device.type in F.FUSED_DEVICES if options.fused is None else options.fused
    if fused and not F.differentiated():
        ms, vs = (F.laid_out(x, us) if donate else F.copies(x, like=us) for x in (ms, vs))
        F.fused_adam(us, F.laid_out(gs, us), ms, vs, step.number, step.rate, options.betas, options.eps)
        return us, ms, vs
    t = float(step.number.item())
    ms = F.lerp(ms, gs, 1 - beta1, inplace=donate)
    vs = F.addcmul(F.mul(vs, beta2, inplace=donate), gs, gs, 1 - beta2, inplace=True)
    roots = F.shift(F.div(F.sqrt(vs), (1 - beta2**t) ** 0.5, inplace=True), options.eps, inplace=True)
    return F.addcdiv(us, ms, roots, step.rate / (1 - beta1**t) * -1, inplace=True), ms, vs
