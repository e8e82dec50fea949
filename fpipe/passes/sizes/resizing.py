# SPDX-License-Identifier: Apache-2.0
"""A plan for other sizes: the instructions and slots of an earlier plan, with other programs and
message sizes.

The steps of a plan depend on the schedule, on the names of the programs' values and on who reads
them. Programs of one symbolic trace have the same names for all sizes. Knows plans; no schedules by
name and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...actions.action import Action
from ...lowering.instruction import Instruction
from ...lowering.job import LoweringInput, ProgramSet
from ...lowering.keys import Key, Source
from ...lowering.plan import Plan
from ...lowering.value_graph import Leaf, ValueGraph
from ...programs.program import Program, Programs
from ...tree import Spec

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
    sizes = _Sizes(job, dict(_places(before, job)), [_specs(kind.graph) for kind in job.kinds])
    ops = [ins.op.resized(ins, sizes) for ins in plan.keyed]
    if None in ops:
        return None

    def with_ops(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
        both = zip(instructions, ops, strict=True)
        return tuple([ins._replace(op=op) for ins, op in both if op is not None])

    return replace(plan, instructions=with_ops(plan.instructions), keyed=with_ops(plan.keyed))


@dataclass(frozen=True)
class _Sizes:
    """The programs and specs of a job in the place of those of an earlier one."""

    job: LoweringInput
    places: _Places
    by_kind: list[dict[Source, Spec]]

    def program(
        self, action: Action | None, stage: int, program: Program
    ) -> tuple[Program, Programs] | None:
        """The program in the place of another, and what it belongs to."""
        assert action is not None
        return self.places.get((self.job.kind_of[action.microbatch], stage, id(program)))

    def specs(self, keys: Sequence[Key], specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """The specs of values; those that belong to no microbatch have one size."""
        both = zip(keys, specs, strict=True)
        return tuple(
            old if mb is None else self.by_kind[self.job.kind_of[mb]].get(source, old)
            for (source, mb), old in both
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


def _structure(graph: ValueGraph) -> object:
    """A value graph without sizes."""

    def names(leaves: Sequence[Leaf]) -> list[object]:
        return [leaf[0] if isinstance(leaf, tuple) else leaf for leaf in leaves]

    stages = []
    for each in graph.interfaces:
        reads = each.dys, each.takes_x, each.takes_dy
        stages.append((names(each.ys), names(each.dxs), *reads, each.aux is None))
    batch = [aval is None for aval in graph.batch]
    return stages, names(graph.sink_dxs), graph.sink_takes, batch, graph.has_loss
