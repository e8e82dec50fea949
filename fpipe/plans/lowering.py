# SPDX-License-Identifier: Apache-2.0
"""Lowering: a schedule and its programs become one rank's plan.

First each action becomes steps over keys (waits, the program, sends, accumulation), then ``slots`` gives out numbers,
frees what was used last and counts bytes. Messages of a channel have one order on both sides: that in which the
sender's row makes them. Nothing here knows tensors, backends or the names of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ..programs.program import Program
from ..programs.stage_programs import Programs
from ..schedules.actions import Action, Fused, plain
from ..tree import Aval, contiguous
from .gathering import Zero
from .keys import BatchLeaf, GradSum, Key, PartialGrad, State, Value, ZeroCotangent, grad, inputs
from .messages import Traffic
from .plan import LoweringInput, Plan, ProgramSet, Step
from .slots import assign
from .weaving.fused import Fusing


def lower(job: LoweringInput, rank: int) -> Plan:
    """The plan of one rank."""
    low = Lowering(job, rank)
    plan = assign(job, rank, *low.steps())
    return replace(plan, weaves=low.fusing.weaves) if low.fusing.weaves else plan


class _Reads(NamedTuple):
    """What a program reads: for all microbatches of a kind the same, but for the microbatch's number."""

    program: Program
    keys: tuple[tuple[Key, bool], ...]  # each with whether it is one for all microbatches
    seen_to: tuple[tuple[int, Aval | None], ...]  # places of those that others make, and of zeros, with their avals


class Lowering:
    """One rank's plan while it is made."""

    def __init__(self, job: LoweringInput, rank: int):
        self.job, self.rank = job, rank
        self.placement = job.schedule.placement
        self.here: set[Key] = set()
        self.state: dict[int, list[Key]] = {}
        self.added: set[Key] = set()
        self.out: list[Step] = []
        self._values: dict[tuple[int, int], tuple[Value, ...]] = {}
        self._reads: dict[tuple[int, int, int], _Reads] = {}
        self._added_by: dict[tuple[int, str], dict[int, str]] = {}
        self._adding: dict[tuple[int, str, int], Program] = {}
        self.traffic = Traffic(job, rank, self.out, self.here)
        self.fusing = Fusing(self, job.overlap)
        self.zero = Zero(job, rank, self.out, self.added)

    def kind(self, mb: int) -> ProgramSet:
        """The kind of a microbatch."""
        return self.job.kinds[self.job.kind_of[mb]]

    # ---- names --------------------------------------------------------------------------------------------------
    def key(self, programs: Programs, stage: int, mb: int, name: str) -> Key:
        """The key of a value that a stage's programs call ``name``."""
        role, leaf = inputs(programs).get(name, ("computed", 0))
        if role == "param":
            return self.zero.key(stage, leaf)
        if role == "grad":
            return grad(stage, leaf)
        if role == "state":
            before = self.state.setdefault(stage, [(State(stage, i), None) for i in range(programs.counts[3])])
            return before[leaf]
        return (self.kind(mb).graph.source(programs, stage, name), mb)

    # ---- steps --------------------------------------------------------------------------------------------------
    def steps(self) -> tuple[list[Step], int, list[Key]]:
        """All steps, the index of the first one after the last forward, and the keys wanted at the end."""
        split = 0
        self.traffic.begin()
        row = self.job.schedule[self.rank]
        backward = next((i for i, action in enumerate(plain(row)) if action.op != "F"), -1)
        place = 0
        for position, action in enumerate(row):
            if place != backward or not self.job.phased:
                self.zero.at(position)
            if (isinstance(action, Fused) or self.fusing.waits(action)) and self.fusing.act(action, position):
                place += len(action.parts)
                continue
            for part in action.parts:
                if place == backward and self.job.phased:
                    self.zero.rest()
                    self.traffic.next_phase()
                    split = len(self.out)
                    self.traffic.begin()
                    self.zero.at(position)
                self.traffic.before(place)
                self._act(part)
                place += 1
        if backward < 0 and self.job.phased:
            self.zero.rest()
            self.traffic.next_phase()
            split = len(self.out)
        self.traffic.drain()
        self._finish()
        self.zero.finish()
        if self.job.early_loss:
            self._send_loss()
        return self.out, split, list(self._wanted())

    def _act(self, action: Action) -> None:
        stage, op, mb = action
        kinds, top = self.kind(mb), self.job.stages - 1
        own = kinds.programs[stage]
        if op == "F":
            self.run(action, own, own.f, stage)
            if stage == top and kinds.loss is not None:
                self.run(action, kinds.loss, kinds.loss.f, stage + 1)
            self.traffic.send(action, stage, "F")
        elif op == "W":
            self.run(action, own, self.with_adds(own, "W", stage), stage)
        else:
            if stage == top and kinds.loss is not None:
                self.run(action, kinds.loss, kinds.loss.b, stage + 1)
            if stage == top:
                self.traffic.send(action, stage + 1, "I")
            self.run(action, own, own.i if op == "I" else self.with_adds(own, "B", stage), stage)
            self.traffic.send(action, stage, "I")
        self.end(action)

    def end(self, action: Action) -> None:
        """What follows an action's programs: state goes on, gradients are added, what the caller wants is had."""
        stage, op, mb = action
        kinds = self.kind(mb)
        own = kinds.programs[stage]
        if op == "F":
            if own.new_state:
                self.state[stage] = [self.key(own, stage, mb, n) for n in own.new_state]
            if stage == self.job.stages - 1 and kinds.loss is None:
                outputs = self._outputs(kinds, mb)
                for found in outputs:
                    self.traffic.fetch(found)
                if self.job.each:
                    self.out.append(Step("EACH", action, outputs))
        elif op != "W" and stage == 0 and self.job.wants_dx:
            for found in self._input_gradients(kinds, mb):
                self.traffic.fetch(found)
        if op in "BW":
            self._add(action, own, op)

    def _outputs(self, kinds: ProgramSet, mb: int) -> tuple[Key, ...]:
        return tuple([(source, mb) for source in kinds.graph.outputs()])

    def _input_gradients(self, kinds: ProgramSet, mb: int) -> list[Key]:
        return [(source, mb) for source in kinds.graph.input_gradients()]

    def have(self, action: Action, own: Programs, program: Program, stage: int) -> tuple[Key, ...]:
        """Have what a program reads, waiting for messages and making zeros where nobody makes a value."""
        mb = action.microbatch
        _, keys, seen_to = self._pattern(own, program, stage, mb)
        reads = tuple([key if fixed else (key[0], mb) for key, fixed in keys])
        for place, zero in seen_to:
            key = reads[place]
            if zero is None:
                self.traffic.fetch(key)
            else:
                self._zero(action, key, zero)
        return reads

    def _zero(self, action: Action, key: Key, aval: Aval) -> None:
        """A cotangent that nobody makes."""
        if key not in self.here:
            self.out.append(Step("ZERO", action, writes=(key,), avals=(aval,)))
            self.here.add(key)

    def _pattern(self, own: Programs, program: Program, stage: int, mb: int) -> _Reads:
        """The reads of a program for the kind of a microbatch: found once, unless there is state, which moves on."""
        memo = (id(program), stage, self.job.kind_of[mb])
        found = self._reads.get(memo)
        if found is None or own.counts[3]:
            keys = [self.key(own, stage, mb, name) for name in program.inputs]
            seen_to: list[tuple[int, Aval | None]] = []
            for place, (source, _) in enumerate(keys):
                if isinstance(source, ZeroCotangent):
                    seen_to.append((place, own.y_avals[source.leaf]))
                elif isinstance(source, BatchLeaf) or (isinstance(source, Value) and source.stage != stage):
                    seen_to.append((place, None))
            found = self._reads[memo] = _Reads(program, tuple((key, key[1] != mb) for key in keys), tuple(seen_to))
        return found

    def run(self, action: Action, own: Programs, program: Program, stage: int) -> None:
        """Run a program on what it reads."""
        mb = action.microbatch
        reads = self.have(action, own, program, stage)
        if program.nodes or program.outputs or own.eager:
            writes = self.writes(program, stage, mb)
            self.here.update(writes)
            self.out.append(Step(program.name, action, reads, writes, program, own))  # type: ignore[arg-type]

    def writes(self, program: Program, stage: int, mb: int) -> tuple[Key, ...]:
        """The keys of what a program computes."""
        values = self._values.get((id(program), stage))
        if values is None:
            values = self._values[id(program), stage] = tuple(Value(stage, name) for name in program.outputs)
        return tuple([(value, mb) for value in values])

    def _made_by(self, own: Programs, letter: str) -> dict[int, str]:
        """The parameter gradients that a program makes itself."""
        found = self._added_by.get((id(own), letter))
        if found is None:
            found = self._added_by[id(own), letter] = own.added_by(letter)
        return found

    def with_adds(self, own: Programs, letter: str, stage: int) -> Program:
        """The program that adds into gradients itself, once they are all there; until then the one that makes them."""
        found = self._adding.get((id(own), letter, stage))
        if found is None:
            made = self._made_by(own, letter)
            if not made or not all(grad(stage, index) in self.added for index in made):
                return own.b if letter == "B" else own.w
            found = self._adding[id(own), letter, stage] = own.adding(letter)
        return found

    def _add(self, action: Action, own: Programs, op: str) -> None:
        """Add what the action's program made and did not add itself."""
        stage, mb = action.stage, action.microbatch
        into, values, how, sums = [], [], [], []
        done = self._made_by(own, op) if (id(own), op, stage) in self._adding else {}
        for index, name in enumerate(own.dps):
            if name is None or index in done:
                continue
            target = grad(stage, index)
            into.append(target)
            values.append(self.key(own, stage, mb, name))
            sums += [_sum_of(own.dp_avals[name], self.job.wide)] if name in own.dp_avals else []
            source = values[-1][0]
            zero = own.y_avals[source.leaf] if isinstance(source, ZeroCotangent) else None
            if zero is None:
                self.traffic.fetch(values[-1])
            else:  # a cotangent that is a gradient as it is, of an output that nobody uses
                self._zero(action, values[-1], zero)
            if target in self.added:
                how.append("add")
            else:
                how.append("take" if name in own.fresh and self.job.wide is None else "copy")
            self.added.add(target)
        if into:
            avals = tuple(sums) if len(sums) == len(into) else ()
            self.out.append(Step("ADD", action, tuple(values), tuple(into), avals=avals, how=tuple(how)))

    # ---- the end ------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """Gradients that live on several ranks, or in several stages, become sums."""
        if not self.job.training:
            return
        groups = [[(stage, i)] for stage in range(self.job.stages) if len(self.placement.ranks_of(stage)) > 1
                  for i in self._leaves(stage)]  # fmt: skip
        tied = {leaf for group in self.job.tied for leaf in group}
        groups = [g for g in groups if g[0] not in tied] + [list(group) for group in self.job.tied]
        for number, group in enumerate(groups):
            self._sum(number, group)

    def _send_loss(self) -> None:
        """Send the loss once all of it is computed here.

        The next values that other ranks compute with are sent first: they wait for those.
        """
        if self.job.scalar_ranks() != [self.rank]:
            return
        keys = tuple(scalar.key for scalar in self.job.scalars(self.rank))
        last = max((n for n, step in enumerate(self.out) if not set(keys).isdisjoint(step.writes)), default=-1)
        if last >= 0 and self.out[last].program is not None:
            sends = (n for n in range(last + 1, len(self.out)) if self.out[n].kind == "SEND")
            self.out.insert(next(sends, last) + 1, Step("LOSS", reads=keys))

    def _leaves(self, stage: int) -> list[int]:
        return [i for s, i in self.job.grad_specs if s == stage]

    def _sum(self, number: int, group: list[tuple[int, int]]) -> None:
        """Every home of every member gets the sum of all, added in one order everywhere."""
        places = [(leaf, rank) for leaf in group for rank in self.placement.ranks_of(leaf[0])]
        mine = [leaf for leaf, rank in places if rank == self.rank]
        if not mine:
            return
        for leaf in mine:
            if grad(*leaf) not in self.added:
                self.out.append(Step("ZERO", writes=(grad(*leaf),), avals=(self.job.grad_specs[leaf],)))
                self.added.add(grad(*leaf))
        others = sorted({rank for _, rank in places} - {self.rank})
        parts: list[Key] = []
        for leaf, rank in places:
            if rank == self.rank:
                parts.append(grad(*leaf))
                continue
            parts.append((PartialGrad(*leaf, rank, number), None))
        receives = [
            Step("RECV", peer=peer, number=-1 - len(self.out) - n, avals=(self.job.grad_specs[leaf],), writes=())
            for n, (peer, leaf) in enumerate((peer, leaf) for peer in others for leaf, rank in places if rank == peer)
        ]
        self.out += receives
        for peer in others:
            for leaf in mine:
                self.out.append(Step("SEND", reads=(grad(*leaf),), peer=peer, avals=(self.job.grad_specs[leaf],)))
        arriving = [part for peer in others for part, (_, rank) in zip(parts, places, strict=True) if rank == peer]
        for step, part in zip(receives, arriving, strict=True):
            self.out.append(Step("WAIT", writes=(part,), peer=step.peer, number=step.number, avals=step.avals))
        total: Key = (GradSum(number), None)
        self.out.append(Step("SUM", reads=tuple(parts), writes=(total,)))
        for leaf in mine:
            self.out.append(Step("SUM", reads=(total,), writes=(grad(*leaf),)))

    def _wanted(self) -> Iterator[Key]:
        """Keys that must stand at the end."""
        job, top = self.job, self.job.stages - 1
        yield from self.added - self.zero.given | self.zero.reduced
        for keys in self.state.values():
            yield from keys
        for mb in range(job.schedule.microbatches):
            path, kinds = self.placement.path(mb), self.kind(mb)
            if path[top] == self.rank:
                if kinds.loss is not None:
                    yield from (self.key(kinds.loss, top + 1, mb, n) for n in kinds.loss.ys if n is not None)
                elif not job.each:
                    yield from self._outputs(kinds, mb)
            if path[0] == self.rank and job.wants_dx:
                yield from self._input_gradients(kinds, mb)
            for stage, own in kinds.programs.items():
                if own.aux is not None and path[stage] == self.rank:
                    yield self.key(own, stage, mb, own.aux)


def _sum_of(aval: Aval, wide: torch.dtype | None) -> Aval:
    """What gradients of an aval are added up in."""
    dtype = wide if wide is not None and aval.dtype.is_floating_point else aval.dtype
    return aval._replace(stride=contiguous(aval.shape), dtype=dtype)
