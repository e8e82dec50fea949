# SPDX-License-Identifier: Apache-2.0
"""Batches cut into microbatches, and results joined again.

The first axis of every tensor leaf of a batch is the batch axis; leaves that are not tensors are
passed to every microbatch as they are. Knows no stages and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from .. import tree
from ..actions.product import feature
from ..errors import BatchError
from ..tree import Tree


@dataclass(frozen=True)
class Absent:
    """A leaf, or a whole argument, that another process has; see ``fpipe.elsewhere``."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def stand_in(self) -> Absent | torch.Tensor:
        """A tensor of the shape without data, where the shape is known."""
        return (
            self if self.shape is None else torch.empty(self.shape, dtype=self.dtype, device="meta")
        )


class Microbatches:
    """Already split pytrees, which may differ in shape; passed in place of a batch.

    Args:
        parts: one pytree for each microbatch.

    Raises:
        BatchError: if there is none, or ``parts`` is no list.

    >>> mbs = Microbatches([torch.ones(2), torch.ones(3)])
    >>> len(mbs), mbs[1].shape
    (2, torch.Size([3]))
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Tree]):
        if isinstance(parts, (str, Mapping)) or not isinstance(parts, Iterable):
            raise BatchError(
                f"Microbatches takes a list with one pytree for each microbatch, not {parts!r:.80}"
            )
        self.parts = tuple(parts)
        if not self.parts:
            raise BatchError("Microbatches([]) is empty; give at least one microbatch")

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Tree:
        return self.parts[index]

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.parts)!r})"


def count(batches: Sequence[Tree], microbatches: int | None) -> int:
    """The number of microbatches of a call: that of its ``Microbatches``, else that of the
    pipeline.

    >>> count([Microbatches([1, 2, 3]), torch.ones(4)], 4)
    3
    """
    counts = {len(b) for b in batches if isinstance(b, Microbatches)}
    if len(counts) > 1:
        raise BatchError(
            f"the arguments hold {sorted(counts)} microbatches; give every argument the same number"
        )
    if counts:
        return counts.pop()
    if microbatches is None:
        raise BatchError(
            "how many microbatches? say pipeline(..., microbatches=8) or pass "
            "fpipe.Microbatches([...])"
        )
    return microbatches


def split(batch: Tree, parts: int, name: str = "the batch") -> list[Tree]:
    """Cut a batch into ``parts`` equal pytrees (views of the user's tensors).

    >>> [b["x"].tolist() for b in split({"x": torch.arange(4), "flag": True}, 2)]
    [[0, 1], [2, 3]]
    """
    if isinstance(batch, Microbatches):
        if len(batch) != parts:
            raise BatchError(
                f"{name} holds {len(batch)} microbatches where {parts} are run; give it {parts}"
            )
        return list(batch)
    flat = Parts(batch, parts, name)
    return [flat.tree(mb) for mb in range(parts)]


def _stand_ins(leaves: list[Any], name: str) -> tuple[list[Any], bool]:
    """Leaves with stand-ins for those that are elsewhere, and whether the argument is."""
    if not any(isinstance(leaf, Absent) for leaf in leaves):
        return leaves, False
    return feature("elsewhere.arguments").stand_ins(leaves, name)


def _check_leaf(leaf: Any, parts: int, name: str, shared_scalars: bool) -> None:
    """Raise BatchError where a leaf cannot be cut into equal parts."""
    if not isinstance(leaf, torch.Tensor) or (shared_scalars and leaf.dim() == 0):
        return
    if leaf.layout is not torch.strided:
        raise BatchError(
            f"{name} holds a tensor of layout {leaf.layout}, which cannot be cut into {parts} "
            "microbatches; "
            "pass fpipe.Microbatches([...]), or to_dense() of it"
        )
    if leaf.dim() == 0:
        raise BatchError(
            f"{name} holds a tensor without axes, which cannot be cut into {parts} microbatches; "
            "give it a batch axis, or pass a Python number to give every microbatch the same"
        )
    if leaf.shape[0] % parts:
        raise BatchError(
            f"{name} has {leaf.shape[0]} rows, which {parts} microbatches do not divide; change "
            "the batch or "
            "microbatches=, or pass fpipe.Microbatches([...]) of any sizes"
        )


def _split_leaf(leaf: Any, parts: int) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not leaf.shape[0]:
        return [leaf] * parts
    return leaf.chunk(parts)  # equal ones, since they divide the rows


class Parts:
    """A batch argument as flat leaves, microbatch by microbatch: ``rows[m]`` under ``specs[m]``.

    ``leaves`` are those that were passed, and ``structure`` is that of the batch, or of each of its
    parts. ``uniform`` says that all rows have one shape, so that the first row describes all. A
    batch is checked at once but cut only when its rows are read: most ranks read none. With
    ``shared_scalars`` a tensor without axes is the same for every microbatch; without it, it is an
    error. ``absent``: another process has it, and tensors have no data here. With ``slices`` each
    row is one slice of a microbatch: leaves with two axes or more are cut along the second one, and
    others are those of all slices.

    >>> Parts(torch.arange(4), 2, "x").rows
    [(tensor([0, 1]),), (tensor([2, 3]),)]
    """

    def __init__(
        self, batch: Tree, parts: int, name: str, shared_scalars: bool = False, slices: int = 1
    ):
        self.name, self.uniform, self.slices = name, not isinstance(batch, Microbatches), slices
        if self.uniform:
            leaves, self.structure = tree.flatten(batch)
            self.leaves, self.absent = _stand_ins(leaves, name)
            self.specs = [self.structure] * (parts * slices)
            for leaf in self.leaves:
                _check_leaf(leaf, parts, name, shared_scalars)
            if slices > 1:
                feature("slicing").check(self.leaves, self.structure, name, slices)
        else:
            flat = [
                (*tree.flatten(part), f"{name}[{m}]")
                for m, part in enumerate(split(batch, parts, name))
            ]
            rows = [_stand_ins(leaves, which) for leaves, _, which in flat]
            self.leaves = [leaf for leaves, _ in rows for leaf in leaves]
            self.absent = any(absent for _, absent in rows)
            for (leaves, _), (_, spec, which) in zip(rows, flat, strict=True) if slices > 1 else ():
                feature("slicing").check(leaves, spec, which, slices)
            self.structure = tuple(spec for _, spec, _ in flat)
            self.specs = [spec for spec in self.structure for _ in range(slices)]

    @property
    def unknown(self) -> bool:
        """Whether it is elsewhere and its shapes are not known here."""
        return self.absent and any(isinstance(leaf, Absent) for leaf in self.leaves)

    @cached_property
    def rows(self) -> Sequence[Sequence[Any]]:
        """The leaves of every microbatch: views of the caller's tensors."""
        if not self.uniform:
            following = iter(self.leaves)
            whole = self.specs[:: self.slices]
            rows: list[Sequence[Any]] = [list(islice(following, spec.num_leaves)) for spec in whole]
        else:
            parts = len(self.specs) // self.slices
            columns = [_split_leaf(leaf, parts) for leaf in self.leaves]
            rows = list(zip(*columns, strict=True)) if columns else [()] * parts
        if self.slices == 1:
            return rows
        sliced = feature("slicing").sliced
        return [part for row in rows for part in sliced(row, self.slices)]

    def tree(self, mb: int) -> Tree:
        """One microbatch as a pytree."""
        return tree.unflatten(self.specs[mb], self.rows[mb])


def merge(parts: Sequence[Tree], axis: int = 0) -> Tree:
    """The inverse of ``split``: tensor leaves joined along the first axis, other leaves taken from
    the first part.

    With ``axis=1`` the inverse of a cut into slices. Tensors that lack the axis are stacked along
    it.

    >>> merge([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    flat = [tree.flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise BatchError(
            "the microbatches' outputs have different structures and cannot be joined into one "
            "batch"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree.unflatten(spec, [_merge_leaf(column, axis) for column in columns])


def _merge_leaf(column: Sequence[Any], axis: int) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return column[0]
    try:
        if column[0].dim() <= axis:
            return torch.stack(list(column), min(axis, column[0].dim()))
        return torch.cat(list(column), axis) if len(column) > 1 else column[0]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in column)
        if axis:
            remedy = "return tensors that are alike but for their second axis"
            raise BatchError(
                f"outputs of slices of shapes {shapes} do not join; {remedy}"
            ) from error
        raise BatchError(
            f"outputs of shapes {shapes} do not join along their first axis; pass "
            "fpipe.Microbatches to get them apart"
        ) from error


def joined(parts: Sequence[Tree], slices: int, whole: bool) -> Tree:
    """Results by microbatch, or by slice of each, in the form of the batch: one pytree where it was
    ``whole``.
    """
    if slices > 1:
        parts = [merge(parts[first : first + slices], 1) for first in range(0, len(parts), slices)]
    return merge(parts) if whole else Microbatches(parts)
