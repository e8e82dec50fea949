# SPDX-License-Identifier: Apache-2.0
"""Forwards alone, for evaluation: the forwards of any schedule, in an order that does not leave
room for backwards.

A schedule for training spaces its forwards so that backwards fit between them. Without backwards
most orders have no gap: those of one stage a rank and of a loop idle for p - 1 chunk passes, which
is the least. A V does have: VMin on 3 ranks (capitals are a rank's first chunk, small letters its
second):

    rank 0   F F F . . f . f F f F . . f F . . f . . . f
    rank 1   . F F F f . f . f F . . f F . . f F . . f .        in the order of VMin
    rank 2   . . F f F f F f . . F f . . F f . . F f . .

    rank 0   F F F F F f F f . f . f . f . f
    rank 1   . F F F f F f F f F f . f . f .        as they come: idle 2(p - 1), the least
    rank 2   . . F f F f F f F f F f F f . .

Each rank runs, whenever it is free, the forward that has arrived, of its latest stage that has one:
results come out early, and few values wait. Every stage keeps the order of its microbatches, so
that a state which goes from one to the next stays the same. No name makes such a schedule, since a
name's schedule can be trained with; pipelines do it.
"""

from __future__ import annotations

from collections import deque

from ..actions.action import Action, plain
from ..actions.costs import Costs
from ..schedule import Schedule
from .catalogue import is_path


def forwards_alone(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in another order where this is shorter at unit cost.

    >>> from .catalogue import make_schedule
    >>> schedule = make_schedule("VMin", 3, 6)
    >>> schedule.only("F").simulate().total, forwards_alone(schedule).simulate().total
    (22.0, 16.0)
    """
    forwards = schedule.only("F")
    if schedule.slices > 1 or not any(
        len({part.stage for part in plain(row)}) > 1 for row in forwards
    ):
        return forwards
    rows = tuple(map(tuple, _as_they_come(forwards)))
    other = Schedule(rows, schedule.placement, schedule.microbatches, schedule.name)
    costs = Costs()
    if other.simulate(costs).total < forwards.simulate(costs).total:
        return other
    return forwards


def forwards_of(schedule: Schedule, source: object) -> Schedule:
    """The schedule of forwards alone of a pipeline with this schedule, from that source; one that
    the caller gave, or a file has, keeps its order.
    """
    named = isinstance(source, str) and not is_path(source)
    if named:
        return forwards_alone(schedule)
    return schedule.only("F")


def _as_they_come(schedule: Schedule) -> list[list[Action]]:
    """By rank, its forwards in the order of time, each as soon as it can run, those of later stages
    first.
    """
    queues: list[dict[int, deque[int]]] = []
    for row in schedule:
        held: dict[int, deque[int]] = {}
        for part in plain(row):
            held.setdefault(part.stage, deque()).append(part.microbatch)
        queues.append(dict(sorted(held.items(), reverse=True)))
    rows: list[list[Action]] = [[] for _ in queues]
    ended = set[tuple[int, int]]()
    while True:
        ran = set[tuple[int, int]]()
        for row, held in zip(rows, queues, strict=True):
            for stage, queue in held.items():
                if queue and (stage == 0 or (stage - 1, queue[0]) in ended):
                    microbatch = queue.popleft()
                    row.append(Action(stage, "F", microbatch))
                    ran.add((stage, microbatch))
                    break
        if not ran:
            return rows
        ended |= ran


def forwards_first(schedule: Schedule) -> Schedule:
    """The same schedule with every rank's forwards before its backwards.

    >>> print(forwards_first(Schedule.parse("[0F0, 0B0, 0F1, 0B1]")))
    [0F0, 0F1, 0B0, 0B1]
    """
    forwards = schedule.only("F")
    backwards = schedule.only("BIW")
    rows = tuple((*f, *b) for f, b in zip(forwards, backwards, strict=True))
    return Schedule(rows, schedule.placement, schedule.microbatches, schedule.name)
