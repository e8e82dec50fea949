# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients of a model, over all of its stages, and clipping by it.

Each stage's share of the norm is a function of that stage's leaves alone and has a slot on a board,
so stages may be placed on ranks in any way. A parameter tied across stages counts once. This module
must not know optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from numbers import Real
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..collectives.group import Group
from ..devices import wide
from ..errors import TransformError, checked
from ..tree import Tree, is_floating, matches, names, unmatched
from . import foreach as F
from .boards import (
    EVERY_LEAF,
    Over,
    as_over,
    board_device,
    by_stage,
    check_whole,
    copies_of,
    listed,
    stages_here,
)
from .leaves import map_kinds, places, recording
from .transform import Transform, shown, times

#: Elements in one row of an exact norm; any number would do, as long as it never changes.
_ROW = 1024

#: Groups of names of leaves that are one parameter.
Tied: TypeAlias = Sequence[Sequence[str]]


class ClipState(NamedTuple):
    """``norm``: that of the last gradients, before they were clipped."""

    norm: Tensor


class _Norm(NamedTuple):
    """How norms of tensors, and of vectors made of them, are computed."""

    p: float
    exact: bool
    device: torch.device  # of the results

    def of(self, leaves: list[Tensor]) -> list[Tensor]:
        """The norm of each leaf; all are of one dtype."""
        leaf = leaves[0]
        if not is_floating(leaf):  # as the count of steps of a state
            raise TransformError(
                f"the gradients have a leaf of {leaf.dtype} of shape {list(leaf.shape)}, and a "
                "norm needs floating ones; pass gradients first, as in tx.update(grads, state, "
                "params)"
            )
        if self.exact:
            return F.whole([_by_rows(leaf.reshape(-1), self.p) for leaf in leaves])
        return F.norms(leaves, self.p)

    def joined(self, norms: list[Tensor]) -> Tensor:
        """The norm of a vector from the norms of its parts, in their order."""
        if not norms:
            return torch.zeros((), device=self.device)
        dtype = reduce(torch.promote_types, [norm.dtype for norm in norms])
        parts = [norm.to(self.device, dtype) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(parts), self.p)

    def over(self, group: Group, norms: list[Tensor], differ: list[bool]) -> Tensor:
        """As :func:`joined`, with the norms that other processes have of leaves that differ."""
        alike, others = (
            [norm for norm, flag in zip(norms, differ, strict=True) if flag is wanted]
            for wanted in (False, True)
        )
        # in one dtype everywhere: a process without elements of a stage does not know the dtype of
        # its leaves
        norm = self.joined(others).to(wide(self.device))
        if math.isinf(self.p):
            is_nan = norm.isnan()  # the maximum of a backend loses it
            both = torch.stack([norm.masked_fill(is_nan, 0.0), is_nan.to(norm.dtype)])
            largest, any_nan = group.all_reduce(both, "max")
            norm = largest.masked_fill(any_nan > 0, math.nan)
        else:
            norm = group.all_reduce(norm.pow(self.p), "sum").pow(1 / self.p)
        return self.joined([self.joined(alike), norm]) if alike else norm


def _by_rows(flat: Tensor, p: float) -> Tensor:
    """An exact norm: one thread adds up each row of a fixed length, in the order of the
    elements.
    """
    dtype = F.norm_dtype(flat)
    while flat.numel() > _ROW:
        whole = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), p, dim=1, dtype=dtype)
        if whole < flat.numel():
            tail = torch.linalg.vector_norm(flat[whole:], p, dtype=dtype)
            rows = torch.cat([rows, tail.reshape(1)])
        flat = rows
        dtype = None
    return torch.linalg.vector_norm(flat, p, dtype=dtype)


@checked
def global_norm(
    tree: Tree,
    *,
    over: Over | None = None,
    p: float = 2.0,
    exact: bool = False,
    tied: Tied | None = None,
    shards: Group | None = None,
) -> Tensor:
    """The p-norm of all leaves as one vector, over all stages of a pipeline, on every process; no
    wait for the device.

    Args:
        tree: one entry per stage.
        over: the pipeline; without one the tree is complete.
        p: the order of the norm, which may be ``inf``.
        exact: add in an order that does not depend on the number of ranks or threads. With
            ``zero=`` this gathers gradients, one stage at a time; shards of other kinds are added
            last, so their number may show in the last bit.
        tied: groups of names of leaves that are one parameter, of which the first counts; by
            default those of ``over``.
        shards: a group whose processes hold shards of the same leaves; by default that of ``over``.

    Returns:
        A tensor without axes.

    Raises:
        TransformError: if an option is wrong, or the tree does not fit the pipeline.

    >>> global_norm([torch.tensor([3.0]), {"w": torch.tensor([4.0])}]).item()
    5.0
    >>> global_norm([torch.tensor([3.0]), torch.tensor([-4.0])], p=float("inf")).item()
    4.0
    """
    over = _checked(over, p)
    groups = getattr(over, "tied", ()) if tied is None else tied
    repeated = {name for group in groups for name in tuple(group)[1:]}
    check_whole(tree, over)
    if repeated:
        every = names(tree)
        fault = unmatched(repeated.difference(every), every, places(tree).missing())
        if fault:
            raise TransformError(f"tied= names {fault}")
    group, differing = copies_of(over)
    gathers = exact and differing == EVERY_LEAF
    if shards is not None:
        group = shards
        differing = EVERY_LEAF
        gathers = False
    norm = _Norm(p, exact, board_device(tree, over))
    norms: dict[int, Tensor] = {}
    for stage, part in stages_here(tree, over).items():
        alone = tree
        if listed(tree):
            alone = [part if stage == s else None for s in range(len(tree))]
        shared = group
        leaves = places(alone).leaves
        if gathers:
            whole = places(over.unshard(alone)).leaves  # type: ignore[union-attr]
            # a leaf is not gathered where it differs by copy or is beside a frozen one
            if all(shard is not leaf for shard, leaf in zip(leaves, whole, strict=True)):
                leaves = whole
                shared = None
        every = names(alone) if repeated or differing else [""] * len(leaves)
        pairs = zip(leaves, every, strict=True)
        chosen = [(leaf, name) for leaf, name in pairs if leaf.numel() and name not in repeated]
        found = map_kinds(norm.of, [leaf for leaf, _ in chosen])
        if shared is None:
            norms[stage] = norm.joined(found)
        else:
            differ = [matches(name, differing) for _, name in chosen]
            norms[stage] = norm.over(shared, found, differ)
    return torch.linalg.vector_norm(by_stage(tree, over, norms), p)


def _checked(over: Over | None, p: float) -> Over | None:
    if not isinstance(p, (Real, Tensor)) or not p > 0:
        raise TransformError(f"p={p!r}; a norm needs p > 0, or float('inf')")
    return as_over(over)


@checked
def clip_by_global_norm(
    max_norm: float,
    *,
    over: Over | None = None,
    p: float = 2.0,
    exact: bool = False,
    tied: Tied | None = None,
    shards: Group | None = None,
) -> Transform:
    """Scale all gradients of the model down together if their norm is above ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: times ``min(1, max_norm / (norm + 1e-6))``.
    ``state.norm`` is the norm before clipping.

    Args:
        max_norm: the largest norm.
        over: the pipeline; without one the tree is complete.
        p, exact, tied, shards: as for :func:`global_norm`.

    Raises:
        TransformError: if ``max_norm`` is not above 0.

    >>> tx = clip_by_global_norm(1.0)
    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> grads, state = tx.update(grads, tx.init(grads))
    >>> [round(g.item(), 4) for g in grads], state.norm.item()
    ([0.6, 0.8], 5.0)
    """
    if not isinstance(max_norm, (Real, Tensor)) or not max_norm > 0:
        raise TransformError(f"max_norm={max_norm!r}; clipping needs a norm above 0")
    over = _checked(over, p)

    def init(params):
        return ClipState(torch.zeros((), device=board_device(params, over)))

    def factor(grads):
        with recording(places(grads).leaves):
            norm = global_norm(grads, over=over, p=p, exact=exact, tied=tied, shards=shards)
            by = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            # item() would wait for a device, and under torch.func there may be several values
            unclipped = by.device.type == "cpu" and not F.differentiated() and by.item() == 1
            return None if unclipped else by, ClipState(norm.detach())

    def update(grads, state, params=None):
        by, state = factor(grads)
        return times(grads, by), state

    return Transform(
        init, update, factor=factor, name=f"fpipe.clip_by_global_norm({shown(max_norm)})"
    )
