"""Sums and averages over steps: gradients of several calls in one step, and moving averages.

Knows no ranks and no optimizer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, tree_map
from . import _foreach as F
from ._base import State, Transform, apply_updates
from ._late import donating
from ._places import by_kind, count, places, recording, zeros


class AccumulateState(NamedTuple):
    """``calls``: since the last step; ``total``: the sum of their gradients (without meaning where there is none)."""

    calls: Tensor
    total: Tree


def accumulate(k: int, *, reduction: Literal["mean", "sum"] = "mean", dtype: torch.dtype | None = None) -> Transform:
    """One step for every k calls, from the mean (or the sum) of their gradients; no step at the others.

    In a chain, what stands behind it runs at every k-th call only; at the others the updates are ``None``, for which
    :func:`apply_updates` changes nothing. ``dtype`` is that of the sum (default: the parameter's).

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

    def init(params: Tree) -> State:
        return AccumulateState(count(), zeros(params, dtype))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        with recording(at.leaves):
            totals = at.of(state.total, "the state")
            fresh = F.cast_like(at.leaves, totals)
            if state.calls.item():
                totals = by_kind(lambda ts, gs: [F.add(ts, gs)], totals, fresh)[0]
            else:
                totals = fresh
            after = AccumulateState((state.calls + 1) % k, at.tree(totals, base=state.total))
            if after.calls.item():
                return None, after
            if reduction == "mean":
                totals = by_kind(lambda ts: [F.div(ts, k)], totals)[0]
            return at.tree(totals), after

    return Transform(init, update)


class EmaState(NamedTuple):
    """``step``: steps made; ``average``: of the updates, not yet debiased, or of the parameters."""

    step: Tensor
    average: Tree


def ema(
    decay: float,
    *,
    of: Literal["updates", "params"] = "updates",
    debias: bool = True,
    dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Transform:
    """The exponential moving average of the updates, in their place; or of the parameters, beside them.

    ``of="updates"`` is optax's: ``average = decay * average + (1 - decay) * update``, divided by ``1 - decay ** t``
    where ``debias``. ``of="params"`` stands last in a chain, hands the updates on, and keeps in ``state.average`` the
    average of the parameters as they will be after the step, starting from those at init (nothing to debias).
    ``dtype`` is that of the average; ``donate=True`` writes it into the memory of the old one.

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

    def init(params: Tree) -> State:
        start = zeros(params, dtype)
        if of == "params":
            start = tree_map(lambda z, p: p.detach().to(z.dtype, copy=True), start, _like(start, params))
        return EmaState(count(), start)

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        if of == "params" and params is None:
            raise TransformError("ema(of='params') needs the parameters; call tx.update(updates, state, params)")
        with recording(at.leaves):
            averages = at.of(state.average, "the state")
            new = at.of(apply_updates(params, grads), "params") if of == "params" else at.leaves
            new = F.cast_like(new, averages)
            averages = by_kind(lambda xs, ys: [F.lerp(xs, ys, 1 - decay, own=donate)], averages, new)[0]
            after = EmaState(state.step + 1, at.tree(averages, base=state.average))
            if of == "params":
                return grads, after
            if debias:
                correction = 1 - decay ** int(after.step.item())
                averages = by_kind(lambda xs: [F.div(xs, correction)], averages)[0]
            return at.tree(F.cast_like(averages, at.leaves)), after

    donating(update, donate=donate)
    return Transform(init, update)


def _like(tree: Tree, params: Tree) -> Tree:
    """The parameters that have a place in a tree."""
    at = places(tree)
    return at.keep([True] * len(at.leaves), params)
