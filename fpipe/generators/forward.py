# SPDX-License-Identifier: Apache-2.0
"""Schedules of forwards alone, for evaluation: the forwards of any schedule, without the room that
it leaves for backwards.

A schedule for training spaces its forwards so that backwards fit between them. Without backwards
most orders have no gap: with one stage a rank, or with a loop, a rank is idle for p - 1 passes of a
chunk, which is the least. On a V there are gaps. VMin on 3 ranks, with capitals for the first chunk
of a rank and small letters for its second:

    rank 0   F F F . . f . f F f F . . F f . . f . . . f
    rank 1   . F F F f . f . f F . . f F . . f F . . f .        in the order of VMin
    rank 2   . . F f F f F f . . F f . . F f . . F f . .

    rank 0   F F F F F f F f . f . f . f . f
    rank 1   . F F F f F f F f F f . f . f .        as soon as possible: idle 2(p - 1), the least
    rank 2   . . F f F f F f F f F f F f . .

A free rank runs a forward that has its input, of the latest stage that has one. So results come
early, and few values wait. Every stage keeps the order of its microbatches: a state that goes from
one to the next stays the same.

The catalogue has no name for such a schedule, because every named schedule can train. Pipelines
make them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

from ..actions.action import Action, Row, unfused
from ..errors import ScheduleError
from ..schedule import Schedule
from .catalogue import is_path


def forwards_alone(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in another order if that is shorter at unit cost.

    >>> from .catalogue import make_schedule
    >>> schedule = make_schedule("VMin", 3, 6)
    >>> schedule.only("F").simulate().total, forwards_alone(schedule).simulate().total
    (22.0, 16.0)
    """
    forwards = schedule.only("F")
    rows = tuple(_in_waves(row, schedule.ranks) for row in forwards)
    if schedule.slices > 1 or rows == forwards.rows:
        return forwards
    reordered = replace(forwards, rows=rows)
    with suppress(ScheduleError):  # stages run microbatches in different orders, and would wait
        if reordered.simulate().total < forwards.simulate().total:
            return reordered
    return forwards


def _in_waves(row: Row, ranks: int) -> Row:
    """The forwards of a row by their slots in waves."""
    numbers = defaultdict[int, Iterator[int]](count)
    numbered = [(next(numbers[part.stage]), part) for part in unfused(row)]

    def slot(forward: tuple[int, Action]) -> int:
        number, part = forward
        group, place = divmod(number, ranks)
        return group * ranks * len(numbers) + 2 * place + part.stage

    return tuple(part for _, part in sorted(numbered, key=slot))


def forwards_of(schedule: Schedule, source: object) -> Schedule:
    """The schedule of forwards alone for a pipeline with this schedule.

    ``source`` is what the caller gave for it. A named schedule may get another order. A Schedule of
    the caller, or of a file or function, keeps its order.
    """
    if isinstance(source, str) and not is_path(source):
        return forwards_alone(schedule)
    return schedule.only("F")


def forwards_first(schedule: Schedule) -> Schedule:
    """The same schedule with every rank's forwards before its backwards.

    >>> print(forwards_first(Schedule.parse("[0F0, 0B0, 0F1, 0B1]")))
    [0F0, 0F1, 0B0, 0B1]
    """
    rows = tuple((*f, *b) for f, b in zip(schedule.only("F"), schedule.only("BIW"), strict=True))
    return replace(schedule, rows=rows)
