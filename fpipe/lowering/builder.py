# SPDX-License-Identifier: Apache-2.0
"""Lowering: a schedule and its programs become one rank's plan.

A ``Builder`` emits the actions of a row as instructions over keys: what their programs read is
received, the programs run, values are sent as soon as they are computed, gradients are added. Then
``assign`` numbers the slots: a value is freed after its last use, and its slot is used again. Plain
and fused actions take one path: an action is a list of pieces, programs or segments of them, in the
order in which they run. Features (``plan.Feature``) change what is emitted. Knows keys; no tensors,
backends or names of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..actions import product
from ..actions.action import Action, plain
from ..actions.dependencies import uncollected
from ..programs.program import Program, Programs
from ..tree import Aval, contiguous, sum_dtype
from .instruction import Instruction
from .instructions import Add, Run
from .job import LoweringInput, ProgramSet
from .keys import BatchLeaf, Key, OutputCotangent, Source, State, Value
from .messages import Messages
from .plan import Plan, Use
from .value_graph import grad, param
from .wired import WiredMessages


def lower(job: LoweringInput, rank: int) -> Plan:
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


#: A program, or a segment of one, that an action runs: which part of the action, that part, the
#: programs that it belongs to, the stage (one past the part's for the loss) and the program.
Piece: TypeAlias = tuple[int, Action, Programs, int, Program]


class _Reads(NamedTuple):
    """What a program reads: the same for all microbatches of a kind, but for the number of the
    microbatch.
    """

    program: Program  # kept, so that its id stays its own
    #: each with how far its microbatch is; None: it belongs to all
    keys: tuple[tuple[Key, int | None], ...]
    needs: tuple[int, ...]  # places of values of other stages


class _Leaving(NamedTuple):
    """Values that leave a rank together: after which fact of which stage, what must be computed
    first, and to whom.
    """

    stage: int
    fact: str
    computed: tuple[Source, ...]
    peers: frozenset[int]


class Builder:
    """The instructions of one rank, and what is known of its values so far."""

    def __init__(self, job: LoweringInput, rank: int):
        self.job = job
        self.rank = rank
        self.here: set[Key] = set()
        self.state: dict[int, list[Key]] = {}
        self.added: set[Key] = set()
        self.out: list[Instruction] = []
        self._values: dict[tuple[int, int], tuple[Value, ...]] = {}
        self._runs: dict[tuple[int, int], Run] = {}
        self._reads: dict[tuple[int, int, int], _Reads] = {}
        self._adding: dict[tuple[int, str, int], dict[int, str]] = {}
        self._leaves: dict[tuple[int, str, int, int], Sequence[_Leaving]] = {}
        kind = WiredMessages if job.wired or job.strict else Messages
        self.messages = kind(job, rank, self.out, self.here)
        self.features = [feature.start(self) for feature in job.features]

    # ---- the row ----
    def emit_row(self) -> int:
        """Emit all actions; returns the number of instructions before the first backward."""
        row = self.job.schedule[self.rank]
        place = 0
        split = 0
        backward = -2
        if self.job.phased:
            backward = next((i for i, action in enumerate(plain(row)) if action.op != "F"), -1)
        self.messages.begin()
        for position, action in enumerate(row):
            if place != backward:
                self._before()
            if any(feature.act(action, position) for feature in self.features):
                place += len(action.parts)
                continue
            for part in action.parts:
                if place == backward:
                    split = self._end_phase()
                    self.messages.begin()
                    self._before()
                self.messages.before(place)
                self.act(part)
                place += 1
        if backward == -1:
            split = self._end_phase()
        self.messages.drain()
        return split

    def _before(self) -> None:
        for feature in self.features:
            feature.before()

    def _end_phase(self) -> int:
        self._before()
        self.messages.next_phase()
        return len(self.out)

    def results(self) -> list[Key]:
        """The keys whose values are results of the plan."""
        keys: list[Key] = [*self.added, *(key for keys in self.state.values() for key in keys)]
        for mb in range(self.job.schedule.units):
            path = self.job.schedule.placement.path(mb)
            kind = self.job.kind(mb)
            if path[-1] == self.rank:
                keys += outputs_of(kind, mb) if kind.loss is None else self.of_loss(kind.loss, mb)
            if path[0] == self.rank and self.job.wants_dx:
                keys += input_gradients_of(kind, mb)
            for stage, own in kind.programs.items():
                if own.aux is not None and path[stage] == self.rank:
                    keys.append(self.key(own, stage, mb, own.aux))
        for feature in self.features:
            keys = list(feature.results(keys))
        return keys

    def of_loss(self, loss: Programs, mb: int) -> list[Key]:
        """The keys of what the loss returns of a microbatch that is part of the results."""
        return [self.key(loss, self.job.stages, mb, name) for name in loss.ys if name is not None]

    # ---- names ----
    def key(self, programs: Programs, stage: int, mb: int, name: str) -> Key:
        """The key of a value that a stage's programs call ``name``."""
        role, leaf = programs.roles.get(name, ("computed", 0))
        if role == "param":
            found = (feature.parameter(stage, leaf) for feature in self.features)
            return next(filter(None, found), None) or param(stage, leaf)
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
                return product.feature("slices").carried(self, role, stage, mb, beyond)
        return (graph.source(programs, stage, name), mb)

    # ---- actions ----
    def programs(self, part: Action) -> Iterator[tuple[Programs, int, Program]]:
        """What a part of an action runs, in order: the loss's program after F of the last stage, or
        before its B.
        """
        stage, op, mb = part
        kind = self.job.kind(mb)
        own = kind.programs[stage]
        loss = kind.loss if stage == self.job.stages - 1 else None
        if loss is not None and op in "BI":
            yield loss, stage + 1, loss.b
        plain = own.f if op == "F" else own.i
        yield own, stage, plain if op in "FI" else self._with_adds(own, op, stage)
        if loss is not None and op == "F":
            yield loss, stage + 1, loss.f

    def act(self, part: Action) -> None:
        """Emit an action whose programs run one after the other."""
        self.emit((part,), [(0, part, *run) for run in self.programs(part)])

    def emit(self, parts: Sequence[Action], pieces: Sequence[Piece]) -> None:
        """Emit the pieces of an action's parts in this order, what is sent after each, and the end
        of each part.
        """
        sends = [(part, leaving) for part in parts for leaving in self._leaving(part)]
        last = {line: place for place, (line, *_) in enumerate(pieces, 1)}
        if sends and not sends[0][1].computed and parts[0].op != "F":
            sends = self._send(sends)  # cotangents that the caller passes are there
        for place, (line, part, own, stage, program) in enumerate(pieces, 1):
            self.run(part, own, program, stage)
            if sends:
                sends = self._send(sends, place == len(pieces))
            if place == last[line]:
                self._end(part)
        if sends:
            self._send(sends, True)
        for line, part in enumerate(parts):
            if line not in last:
                self._end(part)

    def _leaving(self, part: Action) -> Sequence[_Leaving]:
        stage, op, mb = part
        if op == "W":
            return ()
        memo = (stage, op, self.job.kind_of[mb], self.job.schedule.placement.path_index(mb))
        known = self._leaves.get(memo)
        if known is None:
            fact = "F" if op == "F" else "I"
            with_loss = op != "F" and stage == self.job.stages - 1
            stages = (stage + 1, stage) if with_loss else (stage,)
            leaving = []
            for of in stages:
                routes = self.messages.outgoing(of, fact, mb)
                sources = [out.source for _, outs in routes for out in outs]
                given = (BatchLeaf, OutputCotangent)
                computed = tuple(s for s in sources if not isinstance(s, given))
                if routes:
                    peers = frozenset(rank for rank, _ in routes)
                    leaving.append(_Leaving(of, fact, computed, peers))
            known = self._leaves[memo] = leaving
        return known

    def _send(
        self, sends: list[tuple[Action, _Leaving]], every: bool = False
    ) -> list[tuple[Action, _Leaving]]:
        """Send what is computed, or everything; returns the rest. Sends to one rank keep their
        order.
        """
        rest: list[tuple[Action, _Leaving]] = []
        blocked: set[int] = set()
        for part, leaving in sends:
            mb = part.microbatch
            there = every or all((source, mb) in self.here for source in leaving.computed)
            if there and blocked.isdisjoint(leaving.peers):
                self.messages.send(part, leaving.stage, leaving.fact)
            else:
                rest.append((part, leaving))
                blocked |= leaving.peers
        return rest

    def _end(self, action: Action) -> None:
        """Emit what follows an action's programs: the next state, what is received for the caller,
        the addition of gradients.
        """
        stage, op, mb = action
        kind = self.job.kind(mb)
        own = kind.programs[stage]
        if op == "F":
            if own.new_state:
                self.state[stage] = [self.key(own, stage, mb, n) for n in own.new_state]
            if stage == self.job.stages - 1 and kind.loss is None:
                self.fetch(outputs_of(kind, mb))
        elif op != "W" and stage == 0 and self.job.wants_dx:
            self.fetch(input_gradients_of(kind, mb))
        for feature in self.features:
            feature.after(action)
        if op in "BW":
            self._add(action, own, op)

    def fetch(self, keys: Sequence[Key]) -> None:
        """Wait for values that other ranks compute."""
        for key in keys:
            self.messages.fetch(key)

    # ---- programs ----
    def run(self, action: Action, own: Programs, program: Program, stage: int) -> None:
        """Run a program on what it reads."""
        reads = self.reads(action, own, program, stage)
        if program.traced or program.outputs or own.eager:
            writes = self.writes(program, stage, action.microbatch)
            self.here.update(writes)
            memo = (id(program), stage)
            op = self._runs.get(memo)
            if op is None or op.owner is not own:
                op = self._runs[memo] = Run(program, stage, own)
            self.out.append(Instruction(op, action, reads, writes))

    def reads(self, action: Action, own: Programs, program: Program, stage: int) -> tuple[Key, ...]:
        """The keys that a program reads; emits the waits that they need."""
        mb = action.microbatch
        _, keys, needs = self._pattern(own, program, stage, mb)
        reads = tuple([key if by is None else (key[0], mb + by) for key, by in keys])
        for place in needs:
            self.messages.fetch(reads[place])
        return reads

    def _pattern(self, own: Programs, program: Program, stage: int, mb: int) -> _Reads:
        """The reads of a program for a kind of microbatch: cached, unless the stage has state,
        whose keys change.
        """
        memo = (id(program), stage, self.job.kind_of[mb])
        found = self._reads.get(memo)
        if found is None or own.counts[3]:
            keys = [self.key(own, stage, mb, name) for name in program.inputs]
            needs = tuple(
                place
                for place, (source, _) in enumerate(keys)
                if isinstance(source, BatchLeaf)
                or (isinstance(source, Value) and source.stage != stage)
            )
            apart = tuple((key, None if key[1] is None else key[1] - mb) for key in keys)
            found = self._reads[memo] = _Reads(program, apart, needs)
        return found

    def writes(self, program: Program, stage: int, mb: int) -> tuple[Key, ...]:
        """The keys of what a program computes."""
        values = self._values.get((id(program), stage))
        if values is None:
            values = tuple(Value(stage, name) for name in program.outputs)
            self._values[id(program), stage] = values
        return tuple([(value, mb) for value in values])

    # ---- gradients ----
    def _with_adds(self, own: Programs, letter: str, stage: int) -> Program:
        """The program that adds into gradients itself, once all of them exist; until then the one
        that returns them.
        """
        memo = (id(own), letter, stage)
        plain = own.b if letter == "B" else own.w
        if memo not in self._adding:
            computed = own.added_by(letter)
            if not all(grad(stage, leaf) in self.added for leaf in computed):
                return plain
            self._adding[memo] = computed
        return own.adding(letter) if self._adding[memo] else plain

    def _add(self, action: Action, own: Programs, op: str) -> None:
        """Add the gradients that the action's program returned."""
        stage = action.stage
        mb = action.microbatch
        into = []
        values = []
        how = []
        sums = []
        done = self._adding.get((id(own), op, stage), {})
        for index, name in enumerate(own.dps):
            if name is None or index in done:
                continue
            target = grad(stage, index)
            into.append(target)
            values.append(self.key(own, stage, mb, name))
            sums += [sum_of(own.grad_avals[name], self.job.wide)] if name in own.grad_avals else []
            self.messages.fetch(values[-1])
            if target in self.added:
                how.append("add")
            else:
                how.append("take" if name in own.fresh and self.job.wide is None else "copy")
            self.added.add(target)
        if into:
            op_add = Add(tuple(how), tuple(sums) if len(sums) == len(into) else ())
            self.out.append(Instruction(op_add, action, tuple(values), tuple(into)))


def outputs_of(kind: ProgramSet, mb: int) -> tuple[Key, ...]:
    """The keys of a microbatch's outputs."""
    return tuple([(source, mb) for source in kind.graph.outputs()])


def input_gradients_of(kind: ProgramSet, mb: int) -> tuple[Key, ...]:
    """The keys of a microbatch's gradients of x that are not zero."""
    return tuple([(source, mb) for source in kind.graph.input_gradients()])


def sum_of(aval: Aval, wide: torch.dtype | None) -> Aval:
    """What gradients of an aval are added up in."""
    return aval._replace(stride=contiguous(aval.shape), dtype=sum_dtype(aval.dtype, wide))


# ---- slots ----
def assign(
    job: LoweringInput, rank: int, keyed: Sequence[Instruction], split: int, wanted: Sequence[Key]
) -> Plan:
    """Assign slots to the instructions of a rank; ``wanted`` are the keys of its results."""
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
                if not spare:
                    spare = [size]
                    size = size + 1
                slots[key] = spare.pop()
        writes = tuple([slots.get(key, -1) for key in ins.writes])
        frees = tuple([slots.pop(ins.reads[place]) for place in ends])
        spare += frees
        instructions.append(Instruction(ins.op, ins.action, reads, writes, frees))
    results = {key: slots[key] for key in wanted if key in slots}
    row = job.schedule[rank]
    return Plan(
        rank, tuple(instructions), size, feeds, results, split, row, tuple(keyed), uses, job.wired
    )


def _uses(
    keyed: Sequence[Instruction], wanted: Sequence[Key], feeds: dict[Key, int]
) -> Iterator[Use]:
    """The use of each instruction, from the last one to the first."""
    used = {*wanted, *feeds}
    for step in reversed(keyed):
        needed = tuple([key in used for key in step.writes])
        if step.op.updates:
            used.update(step.writes)
        elif step.op.renews:
            used.difference_update(step.writes)
        ends = []
        for place, key in enumerate(step.reads):
            if key not in used:
                used.add(key)
                ends.append(place)
        yield tuple(ends), needed


def _feeds(keyed: Sequence[Instruction], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller passes these."""
    written: set[Key] = set()
    feeds: dict[Key, int] = {}
    for reads, writes in (*((ins.reads, ins.writes) for ins in keyed), (wanted, ())):
        for key in reads:
            if key not in written and key not in feeds:
                feeds[key] = len(feeds)
        written.update(writes)
    return feeds
