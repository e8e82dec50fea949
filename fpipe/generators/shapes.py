# SPDX-License-Identifier: Apache-2.0
"""Shapes that several schedules share: one chunk on each rank, and two directions through pairs of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import get_args

from ..actions.action import Placement, Row
from ..actions.action_kinds import Op
from ..actions.unit import unit
from ..errors import ScheduleError
from .patterns import Made, Tape, keep_microbatches, row_of, rows_of, tapes


def even_parts(microbatches: range, parts: int) -> list[range]:
    """Cut a range into parts whose lengths differ by 1 at most, the larger ones first.

    >>> even_parts(range(8), 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    size, larger = divmod(len(microbatches), parts)
    cuts = [k * size + min(k, larger) for k in range(parts + 1)]
    return [microbatches[start:stop] for start, stop in pairwise(cuts)]


def two_directions(
    name: str,
    ranks: int,
    microbatches: int,
    row: Callable[[int, int, range, range], Row],
    made_for: int,
    *,
    keep_last: bool = False,
    remedy: str = "",
) -> Made:
    """Rows of two directions, of ranks that pair from both ends.

    Half of the microbatches go up; of an odd number one more goes down. ``row(near, far, first,
    second)`` makes the row of a rank. ``near`` is its distance from the nearer end, ``far`` that
    from the other end. ``first`` are the microbatches that enter at the nearer end, ``second`` the
    others. Rows are made for ``made_for`` microbatches of each direction at least; then the first
    of each direction are kept, or the last. ``remedy`` is another remedy for an odd number of
    ranks.

    >>> two_directions("DualPipe", 1, 1, lambda near, far, first, second: (), 0)
    ([(0F0, 0B0)], Placement(0: [0]))
    """
    if ranks == 1:
        return one_chunk_a_rank(["FB" * microbatches], microbatches, 1)
    if ranks % 2:
        remedies = ", ".join(filter(None, (f"take {ranks - 1} or {ranks + 1}", remedy)))
        raise ScheduleError(
            f"{name} takes an even number of ranks, not {ranks}; {remedies}",
            rule="ranks",
        )
    going_up = microbatches // 2
    going_down = microbatches - going_up
    last_down = max(going_down, made_for)
    down = range(last_down)
    up = range(last_down, last_down + max(going_up, made_for))
    half = range(ranks // 2)
    upper = [row(near, ranks - 1 - near, down, up) for near in half]
    lower = [row(near, ranks - 1 - near, up, down) for near in half]
    if keep_last:
        kept = (*down[len(down) - going_down :], *up[len(up) - going_up :])
    else:
        kept = (*down[:going_down], *up[:going_up])
    rows = keep_microbatches(upper + lower[::-1], len(down) + len(up), kept)
    return rows, Placement.bidirectional(ranks, microbatches, range(going_down, microbatches))


def one_chunk_a_rank(
    patterns: Sequence[str],
    microbatches: int,
    stages: int,
    slices: int = 1,
) -> Made:
    """Rows of ranks that hold one chunk each: a pattern for each rank, and stage r on rank r.

    With more stages than ranks, each rank holds several neighbours, which run one after another as
    if they were one stage.

    >>> one_chunk_a_rank(["FFBB", "FBFB"], microbatches=2, stages=2)
    ([(0F0, 0F1, 0B0, 0B1), (1F0, 1B0, 1F1, 1B1)], Placement(0: [0], 1: [1]))
    """
    chunks = stages // len(patterns)
    path = tuple(stage // chunks for stage in range(stages))
    if chunks > 1:
        patterns = ["".join(letter * chunks for letter in pattern) for pattern in patterns]
    pairs = [
        (pattern, _tapes(rank, chunks, microbatches, slices))
        for rank, pattern in enumerate(patterns)
    ]
    rows = rows_of(pairs) if slices == 1 else [row_of(*row) for row in pairs]
    return rows, Placement((path,), len(patterns))


def _tapes(rank: int, chunks: int, microbatches: int, slices: int) -> dict[str, Tape]:
    """The tapes of a rank with ``chunks`` neighbours. F runs the slices of a microbatch in order,
    the others run them from the last one.
    """
    if chunks == slices == 1:
        return tapes(rank, microbatches)

    def tape(op: Op) -> Tape:
        way = 1 if op == "F" else -1
        stages = range(rank * chunks, (rank + 1) * chunks)[::way]
        parts = range(slices)[::way]
        units = [unit(m * slices + s, slices) for m in range(microbatches) for s in parts]
        return [*stages] * len(units), op, [at for at in units for _ in stages]

    return {op: tape(op) for op in get_args(Op)}
