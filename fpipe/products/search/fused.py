# SPDX-License-Identifier: Apache-2.0
"""Variants of a schedule with whole backwards, and with fused forwards and backwards, where these
cost less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ... import Action, Costs, Fused, Schedule
from ...actions import AnyAction, Row
from ...errors import ScheduleError


def merged(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """The schedule with I and W of one microbatch as B where they follow each other; and that with
    F and B fused.

    >>> s = Schedule.parse("[0F0, 0F1, 0I0, 0W0, 0I1, 0W1]")
    >>> print(*merged(s, Costs(B=1, overlap=1)), sep="\\n")
    [0F0, 0F1, 0B0, 0B1]
    [0F0, (0F1;0B0)OVERLAP_F_B, 0B1]
    """
    times = costs.times(schedule.stages)
    mergeable = [b <= i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)]
    whole = replace(schedule, rows=tuple(_whole(row, mergeable) for row in schedule.rows))
    yield whole
    if costs.overlap is None:
        return
    rows = tuple(_fused(row) for row in whole.rows)
    for chosen in [range(schedule.ranks), *([rank] for rank in range(schedule.ranks))]:
        mixed = (rows[rank] if rank in chosen else row for rank, row in enumerate(whole.rows))
        try:
            yield replace(schedule, rows=tuple(mixed)).check()
        except ScheduleError:
            continue
        if len(chosen) == schedule.ranks:
            return


def _whole(row: Sequence[AnyAction], mergeable: Sequence[bool]) -> Row:
    result: list[AnyAction] = []
    for action in row:
        last = result[-1] if result else None
        if (
            isinstance(action, Action)
            and action.op == "W"
            and mergeable[action.stage]
            and last == action._replace(op="I")
        ):
            result[-1] = action._replace(op="B")
        else:
            result.append(action)
    return tuple(result)


def _fused(row: Sequence[AnyAction]) -> Row:
    """Each F fused with the B after it, where they are of different microbatches."""
    result: list[AnyAction] = []
    for action in row:
        last = result[-1] if result else None
        if (
            isinstance(action, Action)
            and isinstance(last, Action)
            and action.microbatch != last.microbatch
            and (last.op, action.op) == ("F", "B")
        ):
            result[-1] = Fused((last, action))
        else:
            result.append(action)
    return tuple(result)
