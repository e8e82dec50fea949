# SPDX-License-Identifier: Apache-2.0
"""One order of collectives for all members of a communicator, or no weave.

Members that start the collectives of one group in different orders hang, or exchange wrong values.
A rank's plan fixes the order in which it will start them; before anything runs the members compare.
Where their orders differ, they run one program after the other, with the reason in the plan; where
even these orders differ, an error reports it. Knows plans and process groups by name; no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from ...errors import MismatchError
from ...lowering.builder import lower
from ...lowering.instructions import Run
from ...lowering.job import Job
from ...lowering.plan import Plan
from .fused import Weaving
from .members import gather_members
from .segments import collectives_of


class Start(NamedTuple):
    """A collective that a rank starts: which one of which program, and what all members must have
    alike, its kind, dtype and axes; ``action`` is that of this rank.
    """

    program: str
    number: int
    kind: str
    signature: str
    action: str = ""

    def __str__(self) -> str:
        return (
            f"starts {self.kind} {self.number} of {self.program} ({self.signature}) in "
            f"{self.action}"
        )


def in_one_order(jobs: Mapping[int, Job]) -> dict[int, Plan]:
    """The plans of the ranks of this process, with one order of collectives on every
    communicator.
    """
    plans = {rank: lower(job, rank) for rank, job in jobs.items()}
    reason = _difference(plans)
    if reason:  # the same without weaves
        for rank, job in jobs.items():
            features = (Weaving(reason) if isinstance(f, Weaving) else f for f in job.features)
            plans[rank] = lower(replace(job, features=tuple(features)), rank)
    reason = _difference(plans)  # others may have changed their order
    if reason:
        raise MismatchError(
            f"{reason}; let all of them run the same stages in the same order, with "
            "overlap='sequential' if that helps, or give each order a group of its own"
        )
    return plans


def _difference(plans: Mapping[int, Plan]) -> str:
    """Where the orders of the members of a communicator differ first; "" where all are alike.

    Every member of a communicator compares all of its communicators in one order.
    """
    starts: dict[str, list[Start]] = {}  # of this process, by communicator
    for _, plan in sorted(plans.items()):
        for op, action, *_ in plan.instructions:
            if not isinstance(op, Run) or action is None:
                continue
            program = action.op + " of the loss" * (op.stage != action.stage)
            for c in collectives_of(op.program):
                start = Start(program, c.number, c.op, c.signature, str(action))
                starts.setdefault(c.members, []).append(start)
    reasons = [
        difference(name, gather_members(name, order)) for name, order in sorted(starts.items())
    ]
    return next(filter(None, reasons), "")


def difference(name: str, orders: Sequence[Sequence[Start]]) -> str:
    """Where the orders of the members of a communicator differ first; "" where they are alike."""
    for row in zip_longest(*orders):
        if len({start and start[:-1] for start in row}) > 1:
            members = [f"member {m} {start or 'has no more'}" for m, start in enumerate(row)]
            return (
                f"the members of group {name} would start its collectives in different orders: "
                f"{'; '.join(members)}"
            )
    return ""
