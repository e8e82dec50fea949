# SPDX-License-Identifier: Apache-2.0
"""What all optimizers with moving averages share: their state, learning rate, weight decay and
dtypes.

An optimizer is its arithmetic, ``arithmetic(step, *moments) -> (updates, *moments)``, on columns of
leaves of one device and dtype. A step in one pass runs it on a block of leaves at a time and adds
the updates while they are in the cache; a kernel that updates parameters itself takes the place of
both. This module must not know which optimizer, nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import (
    Params,
    State,
    Transform,
    Update,
    Updates,
    added,
    in_two_passes,
    leafwise,
    refuse_shared,
)
from ._places import (
    Column,
    Mask,
    Places,
    by_kind,
    count,
    flags,
    mask_of,
    places,
    recording,
    scaled,
    zeros,
)

#: A number, or a function of the number of steps before this one.
Rate: TypeAlias = float | Callable[[int], float]
#: From a :class:`Step` and a column per moment to new parameters and moments; None for leaves that
#: it cannot update.
Kernel: TypeAlias = Callable[..., "Sequence[Column] | None"]
#: Elements of the parameters of a block on a CPU.
_BLOCK = 1 << 18


def rate_at(rate: Rate, steps: Tensor) -> float:
    """The value of a rate at a step.

    >>> rate_at(0.5, torch.tensor(7)), rate_at(lambda step: 0.1 * step, torch.tensor(2))
    (0.5, 0.2)
    """
    return float(rate(int(steps.item()))) if callable(rate) else rate


class Step(NamedTuple):
    """One step of an optimizer: what its arithmetic reads besides the moments, for leaves of one
    device and dtype.
    """

    number: Tensor  # from 1
    rate: float
    decay: float
    donate: bool
    at: Places  # of all leaves
    positions: list[int]  # of these leaves among all
    grads: Column
    params: Column  # of None where nothing decays
    decays: list[bool]
    donate_params: bool = False

    def decayed(self, us: Column) -> Column:
        """Updates, which are changed, with decoupled decay."""
        return decay(us, self.params, self.decays, -self.rate * self.decay, inplace=True)


def optimizer(
    name: str,
    state_type: Callable[..., State],
    arithmetic: Callable[..., Sequence[Column]],
    lr: Rate,
    *,
    moments: int = 1,
    decay: float = 0.0,
    mask: Mask | None = None,
    dtype: torch.dtype | None = None,
    donate: bool = False,
    kernel: Kernel | None = None,
    blocks: bool = True,
) -> Transform:
    """A transform from the arithmetic of an optimizer.

    Args:
        name: of the optimizer, for messages.
        state_type: makes a state of the number of steps and a tree per moment.
        arithmetic: from a :class:`Step` and a column per moment to the updates and the new moments.
        lr: the learning rate.
        moments: how many trees the state has.
        decay: the weight decay; the arithmetic applies it, and this function passes the parameters
            if it is not 0.
        mask: which leaves decay; all of them by default.
        dtype: that of the moments; by default the parameters'.
        donate: whether the arithmetic writes the new moments into the memory of the old ones.
        kernel: from a :class:`Step` and the moments to new parameters and moments; None where it
            cannot.
        blocks: whether the arithmetic of a leaf is independent of the leaves beside it.
    """

    if not callable(lr) and (isinstance(lr, (bool, str)) or not hasattr(lr, "__float__")):
        raise TransformError(f"lr={lr!r} of {name}; give a number, or a function of the step")
    rule = _Rule(
        name, state_type, arithmetic, lr, moments, decay, mask, dtype, donate, kernel, blocks
    )
    tx = leafwise(rule.init, rule.update, donates=donate)
    return replace(
        tx,
        in_one_pass=partial(rule.in_one_pass, tx.update),
        rate=lambda state: rate_at(lr, state.step),
    )


class _Rule(NamedTuple):
    """The arguments of :func:`optimizer`, and the functions of its transform."""

    name: str
    state_type: Callable[..., State]
    arithmetic: Callable[..., Sequence[Column]]
    lr: Rate
    moments: int
    decay: float
    mask: Mask | None
    dtype: torch.dtype | None
    donate: bool
    kernel: Kernel | None
    blocks: bool

    def init(self, params: Params) -> State:
        if self.mask is not None:
            mask_of(self.mask, params)  # raises
        return self.state_type(count(), *(zeros(params, self.dtype) for _ in range(self.moments)))

    def update(self, at: Places, state: State, params: Params) -> tuple[Column, State]:
        return self._run(
            self.arithmetic,
            at,
            state,
            params,
            f"{self.name} with weight decay" if self.decay else "",
        )

    def in_one_pass(
        self,
        update: Update,
        grads: Updates,
        state: State,
        params: Params,
        donate: bool,
        factor: Tensor | None,
    ) -> tuple[Params, State]:
        at, who = places(grads), f"a step of {self.name}"
        with recording(at.leaves, [factor]):
            if F.differentiated():
                return in_two_passes(update, grads, state, params, donate, factor)
        if donate:
            refuse_shared(at, weights_of(at, params, who))
        step = partial(_step, self.arithmetic, self.kernel, donate, factor)
        single = (
            self.kernel is not None and self.donate and donate and factor is None
        )  # nothing is read twice
        keys = partial(_blocks, single) if self.blocks else lambda weights, decays: None
        with torch.no_grad():
            after, state = self._run(step, at, state, params, who, keys)
        return at.tree(after, base=params), state

    def _run(
        self,
        step: Callable[..., Sequence[Column]],
        at: Places,
        state: State,
        params: Params,
        needs_params: str,
        keys: Callable[[Column, list[bool]], Sequence[Hashable] | None] = lambda weights, decays: (
            None
        ),
    ) -> tuple[Column, State]:
        """``step(Step, *moments)`` on all leaves: its first column, and a state of the others."""
        if not hasattr(state, "step"):
            raise TransformError(
                f"{self.name} got the state {state!r}; pass that of tx.init(params)"
            )
        number, trees = state.step + 1, state[1 : 1 + self.moments]
        columns, first = [at.of(tree, "the state") for tree in trees], at.leaves
        weights = weights_of(at, params, needs_params) if needs_params else [None] * len(first)
        decays = flags(at, self.mask, params) if self.decay else [False] * len(first)
        if first:
            values = partial(
                Step, number, rate_at(self.lr, state.step), self.decay, self.donate, at
            )

            def each(_, *parts):
                return step(values(*parts[:4]), *parts[4:])

            kinds, inputs = (
                columns[0] if columns else first,
                (list(range(len(first))), first, weights, decays),
            )
            first, *columns = by_kind(each, kinds, *inputs, *columns, keys=keys(weights, decays))
        return first, self.state_type(
            number, *(at.tree(c, tree) for c, tree in zip(columns, trees, strict=True))
        )


def _step(
    arithmetic: Callable[..., Sequence[Column]],
    kernel: Kernel | None,
    donate: bool,
    factor: Tensor | None,
    step: Step,
    *moments: Column,
) -> Sequence[Column]:
    """New parameters and moments of a block of leaves."""
    grads = step.grads if factor is None else scaled(step.grads, factor)
    step = step._replace(grads=grads, donate_params=donate)
    after = None if kernel is None else kernel(step, *moments)
    if after is None:
        us, *after = arithmetic(step, *moments)
        after = added(step.params, us, donate), *after
    return after


def _blocks(single: bool, params: Column, decays: list[bool]) -> list[Hashable]:
    """A key for each leaf: leaves of one device, dtype and decay, on a CPU as many as its cache
    holds.

    ``single``: as many as there are.
    """
    if single:
        return [(leaf.device, leaf.dtype, on) for leaf, on in zip(params, decays, strict=True)]
    last: dict[Hashable, int] = {}  # of a kind: its last block
    elements, keys = list[int](), list[Hashable]()
    for leaf, on in zip(params, decays, strict=True):
        kind = leaf.device, leaf.dtype, on
        block = last.get(kind)
        if block is None or (elements[block] >= _BLOCK and leaf.device.type == "cpu"):
            block = last[kind] = len(elements)
            elements.append(0)
        elements[block] += leaf.numel()
        keys.append(block)
    return keys


def weights_of(at: Places, params: Params, who: str) -> Column:
    """The parameters at the places of the gradients, for a transform that requires them."""
    if params is None:
        raise TransformError(f"{who} needs the parameters; call tx.update(grads, state, params)")
    return at.of(params, "params")


def decay(
    xs: Column, params: Column, on: Sequence[bool], rate: float, *, inplace: bool = False
) -> Column:
    """``x + rate * param`` where a flag is on, and x itself elsewhere."""
    if all(on):
        return F.add(xs, params, rate, inplace=inplace)
    sums = iter(F.add(where(xs, on), where(params, on), rate, inplace=inplace))
    return [next(sums) if flag else x for x, flag in zip(xs, on, strict=True)]


def where(column: Column, on: Sequence[bool]) -> Column:
    """The leaves whose flag is on."""
    return [x for x, flag in zip(column, on, strict=True) if flag]
