# SPDX-License-Identifier: Apache-2.0
"""One order of collectives for all members of a communicator, or no weave.

Members that start the collectives of one group in different orders hang, or exchange wrong values.
A rank's plan fixes the order in which it will start them; before anything runs the members compare.
Where their orders differ, they run one program after the other, with the reason in the plan; where
even these orders differ, an error reports it. Knows plans and process groups by name; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from ...errors import MismatchError
from ...lowering.builder import lower
from ...lowering.job import LoweringInput
from ...lowering.plan import Plan
from .estimates import LINKS, Collective, Link
from .fused import Weaving
from .members import gather_members, time_members
from .segments import collectives_of

_LEAST, _MOST = 1024, 4 << 20  #: bytes of the exchanges by which a communicator is measured


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


def in_one_order(inputs: Mapping[int, LoweringInput]) -> dict[int, Plan]:
    """The plans of the ranks of this process, with one order of collectives on every
    communicator.
    """
    _measure_links(inputs)
    plans = {rank: lower(job, rank) for rank, job in inputs.items()}
    reason = _difference(plans, inputs)
    if reason:
        plans = {rank: lower(_in_turn(job, reason), rank) for rank, job in inputs.items()}
    reason = _difference(plans, inputs)  # others may have changed their order
    if reason:
        raise MismatchError(
            f"{reason}; let all of them run the same stages in the same order, with "
            "overlap='sequential' if that helps, or give each order a group of its own"
        )
    return plans


def _in_turn(job: LoweringInput, reason: str) -> LoweringInput:
    """The same without weaves."""
    features = [Weaving(reason) if isinstance(one, Weaving) else one for one in job.features]
    return replace(job, features=tuple(features))


def _difference(plans: Mapping[int, Plan], inputs: Mapping[int, LoweringInput]) -> str:
    """Where the orders of the members of a communicator differ first; "" where all are alike.

    Every member of a communicator compares all of its communicators in one order.
    """
    reasons = [
        difference(name, gather_members(name, order))
        for name, order in sorted(_starts_of(plans, inputs).items())
    ]
    return next(filter(None, reasons), "")


def _measure_links(inputs: Mapping[int, LoweringInput]) -> None:
    """Have the members of each communicator measure it, once, where something is woven around
    it.
    """
    largest = {c.members: c for c in sorted(_woven(inputs), key=attrgetter("nbytes"))}
    for name, collective in sorted(largest.items()):
        reports = gather_members(name, (name in LINKS, collective.nbytes))
        if all(measured for measured, _ in reports):
            continue
        device = collective.device
        large = min(max(size for _, size in reports), _MOST)
        times = time_members(name, _LEAST, device), time_members(name, large, device)
        small, long = map(median, zip(*gather_members(name, times), strict=True))
        more = max(1.0, (long - small) * 1e9)
        LINKS[name] = Link(int(small * 1e9), (large - _LEAST) / more)


def _woven(inputs: Mapping[int, LoweringInput]) -> Iterator[Collective]:
    """The collectives around which something may be woven."""
    for job in inputs.values():
        if not any(isinstance(feature, Weaving) for feature in job.features):
            continue
        for kind in job.kinds:
            for own in kind.programs.values():
                if not own.compiled:
                    yield from (*collectives_of(own.f), *collectives_of(own.b))


def _starts_of(
    plans: Mapping[int, Plan], inputs: Mapping[int, LoweringInput]
) -> dict[str, list[Start]]:
    """What the ranks of this process start, by communicator, in their order."""
    starts: dict[str, list[Start]] = {}
    for rank, plan in sorted(plans.items()):
        losses = [kind.loss for kind in inputs[rank].kinds if kind.loss is not None]
        of_losses = {program for loss in losses for program in (loss.f, loss.b)}
        for ins in plan.instructions:
            if ins.program is None or ins.action is None:
                continue
            program = ins.action.op + " of the loss" * (ins.program in of_losses)
            for c in collectives_of(ins.program):
                start = Start(program, c.number, c.op, c.signature, str(ins.action))
                starts.setdefault(c.members, []).append(start)
    return starts


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
