# SPDX-License-Identifier: Apache-2.0
"""Fused actions: their parts become lines of segments, and a weave determines in which order these
run.

A plain action that starts collectives is a weave of one line: segments that do not depend on a
collective run while it is under way. Values that cross between segments are in slots like all
others, so they are freed and counted alike. Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...actions.action import AnyAction
from ...lowering.builder import Builder, Piece
from ...lowering.job import Job
from ...lowering.keys import Key
from ...lowering.plan import Feature, Plan
from .search import weave
from .segments import Segment, busy, collectives_of, segments_of
from .weave import Task, Transfer, Weave


@dataclass(frozen=True)
class Weaving(Feature):
    """Runs fused actions, and actions that start collectives, by a weave.

    ``refused`` is the reason why nothing must be woven.
    """

    refused: str = ""
    interleaves = True

    @cached_property
    def weaves(self) -> dict[str, Weave]:
        """Those of the rank so far, by action."""
        return {}

    @cached_property
    def planned(self) -> dict[Hashable, Weave]:
        """The same by what is woven, or why nothing is."""
        return {}

    def act(self, action: AnyAction, position: int) -> bool:
        builder: Builder = self.builder
        job = builder.job
        fused = len(action.parts) > 1
        runs = [
            (line, part, *run)
            for line, part in enumerate(action.parts)
            for run in builder.programs(part)
        ]
        exchanges = any(not own.compiler and collectives_of(run) for _, _, own, _, run in runs)
        if not fused and (job.phased or not exchanges):
            return False
        reason = self.refused or _obstacle(job, action, runs, exchanges)
        if reason:
            if fused:
                in_turn = self.planned.setdefault(reason, Weave(reason=reason))
                self.weaves[str(action)] = in_turn
            return False
        cut = [
            ((line, part, own, stage, segment.program), segment)
            for line, part, own, stage, run in runs
            for segment in (segments_of(own, run) if stage == part.stage else [Segment(run)])
        ]
        made = self._woven(action, cut)
        if not fused and made.total >= made.one_after_another:
            return False  # no transfer overlaps with compute
        self.weaves[str(action)] = made
        builder.emit(action.parts, [cut[number][0] for number in made.order])
        return True

    def complete(self, plan: Plan) -> Plan:
        return replace(plan, weaves=self.weaves)

    def _woven(self, action: AnyAction, pieces: Sequence[tuple[Piece, Segment]]) -> Weave:
        """The weave of some segments; one for all actions that have the same."""
        same = tuple((line, stage, id(program)) for (line, _, _, stage, program), _ in pieces)
        if same not in self.planned:
            tasks = [_task(self.builder, *piece) for piece in pieces]
            self.planned[same] = weave(list(map(str, action.parts)), tasks)
        return self.planned[same]


def _obstacle(job: Job, action: AnyAction, runs: Sequence[Piece], exchanges: bool) -> str:
    """Why the programs of an action are not woven; "" where they are."""
    if job.strict:
        return "this backend takes messages in one order only"
    for ops in ("F", "BW"):
        stages = [part.stage for part in action.parts if part.op in ops]
        if len(set(stages)) < len(stages):
            return f"two parts run {ops[0]} of stage {stages[0]}, whose order is part of the result"
    if any(own.compiler for _, _, own, _, _ in runs):
        return "compiled programs run whole"
    if job.wired or exchanges:
        return ""
    return "nothing is sent while it runs"


def _task(builder: Builder, piece: Piece, segment: Segment) -> Task:
    """A segment as a task of the search."""
    line, action, own, stage, program = piece

    def keys(names: Iterable[str]) -> tuple[Key, ...]:
        return tuple(builder.key(own, stage, action.microbatch, name) for name in names)

    collectives = collectives_of(program)
    values = keys(c.value for c in collectives)
    starts = [
        Transfer(value, c.op, c.members, c.nanoseconds)
        for value, c in zip(values, collectives, strict=True)
    ]
    return Task(
        line,
        program.label or program.name if stage == action.stage else "loss",
        busy(program),
        keys(program.inputs),
        keys(program.outputs),
        tuple(starts),
        keys(segment.waits),
        segment.loose,
    )
