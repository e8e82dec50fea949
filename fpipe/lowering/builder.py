# SPDX-License-Identifier: Apache-2.0
"""Lowering: a schedule and its programs become one rank's plan.

A ``Builder`` emits instructions over keys for each action of a row. It waits for what the programs
read, runs them, sends values as soon as they are computed, and adds gradients. Then ``assign``
replaces keys by slots: a value is freed after its last use, and its slot is used again.

Plain and fused actions take one path. An action is a list of pieces, programs or segments of them,
in the order in which they run. Features (``plan.Feature``) change what is emitted. This module
knows keys, and no tensors, backends or names of schedules.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import torch

from ..actions.action import Action, AnyAction, unfused
from ..actions.dependencies import uncollected
from ..actions.product import load_pass
from ..programs.program import Program, Programs
from ..tree import Aval, contiguous, sum_dtype
from .instruction import Instruction
from .instructions import Add, Run
from .job import Job, ProgramSet
from .keys import BatchLeaf, Key, OutputCotangent, Source, State, Value
from .messages import Messages
from .plan import Plan, Use
from .value_graph import grad, param
from .wired import WiredMessages

#: What the caller passes and one rank sends to others.
PASSED = BatchLeaf, OutputCotangent


def lower(job: Job, rank: int) -> Plan:
    """The plan of one rank."""
    with uncollected():
        builder = Builder(job, rank)
        split = builder.emit_row()
        for feature in builder.features:
            feature.finish()
        plan = assign(job, rank, builder.out, split, builder.results())
        for feature in builder.features:
            plan = feature.complete(plan)
        return plan


#: A program, or a segment of a program, that an action runs: the index of the part of the action,
#: the part, the programs that own it, their stage (of the loss: one past the last), the program.
Piece: TypeAlias = tuple[int, Action, Programs, int, Program]


class _Running(NamedTuple):
    """How a stage runs a program: the same for all microbatches of a kind."""

    op: Run  # keeps the program alive, so that no other program gets its id
    #: What it reads, each with the offset of its microbatch; None: it belongs to the whole call.
    reads: tuple[tuple[Key, int | None], ...]
    fetched: tuple[int, ...]  # indices of the reads that other ranks may compute
    writes: tuple[Value, ...]


class _Sending(NamedTuple):
    """What a fact of a stage sends to ``peers``, once ``sources`` are computed."""

    stage: int
    fact: str
    sources: Sequence[Source]
    peers: frozenset[int]


class Gradient(NamedTuple):
    """The gradient of a leaf for a microbatch. ``own``: it may become a sum itself."""

    leaf: int
    key: Key
    own: bool
    aval: Aval | None


class Builder:
    """Emits the instructions of one rank into ``out``.

    ``present`` are the keys of computed and received values, ``accumulated`` those of gradients to
    which a value was added. ``state`` has the keys of each stage's current state.
    """

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.rank = rank
        self.present: set[Key] = set()
        self.state: dict[int, list[Key]] = {}
        self.accumulated: set[Key] = set()
        self.out: list[Instruction] = []
        self._running: dict[tuple[int, int, int], _Running] = {}
        self._sendings: dict[tuple[int, str, int, int], list[_Sending]] = {}
        #: By id of programs, letter and stage: the gradients, by leaf, that the program itself adds
        #: into their sums. There is no entry before each of these sums has a first value.
        self._added_inside: dict[tuple[int, str, int], dict[int, str]] = {}
        self.messages = (WiredMessages if job.wired or job.strict else Messages)(job, rank)
        self.features = [feature.start(self) for feature in job.features]

    # ---- the row ----
    def emit_row(self) -> int:
        """Emit all actions; returns the number of instructions before the first backward.

        That number is 0 unless the job has phases.
        """
        row = self.job.schedule[self.rank]
        split = 0
        boundary = -1  # the place of the first backward, where the job has phases
        if self.job.phased:
            boundary = len(list(takewhile(lambda action: action.op == "F", unfused(row))))
        place = 0
        self._append(self.messages.begin())
        for position, action in enumerate(row):
            if place == boundary:
                split = self._end_phase()
                self._append(self.messages.begin())
            self._before(action)
            if not any(feature.act(action, position) for feature in self.features):
                for at, part in enumerate(action.parts, place):
                    self._append(self.messages.before(at))
                    self.act(part)
            place += len(action.parts)
        if place == boundary:  # there is no backward
            split = self._end_phase()
        self._append(self.messages.drain())
        return split

    def _append(self, messages: Iterable[Instruction]) -> None:
        """Emit instructions of messages; what they receive is then present."""
        for instruction in messages:
            self.out.append(instruction)
            self.present.update(instruction.writes)

    def _before(self, action: AnyAction | None) -> None:
        for feature in self.features:
            feature.before(action)

    def _end_phase(self) -> int:
        self._before(None)
        self._append(self.messages.next_phase())
        return len(self.out)

    def results(self) -> list[Key]:
        """The keys whose values are results of the plan."""
        keys = list(self.accumulated)
        for state in self.state.values():
            keys += state
        for mb in range(self.job.schedule.units):
            path = self.job.schedule.placement.path(mb)
            kind = self.job.kind(mb)
            if path[-1] == self.rank:
                keys += outputs_of(kind, mb) if kind.loss is None else self.of_loss(kind.loss, mb)
            if path[0] == self.rank and self.job.wants_dx:
                keys += input_gradients_of(kind, mb)
            for stage, programs in kind.programs.items():
                if programs.aux is not None and path[stage] == self.rank:
                    keys.append(self.key(programs, stage, mb, programs.aux))
        for feature in self.features:
            keys = list(feature.results(keys))
        return keys

    def of_loss(self, loss: Programs, mb: int) -> list[Key]:
        """The keys of the results of the loss for a microbatch."""
        return [self.key(loss, self.job.stages, mb, name) for name in loss.ys if name is not None]

    # ---- names ----
    def key(self, programs: Programs, stage: int, mb: int, name: str) -> Key:
        """The key of a value that a stage's programs call ``name``."""
        role, leaf = programs.roles.get(name, ("computed", 0))
        if role == "param":
            replaced = (feature.parameter(stage, leaf) for feature in self.features)
            return next(filter(None, replaced), None) or param(stage, leaf)
        if role == "grad":
            return grad(stage, leaf)
        if role == "state":
            start: list[Key] = [(State(stage, i), None) for i in range(programs.counts[3])]
            return self.state.setdefault(stage, start)[leaf]
        graph = self.job.kind(mb).graph
        if role in ("x", "cotangent") and stage < self.job.stages:
            interface = graph.interfaces[stage]
            beyond = leaf - len(interface.dxs if role == "x" else interface.ys)
            if beyond >= 0:
                return load_pass("slices").carried(self, role, stage, mb, beyond)
        return (graph.source(programs, stage, name), mb)

    # ---- actions ----
    def programs(self, part: Action) -> Iterator[tuple[Programs, int, Program]]:
        """The programs that a part of an action runs, in order, each with its owner and stage.

        The loss runs after F and before B or I of the last stage.
        """
        stage, op, mb = part
        kind = self.job.kind(mb)
        programs = kind.programs[stage]
        loss = kind.loss if stage == self.job.stages - 1 else None
        if loss is not None and op in "BI":
            yield loss, stage + 1, loss.b
        if op == "F":
            yield programs, stage, programs.f
        elif op == "I":
            yield programs, stage, programs.i
        else:
            yield programs, stage, self._with_adds(programs, op, stage)
        if loss is not None and op == "F":
            yield loss, stage + 1, loss.f

    def act(self, part: Action) -> None:
        """Emit an action whose programs run one after the other."""
        self.emit((part,), [(0, part, *run) for run in self.programs(part)])

    def emit(self, parts: Sequence[Action], pieces: Sequence[Piece]) -> None:
        """Emit the parts of an action: their pieces in this order, and their messages.

        Values are sent after the piece that computes them. A part ends after its last piece.
        """
        sends = [(part, sending) for part in parts for sending in self._sendings_of(part)]
        last = {index: number for number, (index, *_) in enumerate(pieces, 1)}  # piece of each part
        sends = sends and self._send(sends)  # what waits for no program: values of the caller
        for number, (index, part, programs, stage, program) in enumerate(pieces, 1):
            self.run(part, programs, program, stage)
            sends = sends and self._send(sends)
            if number == last[index]:
                self._end(part)
        assert not sends
        for index, part in enumerate(parts):
            if index not in last:
                self._end(part)

    def _sendings_of(self, part: Action) -> Sequence[_Sending]:
        """What an action sends; in a backward of the last stage, first what the loss sends."""
        stage, op, mb = part
        if op == "W":
            return ()
        memo = (stage, op, self.job.kind_of[mb], self.job.schedule.placement.path_index(mb))
        if memo not in self._sendings:
            fact = "F" if op == "F" else "I"
            senders = self.messages.senders(stage, fact)
            self._sendings[memo] = found = []
            for sender in senders:
                if routes := self.messages.outgoing(sender, fact, mb):
                    sources = [out.source for _, outs in routes for out in outs]
                    # what the caller passes need not be computed
                    computed = [source for source in sources if not isinstance(source, PASSED)]
                    peers = frozenset(rank for rank, _ in routes)
                    found.append(_Sending(sender, fact, computed, peers))
        return self._sendings[memo]

    def _send(self, sends: list[tuple[Action, _Sending]]) -> list[tuple[Action, _Sending]]:
        """Send what is computed; returns the rest. Sends to one rank keep their order."""
        rest: list[tuple[Action, _Sending]] = []
        blocked: set[int] = set()
        for part, sending in sends:
            mb = part.microbatch
            ready = all((source, mb) in self.present for source in sending.sources)
            if ready and blocked.isdisjoint(sending.peers):
                self._append(self.messages.send(part, sending.stage, sending.fact))
            else:
                rest.append((part, sending))
                blocked |= sending.peers
        return rest

    def _end(self, action: Action) -> None:
        """Emit what follows the programs of an action: the waits for results that the caller wants,
        what features add, and the addition of gradients.
        """
        stage, op, mb = action
        kind = self.job.kind(mb)
        programs = kind.programs[stage]
        if op == "F":
            if programs.new_state:
                self.state[stage] = [self.key(programs, stage, mb, n) for n in programs.new_state]
            if stage == self.job.stages - 1 and kind.loss is None:
                self.fetch(outputs_of(kind, mb))
        elif op != "W" and stage == 0 and self.job.wants_dx:
            self.fetch(input_gradients_of(kind, mb))
        for feature in self.features:
            feature.after(action)
        if op in "BW" and not any(feature.add(action) for feature in self.features):
            self._add(action, programs, op)

    def fetch(self, keys: Iterable[Key]) -> None:
        """Wait for values that other ranks compute."""
        for key in keys:
            self._append(self.messages.fetch(key))

    # ---- programs ----
    def run(self, action: Action, programs: Programs, program: Program, stage: int) -> None:
        """Emit a program, after the waits for what it reads. One that does nothing is left out."""
        mb = action.microbatch
        op, relative, fetched, values = self._how(programs, program, stage, mb)
        reads = tuple(
            [key if offset is None else (key[0], mb + offset) for key, offset in relative]
        )
        self.fetch([reads[index] for index in fetched])
        if program.traced_operations or program.outputs or programs.eager:
            writes = tuple([(value, mb) for value in values])
            self.present.update(writes)
            self.out.append(Instruction(op, action, reads, writes))

    def _how(self, programs: Programs, program: Program, stage: int, mb: int) -> _Running:
        """How a program runs, cached by kind of microbatch; not for a stage with state, whose keys
        change.
        """
        memo = (id(program), stage, self.job.kind_of[mb])
        cached = self._running.get(memo)
        if cached is not None and not programs.counts[3]:  # without state
            return cached
        relative: list[tuple[Key, int | None]] = []
        fetched = []
        for index, name in enumerate(program.inputs):
            key = self.key(programs, stage, mb, name)
            source, of = key
            relative.append((key, None if of is None else of - mb))
            elsewhere = isinstance(source, Value) and source.stage != stage
            if elsewhere or isinstance(source, PASSED):
                fetched.append(index)
        values = tuple(Value(stage, name) for name in program.outputs)
        op = Run(program, stage, programs)
        running = self._running[memo] = _Running(op, tuple(relative), tuple(fetched), values)
        return running

    # ---- gradients ----
    def _with_adds(self, programs: Programs, letter: str, stage: int) -> Program:
        """The program B or W: that which returns gradients, or, once all of them have a first
        value, that which adds into them.
        """
        memo = (id(programs), letter, stage)
        if memo not in self._added_inside:
            leaves = programs.added_by(letter)
            if all(grad(stage, leaf) in self.accumulated for leaf in leaves):
                self._added_inside[memo] = leaves
        if self._added_inside.get(memo):
            return programs.adding(letter)
        return programs.b if letter == "B" else programs.w

    def _add(self, action: Action, programs: Programs, op: str) -> None:
        """Add the gradients that the action's program returned."""
        stage = action.stage
        inside = self._added_inside.get((id(programs), op, stage), {})
        gradients = self.gradients(action, inside)
        sums = tuple([grad(stage, gradient.leaf) for gradient in gradients])
        self.add(action, gradients, sums, self.accumulated)
        self.accumulated.update(sums)

    def gradients(self, action: Action, without: Container[int] = ()) -> list[Gradient]:
        """The gradients that the programs of an action computed, but for those of some leaves."""
        stage, _, mb = action
        programs = self.job.kind(mb).programs[stage]
        found = []
        for leaf, name in enumerate(programs.dps):
            if name is not None and leaf not in without:
                key = self.key(programs, stage, mb, name)
                self.fetch([key])
                own = name in programs.fresh and self.job.accumulate is None
                found.append(Gradient(leaf, key, own, programs.grad_avals.get(name)))
        return found

    def add(
        self,
        action: Action,
        gradients: Sequence[Gradient],
        sums: tuple[Key, ...],
        begun: Container[Key],
    ) -> None:
        """Add gradients to their sums, of which some have ``begun``."""
        if not gradients:
            return
        accumulate = self.job.accumulate
        avals = tuple([sum_of(g.aval, accumulate) for g in gradients if g.aval is not None])
        add = Add(
            tuple(
                "add" if key in begun else "take" if gradient.own else "copy"
                for key, gradient in zip(sums, gradients, strict=True)
            ),
            # the dtype of some may not be known before the run
            avals if len(avals) == len(gradients) else (),
        )
        reads = tuple([gradient.key for gradient in gradients])
        self.out.append(Instruction(add, action, reads, sums))


def outputs_of(kind: ProgramSet, mb: int) -> tuple[Key, ...]:
    """The keys of a microbatch's outputs."""
    return tuple([(source, mb) for source in kind.graph.outputs()])


def input_gradients_of(kind: ProgramSet, mb: int) -> tuple[Key, ...]:
    """The keys of a microbatch's gradients of x that are not zero."""
    return tuple([(source, mb) for source in kind.graph.input_gradients()])


def sum_of(aval: Aval, accumulate: torch.dtype | None) -> Aval:
    """The aval of a sum of gradients."""
    return aval._replace(stride=contiguous(aval.shape), dtype=sum_dtype(aval.dtype, accumulate))


# ---- slots ----
def assign(
    job: Job, rank: int, keyed: Sequence[Instruction], split: int, wanted: Sequence[Key]
) -> Plan:
    """The plan of a rank: slots in place of the keys of its instructions.

    ``wanted`` are the keys of its results.
    """
    feeds = _feeds(keyed, wanted)
    uses = tuple(reversed(list(_uses(keyed, wanted, feeds))))
    slots = dict(feeds)
    spare = list[int]()
    size = len(feeds)
    instructions = []
    for ins, (ends, needed) in zip(keyed, uses, strict=True):
        reads = tuple([slots[key] for key in ins.reads])
        for key, later in zip(ins.writes, needed, strict=True):
            if later and key not in slots:
                if spare:
                    slots[key] = spare.pop()
                else:
                    slots[key] = size
                    size += 1
        writes = tuple([slots.get(key, -1) for key in ins.writes])
        frees = tuple([slots.pop(ins.reads[index]) for index in ends])
        spare += frees
        instructions.append(Instruction(ins.op, ins.action, reads, writes, frees))
    results = {key: slots[key] for key in wanted if key in slots}
    row = job.schedule[rank]
    return Plan(
        rank,
        tuple(instructions),
        size,
        feeds,
        results,
        split,
        row,
        tuple(keyed),
        uses,
        job.wired and not job.staged,
    )


def _uses(
    keyed: Sequence[Instruction], wanted: Sequence[Key], feeds: dict[Key, int]
) -> Iterator[Use]:
    """The use of each instruction, from the last one to the first.

    ``later`` has the keys that are read after the current instruction. At the end these are the
    results, which the caller reads, and what it fed, which is never freed.
    """
    later = {*wanted, *feeds}
    for ins in reversed(keyed):
        needed = tuple([key in later for key in ins.writes])
        if ins.op.updates:
            later.update(ins.writes)
        elif ins.op.renews:
            later.difference_update(ins.writes)
        ends = []
        for index, key in enumerate(ins.reads):
            if key not in later:  # this read is the last
                later.add(key)
                ends.append(index)
        yield Use(tuple(ends), needed)


def _feeds(keyed: Sequence[Instruction], wanted: Sequence[Key]) -> dict[Key, int]:
    """The slots of keys that are read before an instruction writes them: the caller fills these."""
    written: set[Key] = set()
    feeds: dict[Key, int] = {}
    for reads, writes in (*((ins.reads, ins.writes) for ins in keyed), (wanted, ())):
        for key in reads:
            if key not in written and key not in feeds:
                feeds[key] = len(feeds)
        written.update(writes)
    return feeds
