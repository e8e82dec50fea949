# SPDX-License-Identifier: Apache-2.0
"""Schedules of fpipe as the actions of ``torch.distributed.pipelining``, and back; their CSV with
and without messages.

The only file that uses private names of torch's package. Must not know modules.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias

from torch.distributed.pipelining.schedules import _Action as Action, _add_send_recv

from ...errors import ScheduleError
from ...schedule import Schedule

Format: TypeAlias = Literal["compute_only", "compute_comms"]
#: By rank, its actions; None where a rank is idle.
Order: TypeAlias = Mapping[int, Sequence[Action | None]]


def order_of(schedule: Schedule) -> dict[int, list[Action]]:
    """Return the order that a schedule is, in torch's actions.

    >>> order_of(Schedule.parse("[0F0, 0B0]"))
    {0: [0F0, 0B0]}
    """
    rows = (map(Action.from_str, map(str, row)) for row in schedule)
    return {rank: [a for a in actions if a is not None] for rank, actions in enumerate(rows)}


def schedule_of(order: Order) -> Schedule:
    """Return the schedule of an order; idle steps and messages in it are left out.

    >>> schedule_of({0: [Action.from_str("0F0"), None, Action.from_str("0B0")]})
    Schedule(ranks=1, microbatches=1, stages=1)
    """
    rows = (
        [action for action in order[rank] if action is not None and action.is_compute_op]
        for rank in sorted(order)
    )
    return Schedule.parse("\n".join(map(str, rows))).check()


def with_messages(schedule: Schedule) -> Order:
    """Return the order with the sends and receives that torch's own runtime would add."""
    if schedule.placement.replicated:
        raise ScheduleError(
            "a schedule with replicas of stages has no form with messages; dump it as compute_only"
        )
    return _add_send_recv(order_of(schedule), schedule.placement.rank_of, schedule.stages)


def dump(schedule: Schedule, path: str | PathLike[str], form: Format) -> None:
    """Write the CSV of a schedule in one of torch's formats."""
    _check(form)
    if form == "compute_only":
        schedule.to_csv(path)
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(with_messages(schedule).values())


def reduces(text: str, form: Format) -> bool:
    """Whether gradients are scaled: torch does so where an order has the action REDUCE_GRAD, which
    it adds to those of computations alone.
    """
    _check(form)
    return form == "compute_only" or "REDUCE_GRAD" in text


def _check(form: str) -> None:
    if form not in ("compute_only", "compute_comms"):
        raise NotImplementedError(
            f"format={form!r} is not implemented; give 'compute_only' or 'compute_comms'"
        )
