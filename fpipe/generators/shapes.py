# SPDX-License-Identifier: Apache-2.0
"""Shapes that several schedules share: ranks with one chunk each, and ranks in pairs that run two
directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..actions.action import Action, AnyAction, Placement, Row
from ..errors import ScheduleError
from ..schedule import Schedule
from .patterns import deal, tapes


def evenly(microbatches: range, parts: int) -> list[range]:
    """A range cut in parts as even as can be, the larger ones first.

    >>> evenly(range(8), 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    size, larger = divmod(len(microbatches), parts)
    cuts = [k * size + min(k, larger) for k in range(parts + 1)]
    return [microbatches[a:b] for a, b in pairwise(cuts)]


def in_pairs(
    name: str,
    ranks: int,
    microbatches: int,
    make: Callable[[int, int], Sequence[Row]],
    other: str = "",
    *,
    stages: int | None = None,
) -> Schedule:
    """The schedule with two directions: ranks pair from both ends, and of an odd count of
    microbatches one more goes down than up. ``make(going_down, going_up)`` returns the rows for two
    ranks or more. ``other`` is another remedy for an odd count of ranks; ``stages``, one a rank by
    default, go down the ranks and up again.

    >>> in_pairs("DualPipe", 1, 1, lambda going_down, going_up: [])
    Schedule(DualPipe, ranks=1, microbatches=1, stages=1)
    """
    if ranks == 1:
        return one_a_rank(name, ["FB" * microbatches], microbatches, stages or 1)
    if ranks % 2:
        remedy = ", ".join(filter(None, (f"take {ranks - 1} or {ranks + 1}", other)))
        raise ScheduleError(
            f"{name} pairs ranks from both ends, and {ranks} ranks are odd; {remedy}", rule="ranks"
        )
    going_up = microbatches // 2
    rows = tuple(make(microbatches - going_up, going_up))
    up = range(microbatches - going_up, microbatches)
    per_rank = (stages or ranks) // ranks
    placement = Placement.bidirectional(ranks, microbatches, up, per_rank)
    return Schedule(rows, placement, microbatches, name)


def one_a_rank(
    name: str, patterns: Sequence[str], microbatches: int, stages: int, slices: int = 1
) -> Schedule:
    """The schedule of ranks that hold one chunk each: one pattern a rank, and stage ``r`` on rank
    ``r``.

    With more stages than ranks each rank holds as many neighbours, run one after another as if they
    were one.

    >>> print(one_a_rank("1F1B", ["FFBB", "FBFB"], microbatches=2, stages=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    """
    rows = tuple(
        deal(pattern, tapes(rank, microbatches, slices=slices))
        for rank, pattern in enumerate(patterns)
    )
    per_rank = stages // len(patterns)
    home = tuple(stage // per_rank for stage in range(stages))
    if per_rank > 1:
        rows = tuple(_spread(row, per_rank) for row in rows)
    return Schedule(rows, Placement((home,), len(patterns)), microbatches, name, slices=slices)


def _spread(row: Iterable[AnyAction], per_rank: int) -> Row:
    up = range(per_rank)
    down = range(per_rank - 1, -1, -1)
    return tuple(
        Action(part.stage * per_rank + step, part.op, part.microbatch)
        for action in row
        for part in action.parts
        for step in (up if part.op == "F" else down)
    )
