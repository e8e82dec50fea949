# SPDX-License-Identifier: Apache-2.0
"""A plan for other sizes: the instructions and slots of an earlier plan, with other programs and
message sizes.

The steps of a plan depend on the schedule, on the names of the programs' values and on who reads
them. Programs of one symbolic trace have the same names for all sizes. Knows plans; no schedules by
name and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from ..programs.program import Program
from ..programs.stage_programs import Programs
from ..tree import Spec
from .keys import Source
from .plan import LoweringInput, Plan, ProgramSet
from .slots import idle, specs_of
from .step import Step
from .value_graph import Leaf, ValueGraph

#: The kind of a microbatch, the stage, and the identity of a program.
_Place: TypeAlias = tuple[int, int, int]
#: By place, the program in its place, and what that belongs to.
_Places: TypeAlias = Mapping[_Place, tuple[Program, Programs]]


def resized(plan: Plan, before: LoweringInput, job: LoweringInput) -> Plan | None:
    """The plan for a job that differs in sizes alone from the one ``before``, of which ``plan`` is;
    else ``None``.
    """
    if plan.weaves or not _alike(before, job):
        return None
    places = dict(_places(before, job))
    specs = [_specs(kind.graph) for kind in job.kinds]
    posted: dict[tuple[int, int], Step] = {}
    steps = []
    for step in plan.steps:
        new = _step(step, job, places, specs)
        if new is None:
            return None
        if step.kind == "WAIT" and step.share is None:
            posted[step.peer, step.number] = new
        steps.append(new)
    steps = [_received(step, posted) for step in steps]
    instructions = (
        replace(old, program=step.program, owner=step.owner, specs=specs_of(step))
        for old, step in zip(
            plan.instructions, (step for step in steps if not idle(step)), strict=True
        )
    )
    return replace(plan, instructions=tuple(instructions), steps=tuple(steps))


def _step(
    step: Step, job: LoweringInput, places: _Places, specs: list[dict[Source, Spec]]
) -> Step | None:
    """A step with other programs and sizes; RECV follows its WAIT."""
    if step.program is not None:
        assert step.action is not None
        found = places.get((job.kind_of[step.action.microbatch], step.stage, id(step.program)))
        return None if found is None else step._replace(program=found[0], owner=found[1])
    if step.share is not None or step.kind not in ("SEND", "WAIT"):
        return step
    keys = step.reads or step.writes
    avals = [
        old if mb is None else specs[job.kind_of[mb]].get(source, old)
        for (source, mb), old in zip(keys, step.avals, strict=True)
    ]
    return step._replace(avals=tuple(avals))


def _received(step: Step, posted: Mapping[tuple[int, int], Step]) -> Step:
    return (
        step._replace(avals=posted[step.peer, step.number].avals) if step.kind == "RECV" else step
    )


def _specs(graph: ValueGraph) -> dict[Source, Spec]:
    """The specs of the values that cross stages."""
    return {out.source: out.spec for outs in graph.users.values() for out in outs}


def _places(
    before: LoweringInput, job: LoweringInput
) -> Iterator[tuple[_Place, tuple[Program, Programs]]]:
    """Each program of the earlier job with the one in its place."""
    for number, (old, new) in enumerate(zip(before.kinds, job.kinds, strict=True)):
        for stage, one, other in _pairs(old, new, job.stages):
            for letter in "fbiw":
                yield (number, stage, id(getattr(one, letter))), (getattr(other, letter), other)
            for letter in "BW":
                if (known := one.known_adding(letter)) is not None:
                    yield (number, stage, id(known)), (other.adding(letter), other)


def _pairs(
    old: ProgramSet, new: ProgramSet, stages: int
) -> Iterator[tuple[int, Programs, Programs]]:
    """The programs of each stage and of the loss, one past the last, in both jobs."""
    for stage, programs in old.programs.items():
        yield stage, programs, new.programs[stage]
    if old.loss is not None and new.loss is not None:
        yield stages, old.loss, new.loss


# ---- what must be equal ----
def _alike(before: LoweringInput, job: LoweringInput) -> bool:
    """Whether two jobs differ in sizes alone."""
    if len(before.kinds) != len(job.kinds) or replace(before, kinds=()) != replace(job, kinds=()):
        return False
    for old, new in zip(before.kinds, job.kinds, strict=True):
        if old.programs.keys() != new.programs.keys() or (old.loss is None) != (new.loss is None):
            return False
        if any(not _same_trace(one, other) for _, one, other in _pairs(old, new, job.stages)):
            return False
        if _structure(old.graph) != _structure(new.graph):
            return False
    return True


def _same_trace(one: Programs, other: Programs) -> bool:
    """Whether programs come from one trace."""
    if one is other:
        return True
    same = all(getattr(one, letter).traced is getattr(other, letter).traced for letter in "fbiw")
    return same and not one.eager and one.compiled == other.compiled


def _structure(graph: ValueGraph) -> tuple[object, ...]:
    """A value graph without sizes."""

    def leaf(one):
        return one[0] if isinstance(one, tuple) else one

    names: list[object] = [
        (
            tuple(map(leaf, i.ys)),
            tuple(map(leaf, i.dxs)),
            i.dys,
            i.takes_x,
            i.takes_dy,
            i.aux is None,
        )
        for i in graph.interfaces
    ]
    sink: tuple[Leaf, ...] = tuple(map(leaf, graph.sink_dxs))
    return (
        *names,
        sink,
        graph.sink_takes,
        tuple(each is None for each in graph.batch),
        graph.has_loss,
    )
