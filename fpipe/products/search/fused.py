# SPDX-License-Identifier: Apache-2.0
"""Variants of a schedule with whole backwards, and with fused forwards and backwards, where these
cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ... import Action, Costs, Fused, Schedule
from ...actions import AnyAction, Row, plain


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

    def whole(before: AnyAction, action: Action) -> AnyAction | None:
        follows = action.op == "W" and before == action._replace(op="I")
        if follows and mergeable[action.stage]:
            return action._replace(op="B")
        return None

    def fused(before: AnyAction, action: Action) -> AnyAction | None:
        if isinstance(before, Fused) or (before.op, action.op) != ("F", "B"):
            return None
        if before.microbatch != action.microbatch:
            return Fused((before, action))
        return None

    merged = replace(schedule, rows=tuple(_joined(row, whole) for row in schedule.rows))
    yield merged
    if costs.overlap is not None:
        yield replace(merged, rows=tuple(_joined(row, fused) for row in merged.rows))


def _joined(row: Row, join: Callable[[AnyAction, Action], AnyAction | None]) -> Row:
    """A row in which two actions that follow each other are one where ``join`` returns it."""
    result: list[AnyAction] = []
    for action in plain(row):
        both = join(result[-1], action) if result else None
        if both is None:
            result.append(action)
        else:
            result[-1] = both
    return tuple(result)
