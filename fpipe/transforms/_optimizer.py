# SPDX-License-Identifier: Apache-2.0
"""What all optimizers with moving averages share: their state, learning rate, weight decay and dtypes.

An optimizer is its arithmetic, ``arithmetic(step, *moments) -> (updates, *moments)``, on columns of leaves of one
device and dtype. This module must not know which optimizer, nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import Params, State, Transform, leafwise
from ._places import Column, Mask, Places, by_kind, count, flags, mask_of, zeros

#: A number, or a function of the number of steps before this one.
Rate: TypeAlias = float | Callable[[int], float]


def rate_at(rate: Rate, steps: Tensor) -> float:
    """The value of a rate at a step.

    >>> rate_at(0.5, torch.tensor(7)), rate_at(lambda step: 0.1 * step, torch.tensor(2))
    (0.5, 0.2)
    """
    return float(rate(int(steps.item()))) if callable(rate) else rate


class Step(NamedTuple):
    """One step of an optimizer: what its arithmetic reads besides the moments, for leaves of one device and dtype."""

    number: Tensor  # from 1
    rate: float
    decay: float
    donate: bool
    at: Places  # of all leaves
    positions: list[int]  # of these leaves among all
    grads: Column
    params: Column  # of None where nothing decays
    decays: list[bool]

    def decayed(self, us: Column) -> Column:
        """Updates, which are changed, with decoupled decay."""
        return decay(us, self.params, self.decays, -self.rate * self.decay, inplace=True)


def optimizer(
    name: str, state_type: Callable[..., State], arithmetic: Callable[..., Sequence[Column]], lr: Rate, *,
    moments: int = 1, decay: float = 0.0, mask: Mask | None = None, dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Transform:  # fmt: skip
    """A transform from the arithmetic of an optimizer.

    Args:
        name: of the optimizer, for messages.
        state_type: makes a state of the number of steps and a tree per moment.
        arithmetic: from a :class:`Step` and a column per moment to the updates and the new moments.
        lr: the learning rate.
        moments: how many trees the state has.
        decay: the weight decay; the arithmetic applies it, and this function passes the parameters if it is not 0.
        mask: which leaves decay; all of them by default.
        dtype: that of the moments; by default the parameters'.
        donate: whether the arithmetic writes the new moments into the memory of the old ones.
    """

    def init(params: Params) -> State:
        if mask is not None:
            mask_of(mask, params)  # raises
        return state_type(count(), *(zeros(params, dtype) for _ in range(moments)))

    def update(at: Places, state: State, params: Params) -> tuple[Column, State]:
        number, trees, positions = state.step + 1, state[1 : 1 + moments], list(range(len(at.leaves)))
        columns = [at.of(tree, "the state") for tree in trees]
        weights, decays = [None] * len(positions), [False] * len(positions)
        if decay:
            weights, decays = weights_of(at, params, f"{name} with weight decay"), flags(at, mask, params)
        step = partial(Step, number, rate_at(lr, state.step), decay, donate, at)
        kernel = lambda _, *parts: arithmetic(step(*parts[:4]), *parts[4:])
        us = at.leaves
        if us:
            us, *columns = by_kind(kernel, columns[0] if moments else us, positions, us, weights, decays, *columns)
        return us, state_type(number, *(at.tree(column, tree) for column, tree in zip(columns, trees, strict=True)))

    return leafwise(init, update, donates=donate)


def weights_of(at: Places, params: Params, who: str) -> Column:
    """The parameters at the places of the gradients, for a transform that requires them."""
    if params is None:
        raise TransformError(f"{who} needs the parameters; call tx.update(grads, state, params)")
    return at.of(params, "params")


def decay(xs: Column, params: Column, on: Sequence[bool], rate: float, *, inplace: bool = False) -> Column:
    """``x + rate * param`` where a flag is on, and x itself elsewhere."""
    if all(on):
        return F.add(xs, params, rate, inplace=inplace)
    sums = iter(F.add(where(xs, on), where(params, on), rate, inplace=inplace))
    return [next(sums) if flag else x for x, flag in zip(xs, on, strict=True)]


def where(column: Column, on: Sequence[bool]) -> Column:
    """The leaves whose flag is on."""
    return [x for x, flag in zip(column, on, strict=True) if flag]
