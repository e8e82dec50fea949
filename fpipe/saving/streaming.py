# SPDX-License-Identifier: Apache-2.0
"""``fpipe.stream``: whole parameters by their names in the model, on all ranks in one order, one
bucket at a time.

Every rank learns names, shapes and order first. Then the rank that has a tensor sends it in pieces,
after the copies of the pipeline have put their parts together. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.codec import DTYPES, dtype_name
from ..errors import CheckpointError, check_floating
from ..tree import Spec, Tree, is_tensor
from ._processes import Pipe, agree, everyone
from .collect import merged, stage_trees
from .files import grouped
from .leaf_names import Names, StageTree, spans

#: Of a bucket: what is sent at a time, and the tensors that are filled at once. The consumer may
#: hold one more, and the allocator of a host may keep three times as much, because tensors of other
#: sizes do not fit where these were.
_PIECE = 1 / 8
_WHOLE = 3 / 16
#: Pieces between two waits for all ranks; memory that processes share may keep three times as many
#: of each other rank.
_AHEAD = 8


class Row(NamedTuple):
    """A parameter that is streamed: where it is, its name, shape and dtype."""

    stage: int
    leaf: int
    rank: int
    name: str
    shape: Sequence[int]
    dtype: str

    def empty(self, device: torch.device | str) -> Tensor:
        """The whole tensor, to be filled."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device=device)

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.empty("meta").nbytes


def stream(
    pipe: Pipe,
    params: Sequence[Tree],
    bucket_bytes: int = 1 << 28,
    *,
    dtype: torch.dtype | None = None,
    to: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """All parameters as pairs of name and whole tensor, in the same order on every rank.

    Every process iterates to the end. Beside its own parameters a rank holds at most
    ``bucket_bytes``, or twice the largest tensor if that is more, as long as the caller keeps none.
    A rank gets its own parameters as they are, so they must not be changed; other tensors are new.
    Tied parameters come once.

    Args:
        pipe: the pipeline that has the stages of ``params``.
        params: the parameters, one tree per stage; parts with ``zero=``.
        bucket_bytes: the memory for what comes from other ranks.
        dtype: that of the floating tensors; by default their own.
        to: the only rank of the pipeline that gets tensors; the others get such on the device
            "meta".

    Returns:
        An iterator of ``(name, tensor)``, on the device of the first rank of this process.

    Raises:
        CheckpointError: on every process, if leaves have no names, or each copy has its own
        (``own=``).

    >>> import fpipe
    >>> stages = [fpipe.Stage(lambda p, x: x @ p["w"], name=name) for name in ("first", "last")]
    >>> pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    >>> params = [{"w": torch.eye(2)}, {"w": torch.ones(2)}]
    >>> for name, tensor in fpipe.stream(pipe, params): print(name, tensor.shape)
    first.w torch.Size([2, 2])
    last.w torch.Size([2])
    """
    check_floating("dtype", dtype)
    if bucket_bytes < 1 or (to is not None and not 0 <= to < pipe.group.size):
        raise CheckpointError(
            f"bucket_bytes={bucket_bytes}, to={to}; give bytes, and a rank below {pipe.group.size}"
        )
    names = Names(pipe)
    trees, facts = agree(pipe, lambda: stage_trees(names, params))
    mine = agree(pipe, lambda: _rows(pipe, trees, dtype))
    of_all = everyone(pipe, [facts, mine])
    agree(pipe, lambda: merged([facts for facts, _ in of_all]))
    sent = sorted(Row(*row) for _, rows in of_all for row in rows)
    rows = [row for row, _ in groupby(sent)]  # copies of the pipeline have the same

    def streamed() -> Iterator[tuple[str, Tensor]]:
        most = int(bucket_bytes * _WHOLE)
        by_rank = (same for _, same in groupby(rows, lambda row: row.rank))
        for run in (run for same in by_rank for run in grouped(same, lambda row: row.bytes, most)):
            if run[0].rank in pipe.group.here:
                tensors = [_whole(pipe, trees[row.stage], row) for row in run]
            else:
                tensors = [row.empty(pipe.config.device) for row in run]
            if len(pipe.group.here) < pipe.group.size:
                _send(pipe, tensors, run, bucket_bytes)
            if to is not None and to not in pipe.group.here:
                tensors = [torch.empty_like(tensor, device="meta") for tensor in tensors]
            tensors.reverse()
            for row in run:  # this function holds no tensor that it has handed out
                yield row.name, tensors.pop()

    return streamed()


def _rows(pipe: Pipe, trees: Mapping[int, StageTree], dtype: torch.dtype | None) -> list[Row]:
    """The parameters that this process sends."""
    rows = []
    for stage, here in trees.items():
        rank = pipe.placement.ranks_of(stage)[0]
        for index, leaf in enumerate(here.leaves):
            if leaf.own:
                raise CheckpointError(
                    f"{leaf.key!r} is in own=: each copy has another one, and none is whole"
                )
            value = leaf.value
            writes = rank in pipe.group.here and leaf.home in (None, stage)
            if is_tensor(value) and writes:
                kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
                rows.append(Row(stage, index, rank, leaf.key, leaf.shape, dtype_name(kind)))
    return rows


def _whole(pipe: Pipe, here: StageTree, row: Row) -> Tensor:
    """A whole parameter of this process; with parts, those of all copies."""
    leaf: Tensor = here.leaves[row.leaf].value.detach()
    if here.layout is None or here.leaves[row.leaf].span is None or pipe.copies is None:
        return leaf.to(DTYPES[row.dtype])
    group = pipe.copies.group
    total = torch.empty(row.shape, dtype=leaf.dtype, device=leaf.device)
    flat = total.view(-1)
    for copy in range(group.size):
        first, last = spans(replace(here.layout, part=copy))[row.leaf]
        if first < last:
            mine = (leaf.contiguous(),) if copy == pipe.copies.part else None
            spec = Spec((last - first,), (1,), leaf.dtype)
            flat[first:last] = group.share(mine, (spec,), copy)[0]
    return total.to(DTYPES[row.dtype])


def _send(pipe: Pipe, tensors: Sequence[Tensor], rows: Sequence[Row], bucket: int) -> None:
    """Fill the tensors of the other ranks, a piece after another; no rank runs far ahead of the
    others.
    """
    kept = 3 * _AHEAD * 2 * (pipe.group.size - 1) if pipe.group.at_once else 1
    piece = max(int(bucket * _PIECE / kept), 1 << 14)
    source = rows[0].rank
    own = source in pipe.group.here
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    views = [view for data in flat for view in data.split(piece) if view.numel()]
    for number, group in enumerate(grouped(views, Tensor.numel, piece)):
        specs = tuple(map(Spec.of, group))
        values = pipe.group.share(tuple(group) if own else None, specs, source)
        if not own:
            for view, value in zip(group, values, strict=True):
                view.copy_(value)
        del values
        if number % _AHEAD == _AHEAD - 1:
            pipe.group.all_reduce(torch.zeros(1, device=pipe.config.device))
