# SPDX-License-Identifier: Apache-2.0
"""Fused actions: their parts become lines of segments, and a weave determines in which order these run.

A plain action that starts collectives is a weave of one line: segments that do not depend on a collective run while it
is under way. Values that cross between segments are in slots like all others, so they are freed and counted alike.
Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import WeaveError
from ...programs.graphs import Held
from ...programs.program import Program
from ...programs.stage_programs import Programs
from ...schedules.actions import Action, AnyAction
from ..builder import Builder, Piece
from ..keys import CALLERS, Key, inputs
from ..plan import Step
from .estimates import LINKS
from .search import weave
from .segments import Segment, collectives_of, segments_of, whole
from .weave import Task, Transfer, Weave, by_hand


@dataclass(eq=False)
class Part:
    """One side of a fused action, for a function of the user's own.

    Call it to run it, or run ``program`` (or, one by one, ``segments``) on ``inputs`` by other means.
    """

    action: Action
    program: Program
    inputs: list[Any]
    segments: tuple[Segment, ...]

    def __call__(self) -> tuple[Any, ...]:
        """Run the program; this empties ``inputs``."""
        return self.program(self.inputs)


def starts_collectives(builder: Builder, action: AnyAction) -> bool:
    """Whether any of an action's programs starts a collective."""
    known, programs = builder.has_collectives, [run for part in action.parts for run in builder.programs(part)]
    for own, program, _ in programs:
        if id(program) not in known:
            known[id(program)] = not own.compiled and bool(collectives_of(program))
    return any(known[id(program)] for _, program, _ in programs)


def woven_pieces(builder: Builder, action: AnyAction, position: int) -> list[Piece] | None:
    """The pieces of an action in the order of its weave; None: it is not woven.

    With a function of the user's, the list is empty: the function runs the action.
    """
    overlap, carries = builder.job.overlap, starts_collectives(builder, action)
    reason = _reason(builder, action, position, carries)
    if reason:
        if len(action.parts) > 1:
            builder.weaves[str(action)] = _in_turn(builder, reason)
        return None
    if overlap.how == "function":
        return []
    lines = tuple(map(str, action.parts))
    segments = list(_segments(builder, action, not carries and overlap.how == "weave"))
    weave = _weave(builder, lines, segments)
    if len(lines) == 1 and weave.total >= weave.one_after_another:
        return None  # there is nothing that it could do meanwhile
    builder.weaves[str(action)] = weave
    return [segments[number][0] for number in weave.order]


def _segments(builder: Builder, action: AnyAction, coarse: bool) -> Iterator[tuple[Piece, Segment]]:
    """The segments of an action's parts, each part in its own order."""
    for line, part in enumerate(action.parts):
        for own, program, stage in builder.programs(part):
            if not (program.nodes or program.outputs or own.eager):
                continue
            for segment in segments_of(own, program, coarse) if stage == part.stage else (whole(program),):
                yield (line, part, own, stage, segment.program), segment


def _reason(builder: Builder, action: AnyAction, position: int, carries: bool) -> str:
    """Why a fused action is not woven; "" where it is."""
    job, how = builder.job, builder.job.overlap.how
    refused = job.overlap.refused.get((builder.rank, position))
    if refused:
        return refused
    if job.strict:
        return "this backend takes messages in one order only"
    for ops in ("F", "BW"):
        stages = [part.stage for part in action.parts if part.op in ops]
        if len(set(stages)) < len(stages):
            return f"two parts run {ops[0]} of stage {stages[0]}, whose order is part of the result"
    if how == "weave" and any(own.compiled for part in action.parts for own, _, _ in builder.programs(part)):
        return "compiled programs run whole"
    if how == "function":
        return "" if len(action.parts) == 2 else f"a function takes two parts, here are {len(action.parts)}"
    if how == "weave" and not job.wired and not carries:
        return "nothing is sent while it runs"
    return ""


def _in_turn(builder: Builder, reason: str) -> Weave:
    """One weave for all actions that are not woven for one reason."""
    if reason not in builder.known_weaves:
        builder.known_weaves[reason] = Weave(("F", "B"), (), (), (), (), reason=reason)
    return builder.known_weaves[reason]


def _weave(builder: Builder, lines: tuple[str, ...], segments: Sequence[tuple[Piece, Segment]]) -> Weave:
    """The weave of some segments; one for all actions that have the same."""
    key = tuple((line, stage, id(program)) for (line, _, _, stage, program), _ in segments)
    if key not in builder.known_weaves:
        tasks, sizes = _tasks(builder, segments)
        overlap = builder.job.overlap
        builder.known_weaves[key] = (
            by_hand(lines, tasks, overlap.entries, sizes) if overlap.how == "data" else weave(lines, tasks, sizes=sizes)
        )
    return builder.known_weaves[key]


def _tasks(
    builder: Builder, segments: Sequence[tuple[Piece, Segment]]
) -> tuple[list[Task], dict[Hashable, tuple[Hashable, int]]]:
    """The segments as the search sees them, and the storage and bytes of the values that cross between them."""
    tasks: list[Task] = []
    sizes: dict[Hashable, tuple[Hashable, int]] = {}
    links = [LINKS[c.members] for _, segment in segments for c in segment.starts if c.members in LINKS]
    pace = max((link.pace for link in links), default=1.0)
    for piece, segment in segments:
        line, action, own, stage, program = piece
        known = inputs(own)

        def key(name: str, piece: Piece = piece) -> Hashable:
            line, action, own, stage, _ = piece
            source, mb = builder.key(own, stage, action.microbatch, name)
            return (line, source) if mb == action.microbatch else (source, mb)

        for name in (*program.inputs, *program.outputs):
            held = own.memory.get(name)
            if held is not None and not (held.given and known.get(held.root, ("", 0))[0] in CALLERS):
                # a received value is known by the name that it has where it is computed
                sizes[key(name)] = (key(held.root) if held.given else (line, stage, held.root), held.nbytes)
        tasks.append(Task(
            line, "loss" if stage != action.stage else segment.name, int(pace * segment.nanoseconds),
            tuple(map(key, program.inputs)), tuple(map(key, program.outputs)),
            tuple(Transfer(key(c.value), c.op, c.members, c.nanoseconds) for c in segment.starts),
            tuple(map(key, segment.waits)), segment.loose,
        ))  # fmt: skip
    return tasks, sizes


# ---- a function of the user's ---------------------------------------------------------------------------------------
def act_jointly(builder: Builder, action: AnyAction) -> None:
    """One step for the programs of both stages; the loss's programs run before and after it."""
    mains: list[tuple[Action, Programs, Program]] = []
    after: list[tuple[Action, Programs, Program, int]] = []
    for part in action.parts:
        for own, program, stage in builder.programs(part):
            if stage == part.stage:
                mains.append((part, own, program))
            elif part.op == "F":
                after.append((part, own, program, stage))
            else:
                builder.run(part, own, program, stage)
    function = builder.job.overlap.function
    assert function is not None
    reads: list[Key] = []
    writes: list[Key] = []
    for part, own, program in mains:
        reads += builder.have(part, own, program, part.stage)
        writes += builder.writes(program, part.stage, part.microbatch)
    owner = replace(mains[0][1], memory=dict(_memory(mains)))
    builder.here.update(writes)
    builder.out.append(
        Step("F", action.parts[0], tuple(reads), tuple(writes), _joined(mains, function), owner)
    )  # fmt: skip
    for part, own, program, stage in after:
        builder.run(part, own, program, stage)
    builder.emit(action.parts, ())


def _joined(mains: Sequence[tuple[Action, Programs, Program]], own: Callable[..., Any]) -> Program:
    programs = [program for _, _, program in mains]
    cuts = [len(program.inputs) for program in programs]

    def run(box: list[Any]) -> tuple[Any, ...]:
        parts = []
        for (action, programs_, program), cut in zip(mains, cuts, strict=True):
            inputs, box[:cut] = box[:cut], []
            parts.append(Part(action, program, inputs, segments_of(programs_, program)))
        outs = own(*parts)
        got = [len(out) if isinstance(out, (tuple, list)) else None for out in outs] if isinstance(outs, tuple) else []
        if got != [len(program.outputs) for program in programs]:
            raise WeaveError(
                f"the overlap function returned {got or type(outs).__name__}; return a tuple of both parts' results, "
                f"of {' and '.join(str(len(program.outputs)) for program in programs)} values, as calling a part does"
            )
        return tuple(value for out in outs for value in out)

    names = [(f"{k}.{name}" for name in program.inputs) for k, program in enumerate(programs)]
    outputs = [f"{k}.{name}" for k, program in enumerate(programs) for name in program.outputs]
    read = tuple(n for each in names for n in each)
    return Program("F", "", run, read, tuple(outputs), random=programs[0].random, label=f"with {mains[1][0]}")


def _memory(mains: Sequence[tuple[Action, Programs, Program]]) -> Iterator[tuple[str, Held]]:
    for k, (_, own, _) in enumerate(mains):
        for name, held in own.memory.items():
            yield f"{k}.{name}", Held(f"{k}.{held.root}", held.nbytes, held.given)
