# SPDX-License-Identifier: Apache-2.0
"""The rule of the ready order. Nothing here knows time, tensors or plans.

* A rank may run the actions of its *window*: ``window`` actions from the first that has not run.
* Actions that provide the same fact of a stage run in the order of the row. So gradients are added
  in that order, and a message is never sent before an earlier one of its kind.
* Of the actions that can run, the first of the row runs. Those for which no other stage waits,
  such as W, come last: they fill the time in which a rank would wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...actions.action import AnyAction, Row
from ...actions.action_kinds import KINDS, READERS
from ...errors import ScheduleError


def default_window(rows: Sequence[Row], units: int) -> int:
    """The actions of as many microbatches as there are ranks, on the rank with the most actions.

    >>> from fpipe import make_schedule
    >>> [default_window(make_schedule(name, ranks=4, microbatches=8).rows, 8)
    ...     for name in ("1F1B", "ZBV")]
    [8, 24]
    """
    longest = max(map(len, rows), default=0)
    return max(1, -(-longest * len(rows) // max(units, 1)))


def check_window(window: object) -> int:
    """``window`` if it is a number of actions; else ScheduleError.

    >>> check_window(0)
    Traceback (most recent call last):
    ...
    fpipe.errors.ScheduleError: window=0; give a number of actions, 1 at least
    """
    if type(window) is not int or window < 1:
        raise ScheduleError(
            f"window={window!r:.80}; give a number of actions, 1 at least", rule="window"
        )
    return window


def before(row: Row) -> list[tuple[int, ...]]:
    """For each action the positions of those that run before it: of each fact that it provides of
    a stage, the action that provides this fact before it in the row.

    >>> from fpipe import Schedule
    >>> before(Schedule.parse("[0F0, 0F1, 0I0, 0B1, 0W0]")[0])
    [(), (0,), (), (2,), (3,)]
    """
    last: dict[tuple[int, str], int] = {}
    found = []
    for position, action in enumerate(row):
        earlier = set[int]()
        for part in action.parts:
            for kind in KINDS[part.op].provides:
                fact = part.stage, kind
                if fact in last:
                    earlier.add(last[fact])
                last[fact] = position
        earlier.discard(position)
        found.append(tuple(sorted(earlier)))
    return found


def unawaited(action: AnyAction) -> bool:
    """Whether no other stage waits for an action."""
    return not any(fact in READERS for part in action.parts for fact in KINDS[part.op].provides)
