# SPDX-License-Identifier: Apache-2.0
"""What all optimizers with moving averages share: their state, learning rate, weight decay and
dtypes.

An optimizer is its arithmetic, ``arithmetic(step, *moments) -> (updates, *moments)``, on columns of
leaves of one device and dtype. A step in one pass runs it on a block of leaves at a time and adds
the updates while they are in the cache; a kernel that updates parameters itself takes the place of
both. This module must not know which optimizer, nor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import TransformError
from .leaves import Column, Mask, by_kind, count, flags, kind, mask_of, scaled, zeros
from .transform import Transform, added, one_pass, shown, weights_of

#: A number, or a function of the number of steps before this one.
Rate: TypeAlias = float | Callable[[int], float]
#: Elements of the parameters of a block on a CPU.
_BLOCK = 1 << 18


def rate_at(rate: Rate, steps: Tensor, least: float = 0.0) -> float:
    """The value of a rate at a step.

    >>> rate_at(0.5, torch.tensor(7)), rate_at(lambda step: 0.1 * step, torch.tensor(2))
    (0.5, 0.2)
    """
    if not callable(rate):
        return rate
    step = int(steps.item())
    value = float(rate(step))
    if not least <= value < math.inf:
        raise TransformError(f"the rate of step {step} is {value}; {_RULE[least]}")
    return value


#: By the least value of a rate: what its function must return.
_RULE = {
    0.0: "a learning rate is a finite number of 0 or more, and the step counts from 0",
    -math.inf: "a factor is a finite number, and the step counts from 0",
}


class Step(NamedTuple):
    """One step of an optimizer: what its arithmetic reads besides the moments, for leaves of one
    device and dtype.
    """

    number: Tensor  # from 1
    rate: float
    decay: float  # 0 for leaves that do not decay
    grads: Column
    params: Column  # of None where nothing decays
    donate: bool  # whether new moments are written into the memory of the old ones
    donate_params: bool


#: From a step and a column for each moment to the updates and the new moments.
Arithmetic: TypeAlias = Callable[..., tuple[Column, ...]]
#: From a step and a column for each moment to new parameters and moments; None where it cannot.
Kernel: TypeAlias = Callable[..., "tuple[Column, ...] | None"]


def optimizer(
    name: str,
    state_type: type,
    arithmetic: Arithmetic,
    lr: Rate,
    *,
    moments: int = 1,
    decay: float = 0.0,
    mask: Mask | None = None,
    dtype: torch.dtype | None = None,
    donate: bool = False,
    kernel: Kernel | None = None,
) -> Transform:
    """A transform from the arithmetic of an optimizer.

    Args:
        name: of the optimizer, for messages.
        state_type: makes a state of the number of steps and a tree per moment.
        arithmetic: see :data:`Arithmetic`.
        lr: the learning rate.
        moments: how many trees the state has.
        decay: the weight decay; the arithmetic applies it, and this function passes the parameters
            if it is not 0.
        mask: which leaves decay; all of them by default.
        dtype: that of the moments; by default the parameters'.
        donate: whether the arithmetic writes the new moments into the memory of the old ones.
        kernel: see :data:`Kernel`.
    """
    one = hasattr(lr, "__float__") and not getattr(lr, "ndim", 0)
    if not callable(lr) and (isinstance(lr, (bool, str)) or not one):
        raise TransformError(f"lr={lr!r} of {name}; give a number, or a function of the step")
    if isinstance(lr, (int, float)) and not 0 <= lr < math.inf:
        raise TransformError(
            f"lr={lr!r} of {name}; give a finite number of 0 or more, or a function of the step"
        )

    def init(params):
        if mask is not None:
            mask_of(mask, params)  # raises
        return state_type(count(), *(zeros(params, dtype) for _ in range(moments)))

    def body(at, state, params, how):
        if not isinstance(state, state_type):
            raise TransformError(
                f"the state of {name} is {shown(state)}; pass that of tx.init(params), in the "
                "order tx.update(grads, state, params)"
            )
        number = state.step + 1
        rate = rate_at(lr, state.step)
        trees = state[1 : 1 + moments]
        before = [at.of(tree, "the state") for tree in trees]
        donate_params = how is not None and how.donate
        weights: Column = [None] * len(at.leaves)
        if how is not None or decay:
            weights = weights_of(at, params, f"{name} with weight decay")
        decays = flags(at, mask, params) if decay else [False] * len(at.leaves)

        def block(gs, ps, on, *old):
            gs = gs if how is None else scaled(gs, how.factor)
            step = Step(number, rate, decay if on[0] else 0.0, gs, ps, donate, donate_params)
            after = None if how is None or kernel is None else kernel(step, *old)
            if after is None:
                us, *after = arithmetic(step, *old)
                after = us if how is None else added(ps, us, donate_params), *after
            return after

        if how is None:
            keys = _blocks((before or [at.leaves])[0], decays, math.inf)
        else:
            in_place = kernel is not None and donate and how.donate and how.factor is None
            keys = _blocks(weights, decays, math.inf if in_place else _BLOCK)
        after: Sequence[Column] = [[]] * (1 + moments)
        if at.leaves:
            after = by_kind(block, at.leaves, weights, decays, *before, keys=keys)
        states = (at.tree(new, tree) for new, tree in zip(after[1:], trees, strict=True))
        return at.tree(after[0], None if how is None else params), state_type(number, *states)

    return replace(
        one_pass(init, body),
        rate=lambda state: rate_at(lr, state.step),
        name=f"fpipe.{name}({shown(lr)})",
    )


def _blocks(leaves: Column, decays: list[bool], size: float) -> list[Hashable]:
    """A key for each leaf: leaves of one kind and decay, on a CPU about ``size`` elements."""
    last: dict[Hashable, int] = {}  # of a kind: its last block
    elements = list[int]()
    keys = []
    for leaf, on in zip(leaves, decays, strict=True):
        alike = kind(leaf), on
        block = last.get(alike)
        if block is None or (elements[block] >= size and leaf.device.type == "cpu"):
            block = last[alike] = len(elements)
            elements.append(0)
        elements[block] += leaf.numel()
        keys.append(block)
    return keys
