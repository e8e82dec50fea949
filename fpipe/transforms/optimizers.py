# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose arithmetic is elementwise: SGD, AdamW and Lion.

SGD, plain, with momentum, or with Nesterov momentum (Sutskever et al. 2013), as torch.optim.SGD:

    b ← μ b + (1 − dampening) g      (the first b is g)
    update = −lr · b,   Nesterov: −lr · (g + μ b),   no momentum: −lr · g

AdamW: Decoupled Weight Decay Regularization, Loshchilov and Hutter 2019 (arXiv:1711.05101), as
torch.optim.AdamW:

    m ← lerp(m, g, 1 − β₁)      v ← β₂ v + (1 − β₂) g²
    update = −lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)  −  lr · decay · p

Lion: Symbolic Discovery of Optimization Algorithms, Chen et al. 2023 (arXiv:2302.06675):

    update = −lr · (sign(β₁ m + (1 − β₁) g) + decay · p)      m ← β₂ m + (1 − β₂) g

The formulas and the defaults are torch's. The last bits of a parameter can differ from those of
torch's optimizer, which changes parameters within its formula: an update, decay included, is
rounded before it is added. The method ``step`` of ``adamw`` runs torch's fused kernel on parameters
and has the bits of torch.optim.AdamW(fused=True). The momentum of ``sgd`` and the averages of
``adamw(fused=False)`` have the bits of torch's foreach kernels for the same gradients, and without
decay so have the parameters under ``adamw(fused=False)``.

Updates of bfloat16 and float16 parameters are rounded to them: use :func:`fpipe.master`. This
module must not know ranks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import Transform, Updates
from ._optimizer import Rate, Step, optimizer, where
from ._places import Column, Mask


class SgdState(NamedTuple):
    """``step``: number of steps; ``momentum``: the running sum b, or None without momentum."""

    step: Tensor
    momentum: Updates = None


def sgd(
    lr: Rate,
    momentum: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    donate: bool = False,
) -> Transform:
    """SGD, with torch's arguments. For bfloat16 and float16 parameters, see :func:`master`.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        momentum: the factor of the running sum; 0 keeps none.
        dampening: how much less than 1 the gradient counts in the running sum.
        nesterov: whether the update looks one step ahead.
        weight_decay: an L2 penalty, added to the gradient.
        donate: write the new state into the memory of the old one, which must not be used again.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if an argument is out of its range.

    >>> tx = sgd(0.5, momentum=0.5)
    >>> state = tx.init([torch.zeros(1)])
    >>> updates, state = tx.update([torch.ones(1)], state)
    >>> tx.update([torch.ones(1)], state)[0]
    [tensor([-0.7500])]
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise TransformError(
            f"nesterov with momentum={momentum} and dampening={dampening}; it needs momentum > 0 "
            "and no dampening"
        )
    if momentum < 0 or weight_decay < 0:
        raise TransformError(
            f"momentum={momentum}, weight_decay={weight_decay}; sgd needs both to be 0 at least"
        )
    arithmetic = partial(_sgd, momentum, dampening, nesterov)
    return optimizer(
        "sgd",
        SgdState,
        arithmetic,
        lr,
        moments=int(momentum > 0),
        decay=weight_decay,
        donate=donate,
    )


def _sgd(
    momentum: float, dampening: float, nesterov: bool, step: Step, *sums: Column
) -> tuple[Column, ...]:
    gs = F.add(step.grads, step.params, step.decay) if step.decay else step.grads
    if not sums:
        return (F.mul(gs, -step.rate),)
    (bs,) = sums
    gs = F.cast_like(gs, bs)
    if step.number.item() == 1:
        bs = F.copies(gs, into=bs if step.donate else None)
    else:
        bs = F.add(F.mul(bs, momentum, inplace=step.donate), gs, 1 - dampening, inplace=True)
    return F.mul(F.add(gs, bs, momentum) if nesterov else bs, -step.rate), bs


class AdamState(NamedTuple):
    """``step``: number of steps; ``m`` and ``v``: moving averages of the gradients and of their
    squares.
    """

    step: Tensor
    m: Updates
    v: Updates


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
    """AdamW, with torch's defaults. For bfloat16 and float16 parameters, see :func:`master`.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        betas: the decay of both moving averages.
        eps: what is added to the root.
        weight_decay: decoupled, times the learning rate.
        mask: which leaves decay (see :func:`weight_decay`).
        dtype: that of the state and of the updates; by default the parameter's.
        fused: False uses torch's foreach kernels step by step. By default the one-pass kernel runs
            where there is one; its last bits may differ. ``step`` then has the bits of
            ``torch.optim.AdamW(fused=True)``, unless leaves are complex or ``dtype`` is another
            one: then those of ``update`` and ``apply_updates``.
        donate: write the new state into the memory of the old one, which must not be used again.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if an argument is out of its range.

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
    return optimizer(
        "adamw",
        AdamState,
        partial(_adam, betas, eps, fused),
        lr,
        moments=2,
        decay=weight_decay,
        mask=mask,
        dtype=dtype,
        donate=donate,
        kernel=partial(_adamw, betas, eps, fused),
    )


def _adamw(
    betas: tuple[float, float], eps: float, fused: bool | None, step: Step, ms: Column, vs: Column
) -> tuple[Column, ...] | None:
    """Parameters and moments from torch's fused kernel; None where it does not take them."""
    p = step.params[0]
    if (
        not (p.device.type in F.FUSED_DEVICES if fused is None else fused)
        or p.is_complex()
        or p.dtype != ms[0].dtype
    ):
        return None
    columns = ((step.params, step.donate_params), (ms, step.donate), (vs, step.donate))
    work = [F.writable(xs, given) for xs, given in columns]
    gs = [g.contiguous() for g in F.cast(step.grads, p.dtype)]
    decay = step.decay if step.decays[0] else 0.0
    F.fused_adamw(work[0], gs, work[1], work[2], step.number, step.rate, betas, eps, decay)
    return tuple(F.written(ws, xs, given) for ws, (xs, given) in zip(work, columns, strict=True))


def _adam(
    betas: tuple[float, float], eps: float, fused: bool | None, step: Step, ms: Column, vs: Column
) -> tuple[Column, ...]:
    # the updates start as the decay alone
    decays = iter(
        F.mul(F.cast(where(step.params, step.decays), ms[0].dtype), -step.rate * step.decay)
    )
    us = [
        next(decays) if flag else torch.zeros_like(m)
        for m, flag in zip(ms, step.decays, strict=True)
    ]
    moments, columns = (
        partial(_moments, betas, eps, fused, step),
        (us, F.cast(step.grads, ms[0].dtype), ms, vs),
    )
    if not ms[0].is_complex():
        return moments(*columns)
    real = moments(*([torch.view_as_real(x) for x in column] for column in columns))
    return tuple([torch.view_as_complex(x) for x in column] for column in real)


def _moments(
    betas: tuple[float, float],
    eps: float,
    fused: bool | None,
    step: Step,
    us: Column,
    gs: Column,
    ms: Column,
    vs: Column,
) -> tuple[Column, ...]:
    (beta1, beta2), donate = betas, step.donate
    if not F.differentiated() and (
        us[0].device.type in F.FUSED_DEVICES if fused is None else fused
    ):
        ms, vs = (F.laid_out(x, us) if donate else F.copies(x, like=us) for x in (ms, vs))
        F.fused_adam(us, F.laid_out(gs, us), ms, vs, step.number, step.rate, betas, eps)
        return us, ms, vs
    t = float(step.number.item())
    ms = F.lerp(ms, gs, 1 - beta1, inplace=donate)
    vs = F.addcmul(F.mul(vs, beta2, inplace=donate), gs, gs, 1 - beta2, inplace=True)
    roots = F.shift(F.div(F.sqrt(vs), (1 - beta2**t) ** 0.5, inplace=True), eps, inplace=True)
    return F.addcdiv(us, ms, roots, step.rate / (1 - beta1**t) * -1, inplace=True), ms, vs


class LionState(NamedTuple):
    """``step``: number of steps; ``m``: the moving average of the gradients."""

    step: Tensor
    m: Updates


def lion(
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 1e-3,
    *,
    mask: Mask | None = None,
    dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Transform:
    """Lion, with optax's defaults. For bfloat16 and float16 parameters, see :func:`master`.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        betas: of the average whose sign is the update, and of the moving average.
        weight_decay: decoupled, times the learning rate.
        mask: which leaves decay (see :func:`weight_decay`).
        dtype: that of the state and of the updates; by default the parameter's.
        donate: write the new state into the memory of the old one, which must not be used again.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if an argument is out of its range.

    >>> tx = lion(0.1, weight_decay=0.0)
    >>> tx.update([torch.tensor([3.0, -0.2])], tx.init([torch.zeros(2)]))[0]
    [tensor([-0.1000,  0.1000])]
    """
    if not all(0 <= beta < 1 for beta in betas) or weight_decay < 0:
        raise TransformError(
            f"betas={betas}, weight_decay={weight_decay}; lion needs betas in [0, 1) and decay >= 0"
        )
    return optimizer(
        "lion",
        LionState,
        partial(_lion, betas),
        lr,
        decay=weight_decay,
        mask=mask,
        dtype=dtype,
        donate=donate,
    )


def _lion(betas: tuple[float, float], step: Step, ms: Column) -> tuple[Column, ...]:
    gs = F.cast_like(step.grads, ms)
    us = F.mul(F.sign(F.lerp(ms, gs, 1 - betas[0]), inplace=True), -step.rate, inplace=True)
    return step.decayed(us), F.lerp(ms, gs, 1 - betas[1], inplace=step.donate)
