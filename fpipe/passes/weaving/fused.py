# SPDX-License-Identifier: Apache-2.0
"""Fused actions: their parts become lines of segments, and a weave determines in which order these
run.

A plain action that starts collectives is a weave of one line: segments that do not depend on a
collective run while it is under way. Values that cross between segments are in slots like all
others, so they are freed and counted alike. Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...actions.action import Action, AnyAction, Fused
from ...errors import WeaveError
from ...lowering.builder import Builder, Piece
from ...lowering.instruction import Instruction
from ...lowering.instructions import Run
from ...lowering.plan import Feature, Plan
from ...programs.operations import CALLERS
from ...programs.program import Held, Program, Programs
from .search import weave
from .segments import Segment, collectives_of, segments_of, whole
from .weave import Overlap, Task, Transfer, Weave


@dataclass(frozen=True, eq=False)
class Part:
    """One side of a fused action, for the user's function, which calls it to run it."""

    action: Action
    program: Program
    inputs: list[Any]

    def __call__(self) -> Sequence[object]:
        """Run the program; this empties ``inputs``."""
        return self.program(self.inputs)


@dataclass(frozen=True)
class Weaving(Feature):
    """Runs fused actions, and actions that start collectives, by a weave or the user's function."""

    overlap: Overlap
    interleaves = True

    def start(self, builder: Builder) -> Feature:
        return _OnRank(self.overlap, builder)


class _OnRank(Feature):
    def __init__(self, overlap: Overlap, builder: Builder):
        self.overlap, self.builder = overlap, builder
        self.weaves: dict[str, Weave] = {}  # by action
        self.known: dict[Hashable, Weave] = {}

    def act(self, action: AnyAction, position: int) -> bool:
        how, alone = self.overlap.how, not isinstance(action, Fused)
        if alone and (how != "weave" or self.builder.job.phased):
            return False
        if alone and not starts_collectives(self, action):
            return False
        pieces = woven_pieces(self, action)
        if pieces is None:
            return False
        if how == "function":
            act_jointly(self, action)
        else:
            self.builder.emit(action.parts, pieces)
        return True

    def complete(self, plan: Plan) -> Plan:
        return replace(plan, weaves=self.weaves)


def starts_collectives(on: _OnRank, action: AnyAction) -> bool:
    """Whether any of an action's programs starts a collective."""
    return any(
        not programs.compiled and bool(collectives_of(program))
        for part in action.parts
        for programs, program, _ in on.builder.programs(part)
    )


def woven_pieces(on: _OnRank, action: AnyAction) -> list[Piece] | None:
    """The pieces of an action in the order of its weave; None: it is not woven.

    With a function of the user's, the list is empty: the function runs the action.
    """
    overlap, carries = on.overlap, starts_collectives(on, action)
    reason = _reason(on, action, carries)
    if reason:
        if len(action.parts) > 1:
            in_turn = Weave(("F", "B"), (), (), (), (), reason=reason)
            on.weaves[str(action)] = on.known.setdefault(reason, in_turn)
        return None
    if overlap.how == "function":
        return []
    lines = tuple(map(str, action.parts))
    segments = list(_segments(on, action, coarse=not carries))
    weave = _weave(on, lines, segments)
    if len(lines) == 1 and weave.total >= weave.one_after_another:
        return None  # no transfer overlaps with compute
    on.weaves[str(action)] = weave
    return [segments[number][0] for number in weave.order]


def _segments(on: _OnRank, action: AnyAction, coarse: bool) -> Iterator[tuple[Piece, Segment]]:
    """The segments of an action's parts, each part in its program order."""
    for line, part in enumerate(action.parts):
        for programs, program, stage in on.builder.programs(part):
            if program.traced or program.outputs or programs.eager:
                cut = (
                    segments_of(programs, program, coarse)
                    if stage == part.stage
                    else (whole(program),)
                )
                for segment in cut:
                    yield (line, part, programs, stage, segment.program), segment


def _reason(on: _OnRank, action: AnyAction, carries: bool) -> str:
    """Why a fused action is not woven; "" where it is."""
    job, how = on.builder.job, on.overlap.how
    if on.overlap.refused:
        return on.overlap.refused
    if job.strict:
        return "this backend takes messages in one order only"
    for ops in ("F", "BW"):
        stages = [part.stage for part in action.parts if part.op in ops]
        if len(set(stages)) < len(stages):
            return f"two parts run {ops[0]} of stage {stages[0]}, whose order is part of the result"
    if how == "function" and len(action.parts) != 2:
        return f"a function takes two parts, here are {len(action.parts)}"
    if how == "weave" and any(
        run.compiled for part in action.parts for run, _, _ in on.builder.programs(part)
    ):
        return "compiled programs run whole"
    if how == "weave" and not job.wired and not carries:
        return "nothing is sent while it runs"
    return ""


def _weave(on: _OnRank, lines: tuple[str, ...], segments: Sequence[tuple[Piece, Segment]]) -> Weave:
    """The weave of some segments; one for all actions that have the same."""
    key = tuple((line, stage, id(program)) for (line, _, _, stage, program), _ in segments)
    if key not in on.known:
        tasks, sizes = _tasks(on, segments)
        on.known[key] = weave(lines, tasks, sizes=sizes)
    return on.known[key]


def _tasks(
    on: _OnRank, segments: Sequence[tuple[Piece, Segment]]
) -> tuple[list[Task], dict[Hashable, tuple[Hashable, int]]]:
    """The segments as tasks of the search, and the storage and bytes of the values that cross
    between them.
    """
    tasks: list[Task] = []
    sizes: dict[Hashable, tuple[Hashable, int]] = {}
    for piece, segment in segments:
        line, action, programs, stage, program = piece
        roles, key = programs.roles, partial(_key, on, piece)
        for name in (*program.inputs, *program.outputs):
            held = programs.memory.get(name)
            if held is not None and not (
                held.given and roles.get(held.root, ("", 0))[0] in CALLERS
            ):
                # a received value has the name that it has where it is computed
                sizes[key(name)] = (
                    key(held.root) if held.given else (line, stage, held.root),
                    held.nbytes,
                )
        tasks.append(
            Task(
                line,
                "loss" if stage != action.stage else segment.name,
                segment.nanoseconds,
                tuple(map(key, program.inputs)),
                tuple(map(key, program.outputs)),
                tuple(
                    Transfer(key(c.value), c.op, c.members, c.nanoseconds) for c in segment.starts
                ),
                tuple(map(key, segment.waits)),
                segment.loose,
            )
        )
    return tasks, sizes


def _key(on: _OnRank, piece: Piece, name: str) -> Hashable:
    """The key of a value without its microbatch, which is that of the line: alike for all actions
    of one weave.
    """
    line, action, programs, stage, _ = piece
    source, mb = on.builder.key(programs, stage, action.microbatch, name)
    return (line, source) if mb == action.microbatch else (source, mb)


# ---- a function of the user's ----
def act_jointly(on: _OnRank, action: AnyAction) -> None:
    """One step for the programs of both stages; the loss's programs run before and after it."""
    builder, function = on.builder, on.overlap.function
    assert function is not None
    runs = [(part, *run) for part in action.parts for run in builder.programs(part)]
    mains = [run for run in runs if run[3] == run[0].stage]
    losses = [run for run in runs if run[3] != run[0].stage]
    for run in losses:
        if run[0].op != "F":
            builder.run(*run)
    reads = [key for run in mains for key in builder.reads(*run)]
    writes = [
        key
        for part, _, program, stage in mains
        for key in builder.writes(program, stage, part.microbatch)
    ]
    builder.here.update(writes)
    first, owner, _, _ = mains[0]
    joined = _joined([(part, program) for part, _, program, _ in mains], function)
    step = Run(joined, first.stage, replace(owner, memory=_memory([run[1] for run in mains])))
    builder.out.append(Instruction(step, first, tuple(reads), tuple(writes)))
    for run in losses:
        if run[0].op == "F":
            builder.run(*run)
    builder.emit(action.parts, ())


def _joined(mains: Sequence[tuple[Action, Program]], function: Callable[..., Any]) -> Program:
    """The programs of both stages as one program, which calls the user's function."""
    programs = [program for _, program in mains]

    def run(box: list[Any]) -> tuple[object, ...]:
        parts = []
        for action, program in mains:
            count = len(program.inputs)
            parts.append(Part(action, program, box[:count]))
            del box[:count]
        outs = function(*parts)
        _check_results(outs, [len(program.outputs) for program in programs])
        return tuple(value for out in outs for value in out)

    return Program(
        "F",
        "",
        run,
        tuple(f"{k}.{name}" for k, program in enumerate(programs) for name in program.inputs),
        tuple(f"{k}.{name}" for k, program in enumerate(programs) for name in program.outputs),
        random=any(program.random for program in programs),
        label=f"with {mains[1][0]}",
    )


def _check_results(outs: object, wanted: Sequence[int]) -> None:
    """Raise WeaveError where a function did not return what both of its parts returned."""
    got = []
    if isinstance(outs, tuple):
        got = [len(out) if isinstance(out, (tuple, list)) else None for out in outs]
    if got != wanted:
        raise WeaveError(
            f"the overlap function returned {got or type(outs).__name__}; return a tuple of both "
            f"parts' results, of {' and '.join(map(str, wanted))} values, as calling a part does"
        )


def _memory(owners: Sequence[Programs]) -> dict[str, Held]:
    """The memory behind the values of both programs."""
    return {
        f"{k}.{name}": held._replace(root=f"{k}.{held.root}")
        for k, programs in enumerate(owners)
        for name, held in programs.memory.items()
    }
