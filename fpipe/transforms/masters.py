# SPDX-License-Identifier: Apache-2.0
"""Master weights: float32 copies of parameters of half precision, which add up what the parameters
would round away.

This module must not know ranks or optimizers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tree import tree_map
from . import _foreach as F
from ._base import Params, State, Transform, Update, Updates, in_two_passes, run_step
from ._optimizer import weights_of
from ._over import wide
from ._places import Column, map_kinds, places, recording

#: Dtypes of parameters that get a copy.
_HALF = (torch.float16, torch.bfloat16)


class MasterState(NamedTuple):
    """``master``: float32 copies of parameters, None where a parameter has more bits; ``inner``: of
    the transform.
    """

    master: Params
    inner: State


def master(inner: Transform, *, donate: bool = False) -> Transform:
    """Run a transform on float32 copies of bfloat16 and float16 parameters.

    ``1 + 1e-3`` is 1 in bfloat16, so small updates of such parameters are lost. Here they are added
    to the copies, which are part of the state, and after :func:`apply_updates` each parameter is
    its copy, rounded. The inner transform gets gradients and parameters in float32, and its moments
    are in float32. Other parameters have no copy.

    Updates are in float64 where the device has that, so that their sum with the parameters has no
    other rounding. Parameters that are changed in another way, as by loading a checkpoint, need a
    new state.

    Args:
        inner: an optimizer, or a chain that ends in one.
        donate: write the new copies into the memory of the old ones, which must not be used again.

    Returns:
        A ``Transform``.

    >>> from fpipe.transforms import apply_updates, sgd
    >>> params = [torch.ones(1, dtype=torch.bfloat16)]
    >>> tx, gradient = master(sgd(1e-3)), [torch.full((1,), -1.0, dtype=torch.bfloat16)]
    >>> state = tx.init(params)
    >>> for _ in range(8):
    ...     updates, state = tx.update(gradient, state, params)
    ...     params = apply_updates(params, updates)
    >>> params[0].item(), sgd(1e-3).update(gradient, sgd(1e-3).init(params))[0][0].item()
    (1.0078125, 0.00099945068359375)
    """

    def init(params: Params) -> State:
        copies = tree_map(lambda leaf: leaf.detach().float() if _is_half(leaf) else None, params)
        at = places(params)
        columns = zip(at.column(copies, "the state"), at.leaves, strict=True)
        return MasterState(
            copies, inner.init(at.tree(leaf if copy is None else copy for copy, leaf in columns))
        )

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        at = places(grads)
        with recording(at.leaves):
            before, copies = weights_of(at, params, "master"), at.column(state.master, "the state")
            like = [
                leaf if copy is None else copy for leaf, copy in zip(before, copies, strict=True)
            ]
            halves = [copy is not None for copy in copies]
            updates, after = inner.update(
                at.tree(
                    g.float() if half else g for g, half in zip(at.leaves, halves, strict=True)
                ),
                state.inner,
                at.tree(like, base=params),
            )
            if updates is None:
                return None, MasterState(state.master, after)
            us = at.column(updates, "the updates")
            chosen = [i for i, u in enumerate(us) if halves[i] and u is not None]
            added = _added([copies[i] for i in chosen], [us[i] for i in chosen], donate)
            for i, copy in zip(chosen, added, strict=True):
                exact = wide(copy.device)
                us[i] = copy.to(before[i].dtype).to(exact) - before[i].to(exact)
                copies[i] = copy
            return at.tree(us), MasterState(at.tree(copies, base=state.master), after)

    rate = inner.rate
    return Transform(
        init,
        update,
        donates=donate or inner.donates,
        in_one_pass=partial(_in_one_pass, inner, update, donate),
        rate=None if rate is None else lambda state: rate(state.inner),
    )


def _in_one_pass(
    inner: Transform,
    update: Update,
    donate: bool,
    grads: Updates,
    state: State,
    params: Params,
    donate_params: bool,
    factor: Tensor | None,
) -> tuple[Params, State]:
    at = places(grads)
    with recording(at.leaves, [factor]):
        if F.differentiated():
            return in_two_passes(update, grads, state, params, donate_params, factor)
    before, copies = weights_of(at, params, "master"), at.column(state.master, "the state")
    halves = [copy is not None for copy in copies]
    like = [copy if half else leaf for leaf, copy, half in zip(before, copies, halves, strict=True)]
    gs = [g.detach().float() if half else g for g, half in zip(at.leaves, halves, strict=True)]
    into = donate and (donate_params or all(halves))
    tree, after = run_step(
        inner, at.tree(gs), state.inner, at.tree(like, base=params), into, factor
    )
    new = at.column(tree, "the updates")
    with torch.no_grad():
        pairs = zip(before, new, halves, strict=True)
        rounded = [_rounded(p, x, donate_params) if half else x for p, x, half in pairs]
    masters = [x if half else None for x, half in zip(new, halves, strict=True)]
    return at.tree(rounded, base=params), MasterState(at.tree(masters, base=state.master), after)


def _rounded(param: Tensor, copy: Tensor, donate: bool) -> Tensor:
    return param.copy_(copy) if donate else copy.to(param.dtype)


def _added(copies: Column, updates: Column, donate: bool) -> Column:
    return map_kinds(lambda xs, us: F.add(xs, F.cast_like(us, xs), inplace=donate), copies, updates)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _HALF
