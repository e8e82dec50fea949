# SPDX-License-Identifier: Apache-2.0
"""Variants of a schedule with whole backwards, and with fused forwards and backwards, where these
cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ... import Action, Costs, Fused, Schedule
from ...actions import AnyAction, Row
from ...errors import ScheduleError


def variants(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """The schedule with I and W of one microbatch as B where they follow each other; and that with
    F and B fused.

    >>> s = Schedule.parse("[0F0, 0F1, 0I0, 0W0, 0I1, 0W1]")
    >>> print(*variants(s, Costs(B=1, overlap=1)), sep="\\n")
    [0F0, 0F1, 0B0, 0B1]
    [0F0, (0F1;0B0)OVERLAP_F_B, 0B1]
    """
    times = costs.times(schedule.stages)
    mergeable = [b <= i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)]

    def whole(before: Action, action: Action) -> AnyAction | None:
        same = before == action._replace(op="I") and action.op == "W"
        return action._replace(op="B") if same and mergeable[action.stage] else None

    def fused(before: Action, action: Action) -> AnyAction | None:
        apart = before.microbatch != action.microbatch
        return Fused((before, action)) if apart and (before.op, action.op) == ("F", "B") else None

    merged = replace(schedule, rows=tuple(_joined(row, whole) for row in schedule.rows))
    yield merged
    if costs.overlap is None:
        return
    rows = tuple(_joined(row, fused) for row in merged.rows)
    for chosen in [range(schedule.ranks), *([rank] for rank in range(schedule.ranks))]:
        mixed = (rows[rank] if rank in chosen else row for rank, row in enumerate(merged.rows))
        with suppress(ScheduleError):
            yield replace(schedule, rows=tuple(mixed)).check()
            if len(chosen) == schedule.ranks:
                return


def _joined(row: Row, join: Callable[[Action, Action], AnyAction | None]) -> Row:
    """A row in which two actions that follow each other are one where ``join`` returns it."""
    result: list[AnyAction] = []
    for action in row:
        before = result[-1] if result else None
        both = None
        if isinstance(action, Action) and isinstance(before, Action):
            both = join(before, action)
        if both is None:
            result.append(action)
        else:
            result[-1] = both
    return tuple(result)
