"""Stochastic gradient descent, plain, with momentum, or with Nesterov's (Sutskever et al. 2013).

    b ← μ b + (1 − dampening) g      (the first b is g)
    update = −lr · b,   Nesterov: −lr · (g + μ b),   no momentum: −lr · g

The arithmetic is that of torch.optim.SGD. Knows no ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..errors import TransformError
from ..tree import Tree
from . import _foreach as F
from ._base import State, Transform
from ._late import donating
from ._places import Column, by_kind, count, places, recording, zeros
from .scaling import Rate, rate_at, scaled, weights_of


class SgdState(NamedTuple):
    """``step``: steps made; ``momentum``: the running sum b, or None without momentum."""

    step: Tensor
    momentum: Tree


def sgd(
    lr: Rate,
    momentum: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    donate: bool = False,
) -> Transform:
    """SGD, with torch's arguments; ``lr`` is a number or a function of the step, which counts from 0.

    ``weight_decay`` is the L2 penalty. ``donate=True`` writes the new state into the memory of the old one.

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

    def init(params: Tree) -> State:
        return SgdState(count(), zeros(params) if momentum else None)

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        rate, first = rate_at(lr, state.step), not state.step.item()
        with recording(at.leaves):
            gs: Column = at.leaves
            if weight_decay:
                weights = weights_of(at, params, "sgd with weight decay")
                gs = by_kind(lambda xs, ps: [F.add(xs, ps, weight_decay)], gs, weights)[0]
            if not momentum:
                return at.tree(scaled(gs, -rate)), SgdState(state.step + 1, None)

            def kernel(bs: Column, gs: Column) -> tuple[Column, Column]:
                gs = F.cast_like(gs, bs)
                if first:
                    bs = F.copies(gs, into=bs if donate else None)
                else:
                    bs = F.add(F.mul(bs, momentum, own=donate), gs, 1 - dampening, own=True)
                return bs, F.mul(F.add(gs, bs, momentum) if nesterov else bs, -rate)

            bs, us = by_kind(kernel, at.of(state.momentum, "the state"), gs)
            return at.tree(us), SgdState(state.step + 1, at.tree(bs, base=state.momentum))

    donating(update, donate=donate)
    return Transform(init, update)
