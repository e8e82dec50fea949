# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent, plain, with momentum, or with Nesterov momentum (Sutskever et al. 2013).

    b ← μ b + (1 − dampening) g      (the first b is g)
    update = −lr · b,   Nesterov: −lr · (g + μ b),   no momentum: −lr · g

The arithmetic is that of torch.optim.SGD. This module must not know ranks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import Transform, Updates
from ._optimizer import Rate, Step, optimizer
from ._places import Column, by_kind, map_kinds
from .scaling import scaled


class SgdState(NamedTuple):
    """``step``: number of steps; ``momentum``: the running sum b, or None without momentum."""

    step: Tensor
    momentum: Updates = None


class _Options(NamedTuple):
    momentum: float
    dampening: float
    nesterov: bool
    decay: float
    donate: bool


def sgd(
    lr: Rate, momentum: float = 0.0, *,
    dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, donate: bool = False,
) -> Transform:  # fmt: skip
    """SGD, with torch's arguments.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        momentum: the factor of the running sum; 0 keeps none.
        dampening: how much less than 1 the gradient counts in the running sum.
        nesterov: whether the update looks one step ahead.
        weight_decay: an L2 penalty, added to the gradient.
        donate: write the new state into the memory of the old one, which must not be used again.

    >>> import torch
    >>> tx = sgd(0.5, momentum=0.5)
    >>> state = tx.init([torch.zeros(1)])
    >>> updates, state = tx.update([torch.ones(1)], state)
    >>> tx.update([torch.ones(1)], state)[0]
    [tensor([-0.7500])]
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise TransformError(
            f"nesterov with momentum={momentum} and dampening={dampening}; it needs momentum > 0 and no dampening"
        )
    if momentum < 0 or weight_decay < 0:
        raise TransformError(f"momentum={momentum}, weight_decay={weight_decay}; sgd needs both to be 0 at least")
    arithmetic = partial(_sgd, _Options(momentum, dampening, nesterov, weight_decay, donate))
    return optimizer("sgd", SgdState, arithmetic, lr, moments=int(momentum > 0), decay=weight_decay, donate=donate)


def _sgd(options: _Options, step: Step, *sums: Column) -> list[Column]:
    gs = step.grads
    if options.decay:
        gs = map_kinds(lambda xs, ps: F.add(xs, ps, options.decay), gs, step.params)
    if not sums:
        return [scaled(gs, -step.rate)]
    return by_kind(partial(_with_momentum, options, step), *sums, gs)


def _with_momentum(options: _Options, step: Step, bs: Column, gs: Column) -> tuple[Column, Column]:
    """Updates and running sums for the leaves of one device and dtype."""
    gs, momentum, donate = F.cast_like(gs, bs), options.momentum, options.donate
    if step.number.item() == 1:
        bs = F.copies(gs, into=bs if donate else None)
    else:
        bs = F.add(F.mul(bs, momentum, inplace=donate), gs, 1 - options.dampening, inplace=True)
    return F.mul(F.add(gs, bs, momentum) if options.nesterov else bs, -step.rate), bs
