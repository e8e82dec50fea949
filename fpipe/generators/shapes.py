# SPDX-License-Identifier: Apache-2.0
"""Shapes that several schedules share: one chunk on each rank, and two directions through pairs of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..actions.action import Action, AnyAction, Placement, Row
from ..errors import ScheduleError
from ..schedule import Schedule
from .patterns import row_of, tapes


def even_parts(microbatches: range, parts: int) -> list[range]:
    """Cut a range into parts whose lengths differ by 1 at most, the larger ones first.

    >>> even_parts(range(8), 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    size, larger = divmod(len(microbatches), parts)
    cuts = [k * size + min(k, larger) for k in range(parts + 1)]
    return [microbatches[start:stop] for start, stop in pairwise(cuts)]


def two_directions_in_pairs(
    name: str,
    ranks: int,
    microbatches: int,
    make: Callable[[int, int], Sequence[Row]],
    remedy: str = "",
    *,
    stages: int | None = None,
) -> Schedule:
    """A schedule with two directions, whose ranks pair from both ends.

    Half of the microbatches go up; of an odd number one more goes down. ``make(going_down,
    going_up)`` returns the rows for two ranks or more. ``stages`` go down the ranks and up again;
    by default there is one on each rank. ``remedy`` is another remedy for an odd number of ranks.

    >>> two_directions_in_pairs("DualPipe", 1, 1, lambda going_down, going_up: [])
    Schedule(DualPipe, ranks=1, microbatches=1, stages=1)
    """
    if ranks == 1:
        return one_chunk_a_rank(name, ["FB" * microbatches], microbatches, stages or 1)
    if ranks % 2:
        remedies = ", ".join(filter(None, (f"take {ranks - 1} or {ranks + 1}", remedy)))
        raise ScheduleError(
            f"{name} pairs ranks from both ends, and {ranks} ranks are odd; {remedies}",
            rule="ranks",
        )
    going_up = microbatches // 2
    rows = tuple(make(microbatches - going_up, going_up))
    up = range(microbatches - going_up, microbatches)
    per_rank = (stages or ranks) // ranks
    placement = Placement.bidirectional(ranks, microbatches, up, per_rank)
    return Schedule(rows, placement, microbatches, name)


def one_chunk_a_rank(
    name: str, patterns: Sequence[str], microbatches: int, stages: int, slices: int = 1
) -> Schedule:
    """A schedule whose ranks hold one chunk each: a pattern for each rank, and stage r on rank r.

    With more stages than ranks, each rank holds several neighbours, which run one after another as
    if they were one stage.

    >>> print(one_chunk_a_rank("1F1B", ["FFBB", "FBFB"], microbatches=2, stages=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    """
    rows = tuple(
        row_of(pattern, tapes(rank, microbatches, slices=slices))
        for rank, pattern in enumerate(patterns)
    )
    per_rank = stages // len(patterns)
    path = tuple(stage // per_rank for stage in range(stages))
    if per_rank > 1:
        rows = tuple(_spread(row, per_rank) for row in rows)
    return Schedule(rows, Placement((path,), len(patterns)), microbatches, name, slices=slices)


def _spread(row: Iterable[AnyAction], per_rank: int) -> Row:
    """The row with each action as one for each stage of the rank."""
    up = range(per_rank)
    down = range(per_rank - 1, -1, -1)
    return tuple(
        Action(part.stage * per_rank + step, part.op, part.microbatch)
        for action in row
        for part in action.parts
        for step in (up if part.op == "F" else down)
    )
