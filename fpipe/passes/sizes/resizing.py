# SPDX-License-Identifier: Apache-2.0
"""A plan for other sizes: the instructions and slots of an earlier plan, with other programs and
message sizes.

The steps of a plan depend on the schedule, on the names of the programs' values and on who reads
them. Programs of one symbolic trace have the same names for all sizes. Knows plans; no schedules by
name and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    specs = [_specs(kind.graph) for kind in job.kinds]
    sizes = _Sizes(job, _places(before, job), specs)
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
        kind = self.job.kind_of[action.microbatch]
        return self.places.get((kind, stage, id(program)))

    def specs(self, keys: Sequence[Key], specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """The specs of values; those that belong to no microbatch have one size."""
        after = []
        for (source, mb), spec in zip(keys, specs, strict=True):
            if mb is not None:
                spec = self.by_kind[self.job.kind_of[mb]].get(source, spec)
            after.append(spec)
        return tuple(after)


def _specs(graph: ValueGraph) -> dict[Source, Spec]:
    """The specs of the values that cross stages."""
    return {out.source: out.spec for outs in graph.leaving.values() for out in outs}


def _places(before: LoweringInput, job: LoweringInput) -> _Places:
    """Each program of the earlier job with the one in its place."""
    places: dict[_Place, tuple[Program, Programs]] = {}
    for kind, (old, new) in enumerate(zip(before.kinds, job.kinds, strict=True)):
        after = _programs(new, job)
        for stage, own in _programs(old, job).items():
            other = after[stage]
            for letter in "fbiw":
                place = (kind, stage, id(getattr(own, letter)))
                places[place] = getattr(other, letter), other
            for letter in "BW":
                adding = own.known_adding(letter)
                if adding is not None:
                    places[kind, stage, id(adding)] = other.adding(letter), other
    return places


def _programs(kind: ProgramSet, job: LoweringInput) -> dict[int, Programs]:
    """The programs by stage; those of the loss are one past the last."""
    loss = {} if kind.loss is None else {job.stages: kind.loss}
    return {**kind.programs, **loss}


# ---- what must be equal ----
def _alike(before: LoweringInput, job: LoweringInput) -> bool:
    """Whether two jobs differ in sizes alone."""
    if len(before.kinds) != len(job.kinds):
        return False
    if replace(before, kinds=()) != replace(job, kinds=()):
        return False
    for old, new in zip(before.kinds, job.kinds, strict=True):
        owns = _programs(old, job)
        others = _programs(new, job)
        if owns.keys() != others.keys():
            return False
        if _structure(old.graph) != _structure(new.graph):
            return False
        if not all(_same_trace(own, others[stage]) for stage, own in owns.items()):
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
        reads = each.dys, each.reads_x, each.reads_dy
        stages.append((names(each.ys), names(each.dxs), *reads, each.aux is None))
    batch = [aval is None for aval in graph.batch]
    return stages, names(graph.sink_dxs), graph.sink_reads, batch, graph.has_loss
