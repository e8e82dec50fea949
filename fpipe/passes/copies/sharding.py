# SPDX-License-Identifier: Apache-2.0
"""How copies of a pipeline share a stage's tensors: flat buckets, cut into one part for each copy.

A bucket is memory of one dtype in which leaves lie one after another, each at a multiple of 64
bytes, padded so that the parts are equal. A copy holds of each leaf what falls into its part,
perhaps nothing: the tree keeps its form and its names, and whatever works element by element works
on parts. Knows tensors and layouts; no plan, schedule or stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import tree
from ...collectives.group import part_of
from ...engine.copies import Copies
from ...errors import StageError

#: Kernels may take another way, and so round otherwise, where memory is not aligned as an
#: allocation is.
_ALIGNED = 64


class Bucket(NamedTuple):
    """Leaves in one memory: where each begins, and how many elements there are in all, padding
    included.
    """

    dtype: torch.dtype
    trained: bool
    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The buckets of a stage, and which of ``parts`` parts is this process's.

    >>> leaves = [torch.zeros(3, 8), 5, torch.zeros(16)]
    >>> for part in range(2):
    ...     layout = Layout.of(leaves, [True, False, True], part, parts=2)
    ...     print([len(piece) if isinstance(piece,
    ...         Tensor) else piece for piece in layout.cut(leaves)])
    [24, 5, 0]
    [0, 5, 16]
    """

    shapes: tuple[tuple[int, ...] | None, ...]  # by leaf; None: it is not shared
    buckets: tuple[Bucket, ...]
    part: int
    parts: int

    @classmethod
    def of(
        cls,
        leaves: Sequence[Any],
        trained: Sequence[bool | None],
        part: int,
        parts: int,
        limit: int = 1 << 25,
    ) -> Layout:
        """Floating leaves into buckets of one dtype, in their order; those that are trained apart
        from the others.
        """
        open_: dict[tuple[torch.dtype, bool], list[list[int]]] = {}
        shared = [
            tree.is_floating(leaf) and flag is not None
            for leaf, flag in zip(leaves, trained, strict=True)
        ]
        for index, leaf in enumerate(leaves):
            if shared[index]:
                rows = open_.setdefault((leaf.dtype, bool(trained[index])), [[]])
                held = sum(leaves[i].numel() for i in rows[-1]) * leaf.dtype.itemsize
                if rows[-1] and held + leaf.numel() * leaf.dtype.itemsize > limit:
                    rows.append([])
                rows[-1].append(index)
        made = [
            _bucket(dtype, flag, row, leaves, parts)
            for (dtype, flag), rows in open_.items()
            for row in rows
        ]
        shapes = tuple(
            tuple(leaf.shape) if known else None for leaf, known in zip(leaves, shared, strict=True)
        )
        return cls(shapes, tuple(made), part, parts)

    # ---- this process's part ----
    def pieces(self, bucket: Bucket) -> Iterator[tuple[int, int, int, int]]:
        """Leaf, first and last element of it that are this process's, and where they lie in its
        part.
        """
        size = bucket.size // self.parts
        low, high = self.part * size, (self.part + 1) * size
        for leaf, start in zip(bucket.leaves, bucket.starts, strict=True):
            end = start + self.numel(leaf)
            first, last = min(max(start, low), end), max(min(end, high), start)
            yield (leaf, first - start, max(last, first) - start, max(first - low, 0))

    def numel(self, leaf: int) -> int:
        """Elements of a whole leaf."""
        shape = self.shapes[leaf]
        assert shape is not None
        return torch.Size(shape).numel()

    def cut(self, leaves: Sequence[Any]) -> list[Any]:
        """This process's pieces of whole leaves, as copies; leaves that are not shared as they
        are.
        """
        out = list(leaves)
        for bucket in self.buckets:
            for leaf, first, last, _ in self.pieces(bucket):
                if out[leaf] is not None:
                    out[leaf] = out[leaf].detach().reshape(-1)[first:last].clone()
        return out

    def fill(self, bucket: Bucket, pieces: Sequence[Tensor]) -> Tensor:
        """Memory for the whole bucket with this process's part in it; ``pieces`` by leaf of the
        bucket.
        """
        memory = torch.empty(bucket.size, dtype=pieces[0].dtype, device=pieces[0].device)
        places = (at for *_, at in self.pieces(bucket))
        mine = [(at, piece) for at, piece in zip(places, pieces, strict=True) if len(piece)]
        _lay(part_of(memory, self.part, self.parts), mine)
        return memory

    def split(self, bucket: Bucket, mine: Tensor) -> list[Tensor]:
        """This process's part of a bucket as pieces of its leaves: views."""
        return [mine[at : at + last - first] for _, first, last, at in self.pieces(bucket)]

    # ---- whole ----
    def pack(self, bucket: Bucket, leaves: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Whole leaves of a bucket in one memory; what is missing is zero."""
        device = next(leaf.device for leaf in leaves if leaf is not None)
        memory = torch.empty(bucket.size, dtype=dtype, device=device)
        _lay(
            memory,
            [
                (start, leaf)
                for start, leaf in zip(bucket.starts, leaves, strict=True)
                if leaf is not None
            ],
        )
        return memory

    def whole(self, bucket: Bucket, memory: Tensor) -> list[Tensor]:
        """The leaves of a bucket: views of its memory."""
        return [
            memory[start : start + self.numel(leaf)].view(self.shapes[leaf])  # type: ignore[arg-type]
            for leaf, start in zip(bucket.leaves, bucket.starts, strict=True)
        ]


def _bucket(
    dtype: torch.dtype, trained: bool, row: Sequence[int], leaves: Sequence[Any], parts: int
) -> Bucket:
    grain = max(_ALIGNED // dtype.itemsize, 1)
    *starts, end = accumulate(
        (-(-leaves[index].numel() // grain) * grain for index in row), initial=0
    )
    return Bucket(
        dtype, trained, tuple(row), tuple(starts), -(-end // (grain * parts)) * grain * parts
    )


def _lay(memory: Tensor, placed: Sequence[tuple[int, Tensor]]) -> None:
    """Copy tensors to their places in flat memory, in ascending order, and zeros between them."""
    into, end = [], 0
    for start, tensor in placed:
        if start > end:
            memory[end:start].zero_()
        end = start + tensor.numel()
        into.append(memory[start:end].view(tensor.shape))
    if end < len(memory):
        memory[end:].zero_()
    if placed:
        torch._foreach_copy_(into, [tensor for _, tensor in placed])  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Share:
    """What an instruction is about that copies carry out together: leaves of a stage, parameters or
    gradients.

    ``wide`` is the dtype in which gradients were accumulated, where it is not their own.
    """

    stage: int
    layout: Layout
    leaves: tuple[int, ...]
    copies: Copies
    gradients: bool = False
    wide: torch.dtype | None = None

    def buckets(self) -> list[Bucket]:
        """Those that hold one of the leaves."""
        return [
            bucket
            for bucket in self.layout.buckets
            if not set(self.leaves).isdisjoint(bucket.leaves)
        ]

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Of the values before and after."""
        return tree.sum_dtype(bucket.dtype, self.wide if self.gradients else None)

    def carried(self, bucket: Bucket) -> torch.dtype:
        """Of the memory of a bucket under way."""
        return (self.copies.dtype if self.gradients else None) or self.dtype(bucket)

    @property
    def bytes(self) -> int:
        """Of what is under way."""
        return sum(bucket.size * self.carried(bucket).itemsize for bucket in self.buckets())

    def landed(self) -> list[int | None]:
        """Bytes of each leaf's value afterwards; None: it is a view of what was under way."""
        found: dict[int, int | None] = {}
        for bucket in self.buckets():
            itemsize = self.dtype(bucket).itemsize
            views = not self.gradients or (
                not self.copies.cut and self.carried(bucket) == self.dtype(bucket)
            )
            for leaf, first, last, _ in self.layout.pieces(bucket):
                count = (
                    last - first if self.gradients and self.copies.cut else self.layout.numel(leaf)
                )
                found[leaf] = None if views else count * itemsize
        return [found[leaf] for leaf in self.leaves]


class Shares:
    """The layouts of a pipeline's stages, as its parameters showed them, and the way to parts and
    back.
    """

    def __init__(self, copies: Copies):
        self.copies = copies
        self.layouts: dict[int, tuple[tree.Structure, Layout]] = {}

    def flags(self, stage: int, value: Any, frozen: Sequence[str]) -> list[bool | None]:
        """Whether each leaf is trained; ``None``: it is not shared."""
        if not frozen and not self.copies.own:
            return [True] * len(tree.leaves(value))
        names = [f"{stage}.{name}" for name in tree.names(value)]
        return [
            None if tree.matches(n, self.copies.own) else not tree.matches(n, frozen) for n in names
        ]

    def cut(self, stage: int, value: Any, frozen: Sequence[str]) -> Any:
        """This process's part of one stage's whole tree, whose layout is known from then on."""
        leaves, spec = tree.flatten(value)
        layout = self._layout(leaves, self.flags(stage, value, frozen))
        self.layouts[stage] = spec, layout
        return tree.unflatten(spec, layout.cut(leaves))

    def _layout(self, leaves: Sequence[Any], trained: Sequence[bool | None]) -> Layout:
        copies = self.copies
        return Layout.of(leaves, trained, copies.part, copies.group.size, copies.bucket)

    def join(self, stage: int, value: Any) -> Any:
        """One stage's whole tree from everybody's parts; every copy must call this in one order."""
        spec, layout = self._known(stage)
        leaves: list[Any] = list(spec.flatten_up_to(value))
        self.check(stage, leaves)
        for bucket in layout.buckets:
            pieces = [leaves[index] for index in bucket.leaves]
            if any(piece is None for piece in pieces):
                continue
            (memory,) = self.copies.group.start_gather(layout.fill(bucket, pieces)).wait()
            for index, leaf in zip(bucket.leaves, layout.whole(bucket, memory), strict=True):
                leaves[index] = leaf
        return tree.unflatten(spec, leaves)

    def _known(self, stage: int) -> tuple[tree.Structure, Layout]:
        if stage not in self.layouts:
            raise StageError(
                f"nothing is known of the whole of stage {stage}; call pipe.shard(params) with "
                "whole parameters first "
                "(tensors on the device 'meta' will do)"
            )
        return self.layouts[stage]

    def check(self, stage: int, leaves: Sequence[Any]) -> Layout:
        """The layout of a stage; raises where leaves are not the parts that it says."""
        layout = self._known(stage)[1]
        wanted = {
            leaf: last - first for b in layout.buckets for leaf, first, last, _ in layout.pieces(b)
        }
        for leaf, count in wanted.items():
            if leaf >= len(leaves) or (
                leaves[leaf] is not None and tuple(leaves[leaf].shape) != (count,)
            ):
                got = "nothing" if leaf >= len(leaves) else tree.describe([leaves[leaf]])
                raise StageError(
                    f"with zero={self.copies.zero} a pipeline takes parts: leaf {leaf} of stage "
                    f"{stage} must have "
                    f"{count} elements along one axis and is {got}; pass what pipe.shard(params) "
                    "gives"
                )
        return layout

    def seen(
        self, stage: int, value: Any, leaves: Sequence[Any], frozen: Sequence[str]
    ) -> tuple[list[Any], Layout]:
        """The leaves of a call as the stage will see them, those that come in parts without data;
        and their layout.
        """
        if not self.copies.cut:
            return list(leaves), self._layout(leaves, self.flags(stage, value, frozen))
        layout = self.check(stage, leaves)
        pairs = zip(leaves, layout.shapes, strict=True)
        return [
            leaf if s is None else torch.empty(s, dtype=leaf.dtype, device="meta")
            for leaf, s in pairs
        ], layout
