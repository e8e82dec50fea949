# SPDX-License-Identifier: Apache-2.0
"""Lowering of fused actions: their parts become lines of segments, and a weave says in which order these run.

A plain action that starts collectives is a weave of one line: what nobody waits for runs while it waits.

What crosses from segment to segment stands in slots like anything else, so that frees and bytes are counted as
everywhere. Receives are waited for before the first segment that reads them, sends go out after the last one that makes
their values, in the order that the other side expects. Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import WeaveError
from ...programs.graphs import Held
from ...programs.program import Program
from ...programs.stage_programs import Programs
from ...schedules.actions import Action, AnyAction
from ..keys import CALLERS, BatchLeaf, Key, inputs
from ..plan import Step
from .estimates import LINKS
from .search import weave
from .segments import Segment, collectives_of, segments_of, whole
from .weave import Overlap, Task, Transfer, Weave, by_hand, in_turn

if TYPE_CHECKING:
    from ..lowering import Lowering


class Piece(NamedTuple):
    """A segment on its way into a plan."""

    line: int
    action: Action
    own: Programs
    stage: int
    segment: Segment


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


class Fusing:
    """Emits the steps of fused actions for one rank."""

    def __init__(self, low: Lowering, overlap: Overlap):
        self.low, self.overlap = low, overlap
        self.weaves: dict[str, Weave] = {}
        self._known: dict[Any, Weave] = {}
        self._starts: dict[int, bool] = {}

    def waits(self, action: Action) -> bool:
        """Whether a plain action starts collectives, beside which its own work can run."""
        return self.overlap.how == "weave" and not self.low.job.phased and self._carries(action)

    def _carries(self, action: AnyAction) -> bool:
        """Whether any of an action's programs starts a collective."""
        found = False
        for part in action.parts:
            for own, program, _ in self.programs(part):
                if id(program) not in self._starts:
                    self._starts[id(program)] = not own.compiled and bool(collectives_of(program))
                found |= self._starts[id(program)]
        return found

    def act(self, action: AnyAction, position: int) -> bool:
        """Emit an action's steps, woven; False: run its parts one after the other."""
        if self.overlap.how == "sequential":
            return False
        carries = self._carries(action)
        reason = self._reason(action, position, carries)
        if reason:
            if len(action.parts) > 1:
                self.weaves[str(action)] = self._remember(reason)
            return False
        if self.overlap.how == "function":
            self._joint(action)
            return True
        lines = tuple(map(str, action.parts))
        pieces = list(self._pieces(action, not carries and self.overlap.how == "weave"))
        made = self._woven(lines, pieces)
        if len(lines) == 1 and made.total >= made.one_after_another:
            return False  # there is nothing that it could do meanwhile
        self.weaves[str(action)] = made
        ends = _Ends(self.low, action, pieces)
        for number in made.order:
            piece = pieces[number]
            self.low.run(piece.action, piece.own, piece.segment.program, piece.stage)
            ends.after(number)
        ends.close()
        return True

    # ---- lines --------------------------------------------------------------------------------------------------
    def _pieces(self, action: AnyAction, coarse: bool) -> Iterator[Piece]:
        for line, part in enumerate(action.parts):
            for own, program, stage in self.programs(part):
                if not (program.nodes or program.outputs or own.eager):
                    continue
                main = stage == part.stage
                for segment in segments_of(own, program, coarse) if main else (whole(program),):
                    yield Piece(line, part, own, stage, segment)

    def programs(self, part: Action) -> Iterator[tuple[Programs, Program, int]]:
        """What a part runs, in order: the loss's program stands at the end of the last stage, or before it."""
        stage, op, mb = part
        kinds = self.low.kind(mb)
        own, top = kinds.programs[stage], stage == self.low.job.stages - 1 and kinds.loss is not None
        if op == "F":
            yield own, own.f, stage
            if top and kinds.loss is not None:
                yield kinds.loss, kinds.loss.f, stage + 1
            return
        if op != "W":
            if top and kinds.loss is not None:
                yield kinds.loss, kinds.loss.b, stage + 1
            yield own, own.i if op == "I" else self.low.with_adds(own, "B", stage), stage
        else:
            yield own, self.low.with_adds(own, "W", stage), stage

    def _reason(self, action: AnyAction, position: int, carries: bool) -> str:
        """Why a fused action is not woven; "" where it is."""
        low, refused = self.low, self.overlap.refused.get((self.low.rank, position))
        if refused:
            return refused
        if low.job.strict:
            return "this backend takes messages in one order only"
        for ops in ("F", "BW"):
            stages = [part.stage for part in action.parts if part.op in ops]
            if len(set(stages)) < len(stages):
                return f"two parts run {ops[0]} of stage {stages[0]}, whose order is part of the result"
        if self.overlap.how == "weave" and any(own.compiled for p in action.parts for own, _, _ in self.programs(p)):
            return "compiled programs run whole"
        if self.overlap.how == "function":
            return "" if len(action.parts) == 2 else f"a function takes two parts, here are {len(action.parts)}"
        if self.overlap.how == "weave" and not low.job.wired and not carries:
            return "nothing is sent while it runs"
        return ""

    def _remember(self, reason: str) -> Weave:
        found = self._known.get(reason)
        if found is None:
            found = self._known[reason] = in_turn(("F", "B"), (), reason)
        return found

    def _woven(self, lines: tuple[str, ...], pieces: Sequence[Piece]) -> Weave:
        key = tuple((piece.line, piece.stage, id(piece.segment.program)) for piece in pieces)
        found = self._known.get(key)
        if found is None:
            tasks, sizes = self._tasks(pieces)
            if self.overlap.how == "data":
                found = by_hand(lines, tasks, self.overlap.entries, sizes)
            else:
                found = weave(lines, tasks, sizes=sizes)
            self._known[key] = found
        return found

    def _tasks(self, pieces: Sequence[Piece]) -> tuple[list[Task], dict[Any, tuple[Any, int]]]:
        tasks: list[Task] = []
        sizes: dict[Any, tuple[Any, int]] = {}
        links = {c.members: LINKS[c.members] for p in pieces for c in p.segment.starts if c.members in LINKS}
        pace = max((link.pace for link in links.values()), default=1.0)
        for piece in pieces:
            own, program, line = piece.own, piece.segment.program, piece.line
            known = inputs(own)

            def key(name: str, piece: Piece = piece) -> Any:
                source, mb = self.low.key(piece.own, piece.stage, piece.action.microbatch, name)
                return (piece.line, source) if mb == piece.action.microbatch else (source, mb)

            for name in (*program.inputs, *program.outputs):
                held = own.memory.get(name)
                if held is not None and not (held.given and known.get(held.root, ("", 0))[0] in CALLERS):
                    # a value that came from elsewhere is known by the name that it has there
                    sizes[key(name)] = (key(held.root) if held.given else (line, piece.stage, held.root), held.nbytes)
            name = "loss" if piece.stage != piece.action.stage else piece.segment.name
            tasks.append(Task(
                line, name, int(pace * piece.segment.nanoseconds),
                tuple(map(key, program.inputs)), tuple(map(key, program.outputs)),
                tuple(Transfer(key(c.value), c.op, c.members, c.nanoseconds) for c in piece.segment.starts),
                tuple(map(key, piece.segment.waits)), piece.segment.loose,
            ))  # fmt: skip
        return tasks, sizes

    # ---- a function of the user's own ---------------------------------------------------------------------------
    def _joint(self, action: AnyAction) -> None:
        """One step for both stages' programs; the loss's programs stand around it."""
        low, ends = self.low, _Ends(self.low, action, ())
        mains: list[tuple[Action, Programs, Program]] = []
        after: list[tuple[Action, Programs, Program, int]] = []
        for part in action.parts:
            for own, program, stage in self.programs(part):
                if stage == part.stage:
                    mains.append((part, own, program))
                elif part.op == "F":
                    after.append((part, own, program, stage))
                else:
                    low.run(part, own, program, stage)
        assert self.overlap.own is not None
        program = _joined(mains, self.overlap.own)
        reads: list[Key] = []
        writes: list[Key] = []
        for part, own, each in mains:
            reads += low.have(part, own, each, part.stage)
            writes += low.writes(each, part.stage, part.microbatch)
        low.here.update(writes)
        owner = replace(mains[0][1], memory=dict(_memory(mains)))
        low.out.append(Step("F", action.parts[0], tuple(reads), tuple(writes), program, owner))
        for part, own, each, stage in after:
            low.run(part, own, each, stage)
        ends.close()


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
    inputs = tuple(n for each in names for n in each)
    return Program("F", "", run, inputs, tuple(outputs), random=programs[0].random, label=f"with {mains[1][0]}")


def _memory(mains: Sequence[tuple[Action, Programs, Program]]) -> Iterator[tuple[str, Held]]:
    for k, (_, own, _) in enumerate(mains):
        for name, held in own.memory.items():
            yield f"{k}.{name}", Held(f"{k}.{held.root}", held.nbytes, held.given)


class _Ends:
    """What follows the lines of a fused action: sends as soon as their values are there, and each line's own end."""

    def __init__(self, low: Lowering, action: AnyAction, pieces: Sequence[Piece]):
        self.low, self.action = low, action
        self.left = [sum(piece.line == line for piece in pieces) for line in range(len(action.parts))]
        self.lines = [piece.line for piece in pieces]
        self.open = list(range(len(action.parts)))
        self.sends = [send for part in action.parts for send in self._sends(part)]

    def _sends(self, part: Action) -> Iterator[tuple[Action, int, str, list[Key], set[int]]]:
        stage, op, mb = part
        top = self.low.job.stages - 1
        facts = [(stage, "F")] if op == "F" else [(stage, "I")] if op in "BI" else []
        if op in "BI" and stage == top:
            facts.insert(0, (stage + 1, "I"))
        for stage_of, fact in facts:
            going = self.low.traffic.outgoing(stage_of, fact, mb)
            keys: list[Key] = [(out.source, mb) for _, outs in going for out in outs]
            yield part, stage_of, fact, keys, {rank for rank, _ in going}

    def after(self, number: int) -> None:
        """A segment has run."""
        self._send(False)
        line = self.lines[number]
        self.left[line] -= 1
        if not self.left[line]:
            self._send(False)
            self._end(line)

    def close(self) -> None:
        """All segments have run."""
        self._send(True)
        for line in list(self.open):
            self._end(line)

    def _send(self, every: bool) -> None:
        """Send what is there; what goes to one rank keeps its order, which that rank counts on."""
        waiting: set[int] = set()
        for send in list(self.sends):
            part, stage, fact, keys, peers = send
            there = every or all(key in self.low.here or isinstance(key[0], BatchLeaf) for key in keys)
            if there and not waiting & peers:
                self.low.traffic.send(part, stage, fact)
                self.sends.remove(send)
            else:
                waiting |= peers

    def _end(self, line: int) -> None:
        if line in self.open:
            self.open.remove(line)
            self.low.end(self.action.parts[line])
