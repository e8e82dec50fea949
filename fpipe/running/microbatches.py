"""Batches cut into microbatches, and results put together again.

A batch is a pytree whose tensor leaves have a batch axis first; leaves that are not tensors go to every microbatch as
they are. This module knows nothing of stages or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import tree
from ..errors import BatchError


class Microbatches:
    """Already split pytrees, which may differ in shape; a stand-in for a batch argument.

    >>> mbs = Microbatches([torch.ones(2), torch.ones(3)])
    >>> len(mbs), mbs[1].shape
    (2, torch.Size([3]))
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Any]):
        self.parts = tuple(parts)
        if not self.parts:
            raise BatchError("Microbatches([]) is empty; give at least one microbatch")

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.parts)!r})"


def count(batches: Sequence[Any], microbatches: int | None) -> int:
    """How many microbatches a call has: what ``Microbatches`` say, else the pipeline's own number.

    >>> count([Microbatches([1, 2, 3]), torch.ones(4)], 4)
    3
    """
    counts = {len(b) for b in batches if isinstance(b, Microbatches)}
    if len(counts) > 1:
        raise BatchError(f"the arguments hold {sorted(counts)} microbatches; give every argument the same number")
    if counts:
        return counts.pop()
    if microbatches is None:
        raise BatchError("how many microbatches? say pipeline(..., microbatches=8) or pass fpipe.Microbatches([...])")
    return microbatches


def split(batch: Any, parts: int, name: str = "the batch") -> list[Any]:
    """Cut a batch into ``parts`` equal pytrees (views of the user's tensors).

    >>> [b["x"].tolist() for b in split({"x": torch.arange(4), "flag": True}, 2)]
    [[0, 1], [2, 3]]
    """
    if isinstance(batch, Microbatches):
        if len(batch) != parts:
            raise BatchError(f"{name} holds {len(batch)} microbatches where {parts} are run; give it {parts}")
        return list(batch)
    flat = Parts(batch, parts, name)
    return [flat.tree(mb) for mb in range(parts)]


def _check_leaf(leaf: Any, parts: int, name: str, alike: bool = False) -> None:
    """Raise BatchError where a leaf cannot be cut into equal parts; ``alike`` ones without axes go to all parts."""
    if not isinstance(leaf, torch.Tensor) or (alike and leaf.dim() == 0):
        return
    if leaf.dim() == 0:
        raise BatchError(
            f"{name} holds a tensor without axes, which cannot be cut into {parts} microbatches; "
            "give it a batch axis, or pass a Python number to give every microbatch the same"
        )
    if leaf.shape[0] % parts:
        raise BatchError(
            f"{name} has {leaf.shape[0]} rows, which {parts} microbatches do not divide; change the batch or "
            "microbatches=, or pass fpipe.Microbatches([...]) of any sizes"
        )


def _split_leaf(leaf: Any, parts: int) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not leaf.shape[0]:
        return [leaf] * parts
    return leaf.split(leaf.shape[0] // parts)


class Parts:
    """A batch argument as flat leaves, microbatch by microbatch: ``rows[m]`` under ``specs[m]``.

    ``uniform`` says that all rows have one shape, so that looking at the first is enough. A batch is checked at once
    but cut only where its rows are asked for: most ranks feed none of it. With ``alike`` a tensor without axes is no
    mistake, but the same for every microbatch.

    >>> Parts(torch.arange(4), 2, "x").rows
    [(tensor([0, 1]),), (tensor([2, 3]),)]
    """

    __slots__ = ("_leaves", "_rows", "name", "specs", "uniform")

    def __init__(self, batch: Any, parts: int, name: str, alike: bool = False):
        self._rows: list[Sequence[Any]] | None = None
        self.name = name
        self.uniform = not isinstance(batch, Microbatches)
        self._leaves: Sequence[Any] = ()
        if isinstance(batch, Microbatches):
            flat = [tree.flatten(part) for part in split(batch, parts, name)]
            self._rows = [leaves for leaves, _ in flat]
            self.specs = [spec for _, spec in flat]
            return
        self._leaves, spec = tree.flatten(batch)
        for leaf in self._leaves:
            _check_leaf(leaf, parts, name, alike)
        self.specs = [spec] * parts

    @property
    def rows(self) -> list[Sequence[Any]]:
        """The leaves of every microbatch: views of the caller's tensors."""
        if self._rows is None:
            columns = [_split_leaf(leaf, len(self.specs)) for leaf in self._leaves]
            self._rows = list(zip(*columns, strict=True)) if columns else [() for _ in self.specs]
        return self._rows

    def tree(self, mb: int) -> Any:
        """One microbatch as the pytree that it is."""
        return tree.unflatten(self.specs[mb], self.rows[mb])

    def signature(self) -> tuple[Any, ...]:
        """Everything about the shapes that plans depend on, beside the number of parts."""
        if self.uniform:
            return (self.specs[0], *map(tree.cache_key, self._leaves))
        return tuple((spec, *map(tree.cache_key, row)) for spec, row in zip(self.specs, self.rows, strict=True))


def merge(parts: Sequence[Any]) -> Any:
    """The inverse of ``split``: tensor leaves joined along the first axis, other leaves taken from the first part.

    >>> merge([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    flat = [tree.flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise BatchError("the microbatches' outputs have different structures and cannot be joined into one batch")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree.unflatten(spec, [_merge_leaf(column) for column in columns])


def _merge_leaf(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return column[0]
    if column[0].dim() == 0:
        return torch.stack(list(column))
    try:
        return torch.cat(list(column)) if len(column) > 1 else column[0]
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in column)
        raise BatchError(
            f"outputs of shapes {shapes} do not join along their first axis; pass fpipe.Microbatches to get them apart"
        ) from error
