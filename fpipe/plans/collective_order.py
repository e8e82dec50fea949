# SPDX-License-Identifier: Apache-2.0
"""One order of collectives for all members of a communicator, or no weave.

Members that start the collectives of one group in different orders wait for ever, or give each other wrong values. A
rank's plan says the order in which it will start them; before anything runs the members compare. Where woven pairs
differ, they fall back to one program after the other, with the reason in the plan; where even that differs, an error
says so. Knows plans and process groups by name; no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from ..collectives._store import gather_members, time_members
from ..errors import MismatchError
from .lowering import lower
from .plan import LoweringInput, Plan
from .weaving.estimates import LINKS, Link, pace
from .weaving.segments import collectives_of

#: (letter of the program, which of its collectives, kind, dtype and axes)
Sign: TypeAlias = tuple[str, int, str, str]
_LEAST, _MOST = 1024, 4 << 20  #: bytes of the exchanges by which a communicator is measured
Tell: TypeAlias = Callable[[str, Any], list[Any] | None]


class Starts(NamedTuple):
    """What one action of a rank's row starts on one communicator, as it is planned and one part after the other."""

    rank: int
    position: int
    action: str
    planned: tuple[Sign, ...]
    plain: tuple[Sign, ...]

    @property
    def woven(self) -> bool:
        """Whether the planned order is another than the plain one."""
        return self.planned != self.plain


def lower_together(jobs: Mapping[int, LoweringInput], tell: Tell = gather_members) -> dict[int, Plan]:
    """The plans of the ranks that live here, with one order of collectives on every communicator.

    ``tell(name, obj)`` gives what every member of a communicator said, or None where nobody else is asked.
    """
    if tell is gather_members:
        _measure_links(jobs)
    plans = {rank: lower(job, rank) for rank, job in jobs.items()}
    starts = starts_of(plans, jobs)
    if not starts:
        return plans
    refused: dict[tuple[int, int], str] = {}
    for name in sorted(starts):
        told = tell(name, starts[name])
        if told is not None:
            mine = conflicts(name, told)
            refused |= {
                (told[m][k].rank, told[m][k].position): reason
                for (m, k), reason in mine.items()
                if told[m] == starts[name]
            }
    if refused:
        for rank, job in jobs.items():
            plans[rank] = lower(replace(job, overlap=replace(job.overlap, refused=refused)), rank)
        starts = starts_of(plans, jobs)
    for name in sorted(starts):  # others may have fallen back for the sake of another communicator
        told = tell(name, starts[name])
        if told is not None and conflicts(name, told):
            raise MismatchError(
                f"the members of group {name} could not agree on one order of collectives for their woven actions; "
                'say fpipe.pipeline(..., overlap="sequential")'
            )
    return plans


def _measure_links(jobs: Mapping[int, LoweringInput]) -> None:
    """Have the members of each communicator measure it, once, where something is woven around it."""
    sizes: dict[str, int] = {}
    devices: dict[str, str] = {}
    for job in jobs.values():
        for kind in job.kinds if job.overlap.how == "weave" else ():
            for own in kind.programs.values():
                for program in () if own.compiled else (own.f, own.b):
                    for c in collectives_of(program):
                        sizes[c.members] = max(sizes.get(c.members, 0), c.nbytes)
                        devices[c.members] = c.device
    for name, size in sorted(sizes.items()):
        told = gather_members(name, (name in LINKS, size))
        if told is None or all(known for known, _ in told):
            continue
        large = min(max(size for _, size in told), _MOST)
        kind = devices[name]
        found = gather_members(name, (time_members(name, _LEAST, kind), time_members(name, large, kind), pace(kind)))
        assert found is not None
        small, long, paced = (median(each[k] for each in found) for k in (0, 1, 2))
        LINKS[name] = Link(int(small * 1e9), (large - _LEAST) / max(1.0, (long - small) * 1e9), paced)


def starts_of(plans: Mapping[int, Plan], jobs: Mapping[int, LoweringInput]) -> dict[str, list[Starts]]:
    """What the ranks that live here start, by communicator, in their order."""
    found: dict[str, list[Starts]] = {}
    memo: dict[int, Any] = {}
    for rank, plan in sorted(plans.items()):
        job = jobs[rank]
        row = job.schedule[rank]
        place = {
            part: (position, line) for position, action in enumerate(row) for line, part in enumerate(action.parts)
        }
        losses = [kind.loss for kind in job.kinds if kind.loss is not None]
        turn = {id(loss.f): 1 for loss in losses} | {id(loss.b): -1 for loss in losses}
        by_place: dict[tuple[str, int], list[tuple[tuple[int, int], Sign]]] = {}
        for ins in plan.instructions:
            if ins.program is None or ins.action is None:
                continue
            if id(ins.program) not in memo:
                memo[id(ins.program)] = collectives_of(ins.program)
            position, line = place[ins.action]
            loss = turn.get(id(ins.program), 0)  # the loss's programs stand after the last F and before the last B
            for c in memo[id(ins.program)]:
                sign = (f"{ins.action.op} of the loss" if loss else ins.action.op, c.number, c.op, c.told)
                by_place.setdefault((c.members, position), []).append(((line, loss), sign))
        for (members, position), planned in sorted(by_place.items(), key=lambda item: item[0][1]):
            plain = tuple(sign for _, sign in sorted(planned))
            each = tuple(sign for _, sign in planned)
            found.setdefault(members, []).append(Starts(rank, position, str(row[position]), each, plain))
    return found


def conflicts(name: str, told: Sequence[Sequence[Starts]]) -> dict[tuple[int, int], str]:
    """Which woven actions must not be woven, as (member, index into what it told), and why; raises where it is no
    weave that differs."""
    refused: dict[tuple[int, int], str] = {}
    while True:
        orders = [
            [(sign, k) for k, each in enumerate(mine) for sign in (each.plain if (m, k) in refused else each.planned)]
            for m, mine in enumerate(told)
        ]
        for row in zip_longest(*orders):
            if len({None if found is None else found[0] for found in row}) > 1:
                break
        else:
            return refused
        woven = [
            (m, found[1])
            for m, found in enumerate(row)
            if found is not None and (m, found[1]) not in refused and told[m][found[1]].woven
        ]
        said = "; ".join(f"member {m} {_said(found, told[m])}" for m, found in enumerate(row))
        if not woven:
            raise MismatchError(
                f"the members of group {name} would start its collectives in different orders: {said}; let all of them "
                "run the same stages in the same order, or give each order a group of its own"
            )
        for pair in woven:
            refused[pair] = f"the members of group {name} would start its collectives in different orders: {said}"


def _said(found: tuple[Sign, int] | None, mine: Sequence[Starts]) -> str:
    if found is None:
        return "has no more"
    (letter, number, op, told), k = found
    return f"starts {op} {number} of {letter} ({told}) in {mine[k].action}"
