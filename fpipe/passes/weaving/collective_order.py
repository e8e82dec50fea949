# SPDX-License-Identifier: Apache-2.0
"""One order of collectives for all members of a communicator, or no weave.

Members that start the collectives of one group in different orders hang, or exchange wrong values.
A rank's plan fixes the order in which it will start them; before anything runs the members compare.
Where woven actions differ, they fall back to one program after the other, with the reason in the
plan; where the orders differ even then, an error reports it. Knows plans and process groups by
name; no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from ...collectives._store import gather_members, time_members
from ...collectives.faults import watched
from ...errors import MismatchError
from ...lowering.builder import lower
from ...lowering.plan import LoweringInput, Plan
from .estimates import LINKS, Link, pace
from .fused import Weaving
from .segments import collectives_of

#: (letter of the program, which of its collectives, kind, dtype and axes)
Sign: TypeAlias = tuple[str, int, str, str]
_LEAST, _MOST = 1024, 4 << 20  #: bytes of the exchanges by which a communicator is measured


class Starts(NamedTuple):
    """What one action of a rank's row starts on one communicator, as it is planned and one part
    after the other.
    """

    rank: int
    position: int
    action: str
    planned: tuple[Sign, ...]
    plain: tuple[Sign, ...]


def in_one_order(inputs: Mapping[int, LoweringInput], known: Mapping[int, Plan]) -> dict[int, Plan]:
    """The plans of the ranks of this process, with one order of collectives on every communicator.

    ``known`` are plans that need not be made.
    """
    _measure_links(inputs)
    plans = {
        rank: known[rank] if rank in known else lower(job, rank) for rank, job in inputs.items()
    }
    starts = starts_of(plans, inputs)
    refused: dict[tuple[int, int], str] = {}
    for name in sorted(starts):
        reports = _gathered(name, starts[name]) or []
        for (member, k), reason in conflicts(name, reports).items():
            if reports[member] == starts[name]:
                refused[reports[member][k].rank, reports[member][k].position] = reason
    if refused:
        for rank, source in inputs.items():
            plans[rank] = lower(_refusing(source, refused), rank)
        starts = starts_of(plans, inputs)
    for name in sorted(starts):  # others may have fallen back because of another communicator
        if conflicts(name, _gathered(name, starts[name]) or []):
            raise MismatchError(
                f"the members of group {name} could not agree on one order of collectives for "
                "their woven actions; "
                'say fpipe.pipeline(..., overlap="sequential")'
            )
    return plans


def _refusing(job: LoweringInput, refused: Mapping[tuple[int, int], str]) -> LoweringInput:
    """The same without the weaves of some actions."""
    features = tuple(
        Weaving(replace(each.overlap, refused=refused)) if isinstance(each, Weaving) else each
        for each in job.features
    )
    return replace(job, features=features)


def _gathered(name: str, obj: Any) -> list[Any] | None:
    """``gather_members`` with an end, and an error that names the member that does not answer."""
    with watched(name)():
        return gather_members(name, obj)


def _measure_links(inputs: Mapping[int, LoweringInput]) -> None:
    """Have the members of each communicator measure it, once, where something is woven around
    it.
    """
    started = (
        c
        for source in inputs.values()
        if any(
            isinstance(each, Weaving) and each.overlap.how == "weave" for each in source.features
        )
        for kind in source.kinds
        for programs in kind.programs.values()
        if not programs.compiled
        for program in (programs.f, programs.b)
        for c in collectives_of(program)
    )
    largest = {c.members: c for c in sorted(started, key=lambda c: c.nbytes)}
    for name, collective in sorted(largest.items()):
        reports = _gathered(name, (name in LINKS, collective.nbytes))
        if reports is None or all(known for known, _ in reports):
            continue
        large, device = min(max(size for _, size in reports), _MOST), collective.device
        with watched(name)():
            times = (
                time_members(name, _LEAST, device),
                time_members(name, large, device),
                pace(device),
            )
        small, long, paced = map(median, zip(*(_gathered(name, times) or []), strict=True))
        LINKS[name] = Link(
            int(small * 1e9), (large - _LEAST) / max(1.0, (long - small) * 1e9), paced
        )


def starts_of(
    plans: Mapping[int, Plan], inputs: Mapping[int, LoweringInput]
) -> dict[str, list[Starts]]:
    """What the ranks of this process start, by communicator, in their order."""
    starts: dict[str, list[Starts]] = defaultdict(list)
    for rank, plan in sorted(plans.items()):
        row = inputs[rank].schedule[rank]
        place = {
            part: (position, line)
            for position, each in enumerate(row)
            for line, part in enumerate(each.parts)
        }
        losses = [kind.loss for kind in inputs[rank].kinds if kind.loss is not None]
        turn = {loss.f: 1 for loss in losses} | {loss.b: -1 for loss in losses}
        planned: dict[tuple[int, str], list[tuple[tuple[int, int], Sign]]] = defaultdict(list)
        for ins in plan.instructions:
            if ins.program is None or ins.action is None:
                continue
            position, line = place[ins.action]
            loss = turn.get(
                ins.program, 0
            )  # the loss's programs come after the last F and before the last B
            letter = f"{ins.action.op} of the loss" if loss else ins.action.op
            for c in collectives_of(ins.program):
                planned[position, c.members].append(
                    ((line, loss), (letter, c.number, c.op, c.signature))
                )
        for (position, members), signs in sorted(planned.items()):
            orders = (tuple(sign for _, sign in each) for each in (signs, sorted(signs)))
            starts[members].append(Starts(rank, position, str(row[position]), *orders))
    return starts


def conflicts(name: str, reports: Sequence[Sequence[Starts]]) -> dict[tuple[int, int], str]:
    """The woven actions that must not be woven, as (member, index into its report), and why; raises
    where the orders differ without a weave.
    """
    refused: dict[tuple[int, int], str] = {}
    while True:
        orders = [
            [
                (sign, k)
                for k, each in enumerate(report)
                for sign in (each.plain if (m, k) in refused else each.planned)
            ]
            for m, report in enumerate(reports)
        ]
        rows = zip_longest(*orders)
        row = next((row for row in rows if len({entry and entry[0] for entry in row}) > 1), None)
        if row is None:
            return refused
        starting = [(m, entry[1]) for m, entry in enumerate(row) if entry is not None]
        planned = [(m, k) for m, k in starting if (m, k) not in refused]
        woven = [(m, k) for m, k in planned if reports[m][k].planned != reports[m][k].plain]
        listed = "; ".join(
            f"member {m} {_described(entry, reports[m])}" for m, entry in enumerate(row)
        )
        reason = (
            f"the members of group {name} would start its collectives in different orders: {listed}"
        )
        if not woven:
            raise MismatchError(
                f"{reason}; let all of them run the same stages in the same order, or give each "
                "order a group of its "
                "own"
            )
        refused |= dict.fromkeys(woven, reason)


def _described(entry: tuple[Sign, int] | None, report: Sequence[Starts]) -> str:
    if entry is None:
        return "has no more"
    (letter, number, op, signature), k = entry
    return f"starts {op} {number} of {letter} ({signature}) in {report[k].action}"
