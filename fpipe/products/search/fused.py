# SPDX-License-Identifier: Apache-2.0
"""Variants of a schedule with whole backwards, and with fused forwards and backwards, where these
cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ... import Action, Costs, Fused, Schedule
from ...actions import AnyAction, Row


def variants(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """The schedule with I and W of one microbatch as B where they follow each other; and that with
    F and B fused, whose ranks may block each other.

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
        differ = before.microbatch != action.microbatch
        return Fused((before, action)) if differ and (before.op, action.op) == ("F", "B") else None

    merged = replace(schedule, rows=tuple(_joined(row, whole) for row in schedule.rows))
    yield merged
    if costs.overlap is not None:
        yield replace(merged, rows=tuple(_joined(row, fused) for row in merged.rows))


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
