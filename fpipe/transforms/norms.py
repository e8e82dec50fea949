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
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..collectives.group import Group
from ..errors import TransformError
from ..tree import Tree, matches, names, unmatched
from . import _foreach as F
from ._base import Speculation, State, Transform, Updates, on_leaves, scaling
from ._over import (
    Board,
    Over,
    Sharded,
    as_over,
    board_device,
    own_leaves,
    shards_of,
    stages_here,
    warn_of_parts,
    wide,
)
from ._places import map_kinds, places

#: Elements in one row of an exact norm; any number would do, as long as it never changes.
_ROW = 1024

#: Groups of names of leaves that are one parameter.
Tied: TypeAlias = Sequence[Sequence[str]]


class ClipState(NamedTuple):
    """``norm``: that of the last gradients, before they were clipped."""

    norm: Tensor


class Norm(NamedTuple):
    """Which norm, and over what."""

    over: Over | None
    p: float
    exact: bool
    copies: frozenset[str]  # names of leaves that a tied leaf already counts for
    shards: Group | None

    @classmethod
    def of(
        cls, over: Over | None, p: float, exact: bool, tied: Tied | None, shards: Group | None
    ) -> Norm:
        """The norm that the arguments of :func:`global_norm` ask for."""
        if not isinstance(p, (Real, Tensor)) or not p > 0:
            raise TransformError(f"p={p!r}; a norm needs p > 0, or float('inf')")
        over = as_over(over)
        groups = tied if tied is not None else over.tied if over is not None else ()
        return cls(
            over, p, exact, frozenset(name for group in groups for name in tuple(group)[1:]), shards
        )

    def total(self, tree: Tree) -> Tensor:
        """The norm of all stages, on every process."""
        warn_of_parts(tree, self.over)
        shards = shards_of(self.over) if self.shards is None else self.shards
        if self.exact and self.shards is None and shards is not None:
            shares = self._gathered(tree, shards)
        else:
            shares = self._all_shares(tree, shards)
        return torch.linalg.vector_norm(Board.of_stages(tree, self.over).complete(shares), self.p)

    def shares(self, tree: Tree, skip: frozenset[str] = frozenset()) -> dict[int, Tensor]:
        """The norm of each stage on this process, without the leaves that ``skip`` names."""
        skip |= self.copies
        if skip:
            at, every = places(tree), names(tree)
            fault = (
                unmatched(self.copies - set(every), every, at.missing())
                if not self.copies.issubset(every)
                else ""
            )
            if fault:
                raise TransformError(f"tied= names {fault}")
            tree = at.keep([name not in skip for name in every])

        def kernel(xs):
            return (
                [_by_rows(x.reshape(-1), self.p) for x in xs] if self.exact else F.norms(xs, self.p)
            )

        stages, device = stages_here(tree, self.over), board_device(tree, self.over)
        parts = {
            stage: [leaf for leaf in places(part).leaves if leaf.numel()]
            for stage, part in stages.items()
        }
        norms = iter(map_kinds(kernel, [leaf for part in parts.values() for leaf in part]))
        return {
            stage: self._joined([next(norms) for _ in part], device)
            for stage, part in parts.items()
        }

    def _all_shares(self, tree: Tree, shards: Group | None) -> dict[int, Tensor]:
        """The norm of each stage here over the copies that hold shards of it, or leaves that
        differ.
        """
        if shards is not None:
            return {
                stage: self._over_shards(share, shards)
                for stage, share in self.shares(tree).items()
            }
        copies = own_leaves(self.over)
        if copies is None:
            return self.shares(tree)
        group, patterns = copies
        every, differing = (
            names(tree),
            frozenset(name for name in names(tree) if matches(name, patterns)),
        )
        alike, others = (
            self.shares(tree, differing),
            self.shares(tree, frozenset(every) - differing),
        )
        device = board_device(tree, self.over)
        return {
            s: self._joined([alike[s], self._over_shards(others[s], group)], device) for s in alike
        }

    def _gathered(self, tree: Tree, shards: Group) -> dict[int, Tensor]:
        """The norm of each stage here from whole leaves, gathered for one stage at a time."""
        over, shares = cast(Sharded, self.over), {}
        for stage, part in stages_here(tree, over).items():
            alone = [part if stage == other else None for other in range(over.stages)]
            whole = over.unshard(alone)
            pairs = zip(places(alone).leaves, places(whole).leaves, strict=True)
            cut = any(
                shard is leaf for shard, leaf in pairs
            )  # a leaf that differs by copy, or beside a frozen one
            share = self.shares(alone if cut else whole)[stage]
            shares[stage] = self._over_shards(share, shards) if cut else share
        return shares

    def _over_shards(self, share: Tensor, shards: Group) -> Tensor:
        # in one dtype everywhere: a process without elements of a stage does not know the dtype of
        # its leaves
        share = share.to(wide(share.device))
        if math.isinf(self.p):
            return shards.all_reduce(share, "max")
        return shards.all_reduce(share.pow(self.p), "sum").pow(1 / self.p)

    def _joined(self, norms: list[Tensor], device: torch.device) -> Tensor:
        """The norm of a vector from the norms of its parts, in their order."""
        if not norms:
            return torch.zeros((), device=device)
        kinds = {(norm.device, norm.dtype) for norm in norms}
        dtype = reduce(torch.promote_types, [dtype for _, dtype in kinds])
        if kinds != {(device, dtype)}:
            norms = [norm.to(device, dtype) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms), self.p)


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
        flat, dtype = rows, None
    return torch.linalg.vector_norm(flat, p, dtype=dtype)


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

    >>> global_norm([torch.tensor([3.0]), {"w": torch.tensor([4.0])}]).item()
    5.0
    >>> global_norm([torch.tensor([3.0]), torch.tensor([-4.0])], p=float("inf")).item()
    4.0
    """
    return Norm.of(over, p, exact, tied, shards).total(tree)


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

    Returns:
        A ``Transform``.

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
    options = Norm.of(over, p, exact, tied, shards)

    def init(params):
        return ClipState(torch.zeros((), device=board_device(params, over)))

    def factor(grads: Updates) -> tuple[Tensor | None, State]:
        norm = options.total(grads)
        by = _factor(norm, max_norm)
        # item() would wait for a device, and under torch.func there may be several values
        unclipped = by.device.type == "cpu" and not F.differentiated() and by.item() == 1
        return None if unclipped else by, ClipState(norm.detach())

    return scaling(init, factor, speculation=_unclipped(options, max_norm))


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _unclipped(options: Norm, max_norm: float) -> Speculation:
    def measure(grads: Updates) -> Tensor | None:
        if options.shards is not None:
            return None  # requires two sums, one after the other
        with torch.no_grad():
            return Board.of_stages(grads, options.over).part(options.shares(grads))

    def confirm(total: Tensor, state: State) -> State:
        board = Board([1] * (len(total) // 2), total.device, options.over, total.dtype)
        norm = torch.linalg.vector_norm(board.whole(total), options.p)
        return ClipState(norm) if _factor(norm, max_norm).item() == 1 else None

    return Speculation(measure, confirm, options.over)


def clip_by_value(low: float, high: float | None = None) -> Transform:
    """Limit every element to a range.

    Args:
        low: the smallest value; alone, ``x`` stands for the range from ``-x`` to ``x``.
        high: the largest value.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if the range is empty.

    >>> clip_by_value(1.0).update([torch.tensor([-3.0, 0.5, 2.0])], ())[0]
    [tensor([-1.0000,  0.5000,  1.0000])]
    """
    low, high = (-low, low) if high is None else (low, high)
    if not low <= high:
        raise TransformError(
            f"nothing lies in [{low}, {high}]; give clip_by_value(x) with x >= 0, or (low, high)"
        )
    return on_leaves(lambda leaves: map_kinds(lambda gs: F.clamp(gs, low, high), leaves))
