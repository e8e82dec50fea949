# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose arithmetic is elementwise: SGD and AdamW.

SGD, plain, with momentum, or with Nesterov momentum (Sutskever et al. 2013), as torch.optim.SGD:

    b ← μ b + (1 − dampening) g      (the first b is g)
    update = −lr · b,   Nesterov: −lr · (g + μ b),   no momentum: −lr · g

AdamW: Decoupled Weight Decay Regularization, Loshchilov and Hutter 2019 (arXiv:1711.05101), as
torch.optim.AdamW:

    m ← lerp(m, g, 1 − β₁)      v ← β₂ v + (1 − β₂) g²
    update = −lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)  −  lr · decay · p

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

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError, checked
from . import foreach as F
from .leaves import Mask
from .optimizer import Arithmetic, Kernel, Rate, optimizer
from .transform import Transform, Updates


class SgdState(NamedTuple):
    """``step``: number of steps; ``momentum``: the running sum b, or None without momentum."""

    step: Tensor
    momentum: Updates = None


@checked
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
    if not (momentum >= 0 and weight_decay >= 0):
        raise TransformError(
            f"momentum={momentum}, weight_decay={weight_decay}; sgd needs both to be 0 at least"
        )

    def arithmetic(step, *sums):
        gs = step.grads
        if step.decay:
            gs = F.add(gs, step.params, alpha=step.decay)
        if not sums:
            return (F.mul(gs, -step.rate),)
        (bs,) = sums
        gs = F.cast(gs, bs[0].dtype)
        if step.number.item() == 1:
            bs = [g.clone() for g in gs]
        else:
            bs = F.mul(bs, momentum, inplace=donate)
            bs = F.add(bs, gs, alpha=1 - dampening, inplace=True)
        return F.mul(F.add(gs, bs, alpha=momentum) if nesterov else bs, -step.rate), bs

    return optimizer(
        "sgd",
        SgdState,
        arithmetic,
        lr,
        moments=int(momentum > 0),
        decay=weight_decay,
        donate=donate,
    )


class AdamState(NamedTuple):
    """``step``: number of steps; ``m`` and ``v``: moving averages of the gradients and of their
    squares.
    """

    step: Tensor
    m: Updates
    v: Updates


@checked
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
        mask: which leaves decay: patterns of names such as ``["*.w"]``, a tree of bools, or a
            function of the parameters.
        dtype: that of the state and of the updates; by default the parameter's.
        fused: False uses torch's foreach kernels step by step. By default the one-pass kernel runs
            where there is one; its last bits may differ. ``step`` then has the bits of
            ``torch.optim.AdamW(fused=True)``, unless leaves are complex or ``dtype`` is another
            one: then those of ``update`` and ``apply_updates``.
        donate: write the new state into the memory of the old one, which must not be used again.

    Raises:
        TransformError: if an argument is out of its range.

    >>> params = [{"w": torch.ones(2)}, None]
    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> grads, state = params, tx.init(params)
    >>> updates, state = tx.update(grads, state, params)
    >>> updates, state.step.item()
    ([{'w': tensor([-0.1000, -0.1000])}, None], 1)
    """
    if not all(0 <= beta < 1 for beta in betas) or not (eps >= 0 and weight_decay >= 0):
        raise TransformError(
            f"betas={betas}, eps={eps}, weight_decay={weight_decay}; "
            f"adamw needs betas in [0, 1), eps >= 0 and weight_decay >= 0"
        )
    arithmetic, kernel = _adam(betas, eps, fused)
    return optimizer(
        "adamw",
        AdamState,
        arithmetic,
        lr,
        moments=2,
        decay=weight_decay,
        mask=mask,
        dtype=dtype,
        donate=donate,
        kernel=kernel,
    )


def _adam(betas: tuple[float, float], eps: float, fused: bool | None) -> tuple[Arithmetic, Kernel]:
    """The arithmetic of AdamW, and the kernel that updates parameters."""
    beta1, beta2 = betas

    def has_kernel(leaf):
        if fused is None:
            return leaf.device.type in F.FUSED_DEVICES
        return fused

    def in_one_pass(step, first, gs, ms, vs, decay):
        columns = first, (ms, step.donate), (vs, step.donate)
        return F.fused_adamw(columns, gs, step.number, step.rate, betas, eps, decay)

    def parameters(step, ms, vs):
        """Parameters and moments from torch's fused kernel; None where it does not take them."""
        p = step.params[0]
        if not has_kernel(p) or p.is_complex() or p.dtype != ms[0].dtype:
            return None
        gs = F.cast(step.grads, p.dtype)
        return in_one_pass(step, (step.params, step.donate_params), gs, ms, vs, step.decay)

    def updates(step, ms, vs):
        """Updates and moments; the updates start as the decay alone."""
        dtype = ms[0].dtype
        if step.decay:
            us = F.mul(F.cast(step.params, dtype), -step.rate * step.decay)
        else:
            us = [torch.zeros_like(m) for m in ms]
        columns = us, F.cast(step.grads, dtype), ms, vs
        if not dtype.is_complex:
            return real_updates(step, *columns)
        real = ([torch.view_as_real(x) for x in xs] for xs in columns)
        after = real_updates(step, *real)
        return tuple([torch.view_as_complex(x) for x in xs] for xs in after)

    def real_updates(step, us, gs, ms, vs):
        if not F.differentiated() and has_kernel(us[0]):
            return in_one_pass(step, (us, True), gs, ms, vs, 0.0)
        t = float(step.number.item())
        ms = F.lerp(ms, gs, 1 - beta1, inplace=step.donate)
        vs = F.mul(vs, beta2, inplace=step.donate)
        vs = F.addcmul(vs, gs, gs, value=1 - beta2, inplace=True)
        roots = F.div(F.sqrt(vs), (1 - beta2**t) ** 0.5, inplace=True)
        roots = F.add(roots, eps, inplace=True)
        rate = -step.rate / (1 - beta1**t)
        return F.addcdiv(us, ms, roots, value=rate, inplace=True), ms, vs

    return updates, parameters
