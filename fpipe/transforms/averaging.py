# SPDX-License-Identifier: Apache-2.0
"""Sums and averages over steps: gradients of several calls in one step, and moving averages.

This module must not know ranks or optimizers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from . import foreach as F
from .leaves import Column, Places, count, map_kinds, places, zeros
from .optimizer import weights_of
from .transform import Params, State, Transform, Updates, apply_updates, leafwise


class AccumulateState(NamedTuple):
    """``calls``: since the last step; ``total``: the sum of their gradients (undefined if ``calls``
    is 0).
    """

    calls: Tensor
    total: Updates


def accumulate(
    k: int, *, reduction: Literal["mean", "sum"] = "mean", dtype: torch.dtype | None = None
) -> Transform:
    """One step for every k calls, from the mean (or the sum) of their gradients.

    In a chain, the transforms behind it run at every k-th call only; at the other calls the updates
    are ``None``, with which :func:`apply_updates` changes nothing.

    Args:
        k: the number of calls.
        reduction: ``"mean"`` or ``"sum"``.
        dtype: that of the sum; by default the parameter's.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if ``k`` is not a whole number above 0, or ``reduction`` is unknown.

    >>> from fpipe.transforms import chain, sgd
    >>> tx = chain(accumulate(2), sgd(1.0))
    >>> params = [torch.zeros(1)]
    >>> updates, state = tx.update([torch.ones(1)], tx.init(params), params)
    >>> updates is None
    True
    >>> tx.update([torch.ones(1) * 3], state, params)[0]
    [tensor([-2.])]
    """
    if not isinstance(k, int) or k < 1:
        raise TransformError(f"accumulate({k!r}); a step needs a whole number of calls, 1 at least")
    if reduction not in ("mean", "sum"):
        raise TransformError(f"reduction={reduction!r}; there are 'mean' and 'sum'")

    def step(at: Places, state: State, params: Params) -> tuple[Column | None, State]:
        totals = at.of(state.total, "the state")
        fresh = F.cast_like(at.leaves, totals)
        totals = map_kinds(F.add, totals, fresh) if state.calls.item() else fresh
        after = AccumulateState((state.calls + 1) % k, at.tree(totals, base=state.total))
        if after.calls.item():
            return None, after
        return map_kinds(lambda ts: F.div(ts, k), totals) if reduction == "mean" else totals, after

    return leafwise(lambda params: AccumulateState(count(), zeros(params, dtype)), step)


class EmaState(NamedTuple):
    """``step``: number of steps; ``average``: of the updates, before debiasing, or of the
    parameters.
    """

    step: Tensor
    average: Updates


def ema(
    decay: float,
    *,
    of: Literal["updates", "params"] = "updates",
    debias: bool = True,
    dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Transform:
    """The exponential moving average of the updates, which replaces them; or of the parameters, in
    the state.

    Args:
        decay: the factor of the old average.
        of: ``"updates"`` is optax's: ``average = decay * average + (1 - decay) * update``.
            ``"params"`` comes last in a chain and returns the updates unchanged; ``state.average``
            is the average of the parameters as they will be after the step, starting from those at
            init.
        debias: whether averages of updates are divided by ``1 - decay ** t``.
        dtype: that of the average; by default the parameter's.
        donate: write the average into the memory of the old one, which must not be used again.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if an argument is out of its range. The transform raises it if it needs
        parameters and gets
            none.

    >>> tx = ema(0.9, of="params")
    >>> params = [torch.zeros(1)]
    >>> _, state = tx.update([torch.ones(1)], tx.init(params), params)
    >>> state.average
    [tensor([0.1000])]
    """
    if not 0 <= decay <= 1:
        raise TransformError(f"decay={decay}; an average needs a decay between 0 and 1")
    if of not in ("updates", "params"):
        raise TransformError(f"of={of!r}; there are 'updates' and 'params'")

    of_params = of == "params"

    def init(params: Params) -> State:
        start = zeros(params, dtype)
        if of_params:
            at = places(start)
            pairs = zip(at.of(params, "params"), at.leaves, strict=True)
            start = at.tree(p.detach().to(zero.dtype, copy=True) for p, zero in pairs)
        return EmaState(count(), start)

    def step(at: Places, state: State, params: Params) -> tuple[Column, State]:
        new, old = at.leaves, at.of(state.average, "the state")
        if of_params:
            weights_of(at, params, "ema(of='params')")
            new = at.of(apply_updates(params, at.tree(at.leaves)), "params")
        averages = map_kinds(
            lambda xs, ys: F.lerp(xs, ys, 1 - decay, inplace=donate), old, F.cast_like(new, old)
        )
        after = EmaState(state.step + 1, at.tree(averages, base=state.average))
        if of_params:
            return at.leaves, after
        if debias:
            correction = 1 - decay ** int(after.step.item())
            averages = map_kinds(lambda xs: F.div(xs, correction), averages)
        return F.cast_like(averages, at.leaves), after

    return leafwise(init, step, donates=donate)
