# SPDX-License-Identifier: Apache-2.0
"""Master weights: float32 copies of parameters of half precision, which add up what the parameters
would round away.

This module must not know ranks or optimizers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices import wide
from ..errors import checked
from ..tree import tree_map
from .leaves import scaled
from .transform import Params, Pass, State, Transform, added, one_pass, run, weights_of

#: Dtypes of parameters that get a copy.
_HALF = (torch.float16, torch.bfloat16)


class MasterState(NamedTuple):
    """``master``: float32 copies of parameters, None where a parameter has more bits; ``inner``: of
    the transform.
    """

    master: Params
    inner: State


@checked
def master(inner: Transform, *, donate: bool = False) -> Transform:
    """Run a transform on float32 copies of bfloat16 and float16 parameters.

    ``1 + 1e-3`` is 1 in bfloat16, so small updates of such parameters are lost. Here they are added
    to the copies, which are part of the state, and after :func:`apply_updates` each parameter is
    its copy, rounded; in float16, copies beyond its range become its largest number, from which a
    parameter can return. The inner transform gets gradients and parameters in float32, and its
    moments are in float32. Other parameters have no copy.

    Updates are in float64 where the device has that, so that their sum with the parameters has no
    other rounding. Parameters that are changed in another way, as by loading a checkpoint, need a
    new state.

    Args:
        inner: an optimizer, or a chain that ends in one.
        donate: write the new copies into the memory of the old ones, which must not be used again.

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

    def init(params):
        def widened(leaf):
            half = isinstance(leaf, Tensor) and leaf.dtype in _HALF
            return leaf.detach().float() if half else leaf

        masters = tree_map(widened, params)
        copies = tree_map(lambda leaf, copy: None if copy is leaf else copy, params, masters)
        return MasterState(copies, inner.init(masters))

    def body(at, state, params, how):
        before = weights_of(at, params, "master")
        copies = at.column(state.master, "the state")
        halves = [copy is not None for copy in copies]
        like = [p if copy is None else copy for p, copy in zip(before, copies, strict=True)]
        inside = how
        grads = at.leaves
        if how is not None:
            grads = scaled(grads, how.factor)  # before they are wider, as an update does
            inside = Pass(donate and (how.donate or all(halves)))
        gs = [g.float() if half else g for g, half in zip(grads, halves, strict=True)]
        tree, after = run(inner, at.tree(gs), state.inner, at.tree(like, params), inside)
        if tree is None:
            return None, MasterState(state.master, after)
        column = at.column(tree, "the updates")
        if how is None:  # updates after which each parameter is its new copy, rounded
            new = [i for i, half in enumerate(halves) if half and column[i] is not None]
            sums = added([copies[i] for i in new], [column[i] for i in new], donate)
            for i, copy in zip(new, sums, strict=True):
                exact = wide(copy.device)
                column[i] = rounded(copy, before[i]).to(exact) - before[i].to(exact)
                copies[i] = copy
        else:
            copies = [x if half else None for x, half in zip(column, halves, strict=True)]
            column = [
                x if not half else p.copy_(rounded(x, p)) if how.donate else rounded(x, p)
                for p, x, half in zip(before, column, halves, strict=True)
            ]
        masters = MasterState(at.tree(copies, state.master), after)
        return at.tree(column, None if how is None else params), masters

    rate = inner.rate
    made = one_pass(init, body)
    return made if rate is None else replace(made, rate=lambda state: rate(state.inner))


def rounded(copy: Tensor, like: Tensor) -> Tensor:
    """A copy in the dtype of its parameter; a finite number stays finite in float16.

    >>> rounded(torch.tensor([7e4, -7e4, torch.inf]), torch.ones(1, dtype=torch.float16)).tolist()
    [65504.0, -65504.0, inf]
    """
    if like.dtype is torch.float16:
        most = torch.finfo(torch.float16).max
        copy = torch.where(copy.isinf(), copy, copy.clamp(-most, most))
    return copy.to(like.dtype)
