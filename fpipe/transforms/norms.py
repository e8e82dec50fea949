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
from ..errors import TransformError
from ..tree import Tree, matches, names, unmatched
from . import foreach as F
from .boards import (
    EVERY_LEAF,
    Board,
    Over,
    as_over,
    board_device,
    copies_of,
    stages_here,
    warn_of_parts,
    wide,
)
from .leaves import Places, map_kinds, places, recording
from .transform import Params, Speculation, State, Transform, Updates, on_leaves, times

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
        copies = frozenset(name for group in groups for name in tuple(group)[1:])
        return cls(over, p, exact, copies, shards)

    def total(self, tree: Tree) -> Tensor:
        """The norm of all stages, on every process."""
        warn_of_parts(tree, self.over)
        group, differing = copies_of(self.over)
        if self.shards is not None:
            norms = self.by_stage(tree, self.shards, EVERY_LEAF)
        elif self.exact and group is not None and differing == EVERY_LEAF:
            norms = self._gathered(tree, group)
        else:
            norms = self.by_stage(tree, group, differing)
        return torch.linalg.vector_norm(Board.of_stages(tree, self.over).complete(norms), self.p)

    def by_stage(
        self, tree: Tree, group: Group | None = None, differing: tuple[str, ...] = ()
    ) -> dict[int, Tensor]:
        """The norm of each stage on this process; over the copies ``group`` for leaves that match
        ``differing``.
        """
        device = board_device(tree, self.over)
        return {
            stage: self._of_copies(*parts, device, group)
            for stage, parts in self._leaf_norms(tree, differing).items()
        }

    def _leaf_norms(
        self, tree: Tree, differing: tuple[str, ...]
    ) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        """The norms of the leaves of each stage on this process, of which those that match
        ``differing`` come second.
        """
        at = places(tree)
        every = self._names(tree, at) if self.copies or differing else [""] * len(at.leaves)
        chosen = [i for i, x in enumerate(at.leaves) if x.numel() and every[i] not in self.copies]
        norms = map_kinds(self._of_leaves, [at.leaves[index] for index in chosen])
        parts = {stage: (list[Tensor](), list[Tensor]()) for stage in stages_here(tree, self.over)}
        stages = at.stages()
        for index, norm in zip(chosen, norms, strict=True):
            if stages[index] in parts:
                differs = differing != () and matches(every[index], differing)
                parts[stages[index]][differs].append(norm)
        return parts

    def _of_copies(
        self, alike: list[Tensor], others: list[Tensor], device: torch.device, group: Group | None
    ) -> Tensor:
        """The norm of leaves that are alike on all copies and of those that differ."""
        if group is None:
            return self._joined(alike, device)
        # in one dtype everywhere: a process without elements of a stage does not know the dtype of
        # its leaves
        norm = self._joined(others, device)
        norm = norm.to(wide(norm.device))
        if math.isinf(self.p):
            norm = group.all_reduce(norm, "max")
        else:
            norm = group.all_reduce(norm.pow(self.p), "sum").pow(1 / self.p)
        return self._joined([self._joined(alike, device), norm], device) if alike else norm

    def _of_leaves(self, leaves: list[Tensor]) -> list[Tensor]:
        if self.exact:
            return [_by_rows(leaf.reshape(-1), self.p) for leaf in leaves]
        return F.norms(leaves, self.p)

    def _names(self, tree: Tree, at: Places) -> list[str]:
        every = names(tree)
        absent = self.copies.difference(every)
        fault = unmatched(absent, every, at.missing()) if absent else ""
        if fault:
            raise TransformError(f"tied= names {fault}")
        return every

    def _gathered(self, tree: Tree, group: Group) -> dict[int, Tensor]:
        """The norm of each stage here from whole leaves, gathered for one stage at a time."""
        norms, device = dict[int, Tensor](), board_device(tree, self.over)
        for stage, part in stages_here(tree, self.over).items():
            alone = [part if stage == other else None for other in range(len(tree))]
            whole = self.over.unshard(alone)  # type: ignore[union-attr]
            pairs = zip(places(alone).leaves, places(whole).leaves, strict=True)
            # A leaf that differs by copy, or is beside a frozen one, is not gathered.
            cut = any(shard is leaf for shard, leaf in pairs)
            parts = self._leaf_norms(alone if cut else whole, EVERY_LEAF if cut else ())[stage]
            norms[stage] = self._of_copies(*parts, device, group if cut else None)
        return norms

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

    def clipping(norm: Tensor) -> Tensor:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def factor(grads: Updates) -> tuple[Tensor | None, State]:
        with recording(places(grads).leaves):
            norm = options.total(grads)
            by = clipping(norm)
            # item() would wait for a device, and under torch.func there may be several values
            unclipped = by.device.type == "cpu" and not F.differentiated() and by.item() == 1
            return None if unclipped else by, ClipState(norm.detach())

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        by, state = factor(grads)
        return times(grads, by), state

    def measure(grads: Updates) -> Tensor | None:
        if options.shards is not None:
            return None  # requires two sums, one after the other
        with torch.no_grad():
            return Board.of_stages(grads, options.over).part(options.by_stage(grads))

    def confirm(total: Tensor, state: State) -> State:
        board = Board([1] * (len(total) // 2), total.device, options.over, total.dtype)
        norm = torch.linalg.vector_norm(board.whole(total), options.p)
        return ClipState(norm) if clipping(norm).item() == 1 else None

    speculation = Speculation(measure, confirm, options.over)
    return Transform(init, update, speculation=speculation, factor=factor)


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
    return on_leaves(lambda leaves: [leaf.clamp(low, high) for leaf in leaves])
