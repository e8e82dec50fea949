# SPDX-License-Identifier: Apache-2.0
"""How copies of a pipeline share a stage's tensors: flat buckets, cut into one part for each copy.

A bucket is memory of one dtype in which leaves lie one after another, each at a multiple of 64
bytes, padded so that the parts are equal. A copy holds of each leaf what falls into its part,
perhaps nothing: the tree keeps its form and its names, and whatever works element by element works
on parts. Knows tensors and layouts; no plan, schedule or stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import tree
from ...collectives.wire import part_of
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

    shapes: Mapping[int, tuple[int, ...]]  # by leaf that is shared
    buckets: tuple[Bucket, ...]
    part: int
    parts: int

    @classmethod
    def of(
        cls,
        leaves: Sequence[object],
        trained: Sequence[bool | None],
        part: int,
        parts: int,
        limit: int = 1 << 25,
    ) -> Layout:
        """Floating leaves into buckets of one dtype, in their order; those that are trained apart
        from the others.
        """
        shapes: dict[int, tuple[int, ...]] = {}
        rows: dict[tuple[torch.dtype, bool], list[dict[int, int]]] = {}  # elements by leaf
        for index, (leaf, flag) in enumerate(zip(leaves, trained, strict=True)):
            if flag is None or not tree.is_tensor(leaf) or not tree.is_floating(leaf):
                continue
            shapes[index] = tuple(leaf.shape)
            of_kind = rows.setdefault((leaf.dtype, flag), [{}])
            elements = sum(of_kind[-1].values()) + leaf.numel()
            if of_kind[-1] and elements * leaf.itemsize > limit:
                of_kind.append({})
            of_kind[-1][index] = leaf.numel()
        buckets: list[Bucket] = []
        for (dtype, flag), of_kind in rows.items():
            grain = max(_ALIGNED // dtype.itemsize, 1)
            for row in of_kind:
                padded = (_padded(size, grain) for size in row.values())
                *starts, end = accumulate(padded, initial=0)
                whole = _padded(end, grain * parts)
                buckets.append(Bucket(dtype, flag, tuple(row), tuple(starts), whole))
        return cls(shapes, tuple(buckets), part, parts)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The leaves that are shared, by bucket."""
        return tuple(leaf for bucket in self.buckets for leaf in bucket.leaves)

    # ---- this process's part ----
    def pieces(self, bucket: Bucket) -> Iterator[tuple[int, int, int, int]]:
        """Leaf, first and last element of it that are this process's, and where they lie in its
        part.
        """
        size = bucket.size // self.parts
        low = self.part * size
        high = low + size
        for leaf, start in zip(bucket.leaves, bucket.starts, strict=True):
            end = start + self.numel(leaf)
            first = min(max(start, low), end)
            yield leaf, first - start, max(min(end, high), first) - start, max(first - low, 0)

    def numel(self, leaf: int) -> int:
        """Elements of a whole leaf."""
        return prod(self.shapes[leaf])

    def cut(self, leaves: Sequence[object]) -> list[object]:
        """This process's pieces of whole leaves, as copies; leaves that are not shared as they
        are.
        """
        out = list(leaves)
        for bucket in self.buckets:
            for index, first, last, _ in self.pieces(bucket):
                leaf = out[index]
                if tree.is_tensor(leaf):
                    out[index] = leaf.detach().reshape(-1)[first:last].clone()
        return out

    def fill(self, bucket: Bucket, pieces: Sequence[Tensor]) -> Tensor:
        """Memory for the whole bucket with this process's part in it; ``pieces`` by leaf of the
        bucket.
        """
        memory = torch.empty(bucket.size, dtype=pieces[0].dtype, device=pieces[0].device)
        places = [at for *_, at in self.pieces(bucket)]
        _lay(part_of(memory, self.part, self.parts), places, pieces)
        return memory

    # ---- whole ----
    def pack(self, bucket: Bucket, leaves: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Whole leaves of a bucket in one memory; what is missing is zero."""
        device = next(leaf.device for leaf in leaves if leaf is not None)
        memory = torch.empty(bucket.size, dtype=dtype, device=device)
        _lay(memory, bucket.starts, leaves)
        return memory

    def whole(self, bucket: Bucket, memory: Tensor) -> list[Tensor]:
        """The leaves of a bucket: views of its memory."""
        return [
            memory[start : start + self.numel(leaf)].view(self.shapes[leaf])
            for leaf, start in zip(bucket.leaves, bucket.starts, strict=True)
        ]


def _padded(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _lay(memory: Tensor, starts: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
    """Copy tensors to their places in flat memory, in ascending order, and zeros elsewhere."""
    present: list[Tensor] = []
    into: list[Tensor] = []
    end = 0
    for start, tensor in zip(starts, tensors, strict=True):
        if tensor is None or not tensor.numel():
            continue
        if start > end:
            memory[end:start].zero_()
        end = start + tensor.numel()
        present.append(tensor)
        into.append(memory[start:end].view(tensor.shape))
    if end < len(memory):
        memory[end:].zero_()
    if present:
        torch._foreach_copy_(into, present)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Share:
    """What an instruction is about that copies carry out together: leaves of a stage, parameters or
    gradients.

    ``accumulate`` is the dtype in which gradients were accumulated, where it is not their own.
    """

    stage: int
    layout: Layout
    leaves: tuple[int, ...]
    copies: Copies
    gradients: bool = False
    accumulate: torch.dtype | None = None

    @property
    def buckets(self) -> list[Bucket]:
        """Those that hold one of the leaves."""
        leaves = set(self.leaves)
        return [bucket for bucket in self.layout.buckets if leaves.intersection(bucket.leaves)]

    def slots(self, slots: Sequence[int]) -> list[tuple[Bucket, list[int]]]:
        """The buckets, each with the slots of its leaves, given those of ``leaves``; -1: none."""
        slot_of = dict(zip(self.leaves, slots, strict=True))
        return [
            (bucket, [slot_of.get(leaf, -1) for leaf in bucket.leaves]) for bucket in self.buckets
        ]

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Of the values before and after."""
        return tree.sum_dtype(bucket.dtype, self.accumulate if self.gradients else None)

    def carried(self, bucket: Bucket) -> torch.dtype:
        """Of the memory of a bucket under way."""
        reduced = self.copies.dtype if self.gradients else None
        return reduced or self.dtype(bucket)

    @property
    def bytes(self) -> int:
        """Of what is under way."""
        return sum(bucket.size * self.carried(bucket).itemsize for bucket in self.buckets)

    def values(self, bucket: Bucket, memory: Tensor) -> list[Tensor]:
        """The result of a collective as values of the leaves of a bucket."""
        layout = self.layout
        if self.gradients:
            memory = memory.to(self.dtype(bucket))
        if not self.gradients or not self.copies.cut:
            return layout.whole(bucket, memory)
        if self.copies.zero == 1:  # all was reduced; this process keeps its part
            memory = part_of(memory, layout.part, layout.parts).clone()
        pieces = [memory[at : at + last - first] for _, first, last, at in layout.pieces(bucket)]
        for piece in pieces:
            vars(piece)["zero"] = self.copies.zero  # for mean_over, which must not average them
        return pieces

    def landed(self) -> list[int | None]:
        """Bytes of each leaf's value afterwards; None: it is a view of what was under way."""
        sizes: dict[int, int | None] = {}
        for bucket in self.buckets:
            dtype = self.dtype(bucket)
            views = not self.copies.cut and self.carried(bucket) == dtype
            for leaf, first, last, _ in self.layout.pieces(bucket):
                count = last - first if self.copies.cut else self.layout.numel(leaf)
                sizes[leaf] = count * dtype.itemsize
            if views or not self.gradients:
                sizes |= dict.fromkeys(bucket.leaves)
        return [sizes[leaf] for leaf in self.leaves]


class Shares:
    """The layouts of a pipeline's stages, as its parameters showed them, and the way to parts and
    back.
    """

    def __init__(self, copies: Copies):
        self.copies = copies
        self.layouts: dict[int, tuple[tree.Structure, Layout]] = {}

    def cut(self, stage: int, value: tree.Tree, frozen: Sequence[str]) -> tree.Tree:
        """This process's part of one stage's whole tree, whose layout is known from then on."""
        leaves, spec = tree.flatten(value)
        layout = self._layout(stage, value, frozen)
        self.layouts[stage] = spec, layout
        return tree.unflatten(spec, layout.cut(leaves))

    def _layout(self, stage: int, value: tree.Tree, frozen: Sequence[str]) -> Layout:
        copies = self.copies
        leaves = tree.leaves(value)
        trained: list[bool | None] = [True] * len(leaves)
        if frozen or copies.own:
            for index, name in enumerate(tree.names(value)):
                full = f"{stage}.{name}"
                # the copies do not share what each has of its own
                own = tree.matches(full, copies.own)
                trained[index] = None if own else not tree.matches(full, frozen)
        return Layout.of(leaves, trained, copies.part, copies.group.size, copies.bucket)

    def join(self, stage: int, value: tree.Tree) -> tree.Tree:
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
                "whole parameters first (tensors on the device 'meta' will do)"
            )
        return self.layouts[stage]

    def check(self, stage: int, leaves: Sequence[object]) -> Layout:
        """The layout of a stage; raises where leaves are not the parts that it says."""
        layout = self._known(stage)[1]
        for bucket in layout.buckets:
            for index, first, last, _ in layout.pieces(bucket):
                leaf = leaves[index] if index < len(leaves) else "nothing"
                wanted = (last - first,)
                if leaf is None or (tree.is_tensor(leaf) and tuple(leaf.shape) == wanted):
                    continue
                raise StageError(
                    f"with zero={self.copies.zero} a pipeline takes parts: leaf {index} of stage "
                    f"{stage} must have {last - first} elements along one axis and is "
                    f"{tree.describe([leaf])}; pass what pipe.shard(params) gives"
                )
        return layout

    def seen(
        self,
        stage: int,
        value: tree.Tree,
        leaves: Sequence[object],
        frozen: Sequence[str],
    ) -> tuple[list[object], Layout]:
        """The leaves of a call as the stage will see them, those that come in parts without data;
        and their layout.
        """
        if not self.copies.cut:
            return list(leaves), self._layout(stage, value, frozen)
        layout = self.check(stage, leaves)
        whole = list(leaves)
        for index, shape in layout.shapes.items():
            leaf = leaves[index]
            if tree.is_tensor(leaf):
                whole[index] = torch.empty(shape, dtype=leaf.dtype, device="meta")
        return whole, layout
