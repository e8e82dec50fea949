# SPDX-License-Identifier: Apache-2.0
"""Fused actions: their parts become lines of segments, and a weave determines in which order these
run.

A plain action that starts collectives is a weave of one line: segments that do not depend on a
collective run while it is under way. Values that cross between segments are in slots like all
others, so they are freed and counted alike. Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...actions.action import AnyAction
from ...lowering.builder import Builder, Piece
from ...lowering.job import LoweringInput
from ...lowering.plan import Feature, Plan
from ...programs.operations import CALLERS
from .search import weave
from .segments import Segment, collectives_of, segments_of, whole
from .weave import Task, Transfer, Weave


@dataclass(frozen=True)
class Weaving(Feature):
    """Runs fused actions, and actions that start collectives, by a weave.

    ``refused`` is the reason why nothing must be woven.
    """

    refused: str = ""
    interleaves = True

    def start(self, builder: Builder) -> Feature:
        return _OnRank(self.refused, builder)


class _OnRank(Feature):
    def __init__(self, refused: str, builder: Builder):
        self.refused = refused
        self.builder = builder
        self.weaves: dict[str, Weave] = {}  # by action
        self.planned: dict[Hashable, Weave] = {}  # by what is woven, or why nothing is

    def act(self, action: AnyAction, position: int) -> bool:
        job = self.builder.job
        fused = len(action.parts) > 1
        runs = [
            (line, part, *run)
            for line, part in enumerate(action.parts)
            for run in self.builder.programs(part)
        ]
        exchanges = any(not own.compiled and collectives_of(run) for _, _, own, _, run in runs)
        if not fused and (job.phased or not exchanges):
            return False
        reason = self.refused or _obstacle(job, action, runs, exchanges)
        if reason:
            if fused:
                in_turn = self.planned.setdefault(reason, Weave(reason=reason))
                self.weaves[str(action)] = in_turn
            return False
        cut = list(_cut(runs, coarse=not exchanges))
        lines = tuple(map(str, action.parts))
        made = self._woven(lines, cut)
        if not fused and made.total >= made.one_after_another:
            return False  # no transfer overlaps with compute
        self.weaves[str(action)] = made
        pieces = [cut[number][0] for number in made.order]
        self.builder.emit(action.parts, pieces)
        return True

    def complete(self, plan: Plan) -> Plan:
        return replace(plan, weaves=self.weaves)

    def _woven(self, lines: tuple[str, ...], pieces: Sequence[tuple[Piece, Segment]]) -> Weave:
        """The weave of some segments; one for all actions that have the same."""
        same = tuple((line, stage, id(program)) for (line, _, _, stage, program), _ in pieces)
        if same not in self.planned:
            tasks = [_task(self.builder, *piece) for piece in pieces]
            sizes: dict[Hashable, tuple[Hashable, int]] = {}
            for piece, _ in pieces:
                sizes |= _sizes(self.builder, piece)
            self.planned[same] = weave(lines, tasks, sizes=sizes)
        return self.planned[same]


def _obstacle(job: LoweringInput, action: AnyAction, runs: Sequence[Piece], exchanges: bool) -> str:
    """Why the programs of an action are not woven; "" where they are."""
    if job.strict:
        return "this backend takes messages in one order only"
    for ops in ("F", "BW"):
        stages = [part.stage for part in action.parts if part.op in ops]
        if len(set(stages)) < len(stages):
            return f"two parts run {ops[0]} of stage {stages[0]}, whose order is part of the result"
    if any(own.compiled for _, _, own, _, _ in runs):
        return "compiled programs run whole"
    if job.wired or exchanges:
        return ""
    return "nothing is sent while it runs"


def _cut(runs: Sequence[Piece], coarse: bool) -> Iterator[tuple[Piece, Segment]]:
    """The segments of an action's programs, each program in its order; that of a loss is whole."""
    for line, part, own, stage, program in runs:
        if not (program.traced or program.outputs or own.eager):
            continue
        of_loss = stage != part.stage
        if of_loss:
            segments = [whole(program)]
        else:
            segments = segments_of(own, program, coarse)
        for segment in segments:
            yield (line, part, own, stage, segment.program), segment


def _task(builder: Builder, piece: Piece, segment: Segment) -> Task:
    """A segment as a task of the search."""
    line, action, _, stage, program = piece
    key = partial(_key, builder, piece)
    starts = [Transfer(key(c.value), c.op, c.members, c.nanoseconds) for c in segment.starts]
    return Task(
        line,
        segment.name if stage == action.stage else "loss",
        segment.nanoseconds,
        tuple(map(key, program.inputs)),
        tuple(map(key, program.outputs)),
        tuple(starts),
        tuple(map(key, segment.waits)),
        segment.loose,
    )


def _sizes(builder: Builder, piece: Piece) -> dict[Hashable, tuple[Hashable, int]]:
    """The storage and bytes of the values that a piece reads and writes, but for the caller's."""
    line, _, own, stage, program = piece
    key = partial(_key, builder, piece)
    sizes: dict[Hashable, tuple[Hashable, int]] = {}
    for name in (*program.inputs, *program.outputs):
        held = own.memory.get(name)
        if held is None or (held.given and own.roles.get(held.root, ("", 0))[0] in CALLERS):
            continue
        # a received value has the name that it has where it is computed
        if held.given:
            storage = key(held.root)
        else:
            storage = (line, stage, held.root)
        sizes[key(name)] = storage, held.nbytes
    return sizes


def _key(builder: Builder, piece: Piece, name: str) -> Hashable:
    """The key of a value without its microbatch, which is that of the line: alike for all actions
    of one weave.
    """
    line, action, own, stage, _ = piece
    source, mb = builder.key(own, stage, action.microbatch, name)
    if mb == action.microbatch:
        return (line, source)
    return (source, mb)
