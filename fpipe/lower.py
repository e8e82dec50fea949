"""Lowering: a schedule and its programs become one rank's plan.

First each action becomes steps over keys (waits, the program, sends, accumulation), then ``slots`` gives out numbers,
frees what was used last and counts bytes. Messages of a channel have one order on both sides: that in which the
sender's row makes them. Nothing here knows tensors, backends or the names of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, gives, plain
from .collectives.group import Spec
from .plan import Job, Kinds, Plan, Step, grad_key, spec_of
from .program import Program
from .route import Key, Out
from .slots import assign
from .stage import Programs


def lower(job: Job, rank: int) -> Plan:
    """The plan of one rank."""
    return assign(job, rank, *_Lowering(job, rank).steps())


class _Channel:
    """Messages from one rank, in the order in which they come: their keys and specs."""

    def __init__(self, src: int):
        self.src = src
        self.messages: list[tuple[tuple[Key, ...], tuple[Spec, ...]]] = []
        self.posted = self.had = 0
        self.fence = -1  # messages of the first phase; -1: no phases


class _Lowering:
    def __init__(self, job: Job, rank: int):
        self.job, self.rank = job, rank
        self.placement = job.schedule.placement
        self.here: set[Key] = set()
        self.state: dict[int, list[Key]] = {}
        self.added: set[Key] = set()
        self.out: list[Step] = []
        self.coming: dict[Key, tuple[_Channel, int]] = {}
        self._names: dict[int, dict[str, tuple[str, int]]] = {}
        self._dests: dict[tuple[int, str, int, tuple[int, ...]], list[tuple[int, list[Out]]]] = {}
        self._specs: dict[Out, Spec] = {}
        self.channels = self._incoming()

    # ---- messages -----------------------------------------------------------------------------------------------
    def kind(self, mb: int) -> Kinds:
        return self.job.kinds[self.job.kind_of[mb]]

    def outgoing(self, stage: int, fact: str, mb: int) -> list[tuple[int, list[Out]]]:
        """Which values go to which other ranks once a fact of a stage is there."""
        path = self.placement.path(mb)
        memo = (stage, fact, self.job.kind_of[mb], path)
        found = self._dests.get(memo)
        if found is None:
            by_rank: dict[int, list[Out]] = {}
            last = len(path) - 1
            home = path[min(stage, last)]
            for out in self.kind(mb).wires.users(stage, fact):
                for rank in dict.fromkeys(path[min(max(s, 0), last)] for s in out.readers):
                    if rank != home:
                        by_rank.setdefault(rank, []).append(out)
            found = self._dests[memo] = list(by_rank.items())
        return found

    def _incoming(self) -> list[_Channel]:
        """Read the other ranks' rows for what they send here."""
        job, sources = self.job, set()
        for mb in dict.fromkeys(self._first_of_kinds()):
            path = self.placement.path(mb)
            for stage in range(job.stages + 1):
                for fact in ("F" if stage < job.stages else "") + ("I" if job.training else ""):
                    if any(rank == self.rank for rank, _ in self.outgoing(stage, fact, mb)):
                        sources.add(path[min(stage, job.stages - 1)])
        channels = []
        for src in sorted(sources - {self.rank}):
            channel = _Channel(src)
            for action in plain(job.schedule[src]):
                if job.phased and action.op != "F" and channel.fence < 0:
                    channel.fence = len(channel.messages)
                for fact in gives(action):
                    if fact.kind == "I" and action.stage == job.stages - 1:
                        self._expect(channel, action, action.stage + 1, "I")
                    if fact.kind != "W":
                        self._expect(channel, action, action.stage, fact.kind)
            channels.append(channel)
        return channels

    def _first_of_kinds(self) -> Iterator[int]:
        """One microbatch for every pair of kind and path."""
        seen = set()
        for mb in range(self.job.schedule.microbatches):
            pair = (self.job.kind_of[mb], self.placement.path(mb))
            if pair not in seen:
                seen.add(pair)
                yield mb

    def _expect(self, channel: _Channel, action: Action, stage: int, fact: str) -> None:
        for rank, outs in self.outgoing(stage, fact, action.microbatch):
            if rank == self.rank:
                keys = tuple((o.stage, action.microbatch, o.name) for o in outs)
                for key in keys:
                    self.coming[key] = (channel, len(channel.messages))
                channel.messages.append((keys, tuple(map(self.spec, outs))))

    def spec(self, out: Out) -> Spec:
        found = self._specs.get(out)
        if found is None:
            found = self._specs[out] = spec_of(out.aval)
        return found

    def _post(self, channel: _Channel, upto: int) -> None:
        end = channel.fence if channel.fence >= 0 else len(channel.messages)
        while channel.posted < min(upto, end):
            specs = channel.messages[channel.posted][1]
            self.out.append(Step("RECV", peer=channel.src, number=channel.posted, avals=specs))
            channel.posted += 1

    def fetch(self, key: Key) -> None:
        """Wait for the message that brings a value, and for those before it."""
        if key in self.here or key not in self.coming:
            return
        channel, number = self.coming[key]
        while channel.had <= number:
            self._post(channel, channel.had + 1 + self.job.ahead)
            keys, specs = channel.messages[channel.had]
            self.out.append(Step("WAIT", writes=keys, peer=channel.src, number=channel.had, avals=specs))
            self.here.update(keys)
            channel.had += 1

    def send(self, action: Action, stage: int, fact: str) -> None:
        for rank, outs in self.outgoing(stage, fact, action.microbatch):
            keys = tuple((o.stage, action.microbatch, o.name) for o in outs)
            specs = tuple(map(self.spec, outs))
            self.out.append(Step("SEND", action, reads=keys, peer=rank, avals=specs))

    # ---- names --------------------------------------------------------------------------------------------------
    def key(self, programs: Programs, stage: int, mb: int, name: str) -> Key:
        """The key of a value that a stage's programs call ``name``."""
        names = self._names.get(id(programs))
        if names is None:
            names = self._names[id(programs)] = _given(programs)
        given = names.get(name)
        if given is None:
            return (stage, mb, name)
        letter, index = given
        if letter == "p":
            return (stage, -1, name)
        if letter == "g":
            return grad_key(stage, index)
        if letter == "t":
            return self.state.setdefault(stage, [(stage, -1, f"t{i}") for i in range(programs.counts[3])])[index]
        wires = self.kind(mb).wires
        if letter == "x" and (stage < self.job.stages or index < len(wires.faces[-1].ys)):
            return wires.forward(stage - 1, index, mb)
        if letter == "dy" and stage < self.job.stages:
            found = wires.cotangent(stage, index, mb)
            return (stage, mb, f"0dy{index}") if found is None else found
        return (stage, mb, name)

    # ---- steps --------------------------------------------------------------------------------------------------
    def steps(self) -> tuple[list[Step], int, list[Key]]:
        """All steps, the index of the first one after the last forward, and the keys wanted at the end."""
        split = 0
        for channel in self.channels:
            self._post(channel, self.job.ahead)
        row = list(plain(self.job.schedule[self.rank]))
        backward = next((i for i, action in enumerate(row) if action.op != "F"), len(row))
        for action in row[:backward]:
            self._act(action)
        if self.job.phased:
            self._drain()
            split = len(self.out)
            for channel in self.channels:
                channel.fence = -1
                self._post(channel, channel.had + self.job.ahead)
        for action in row[backward:]:
            self._act(action)
        self._drain()
        self._finish()
        return self.out, split, list(self._wanted())

    def _drain(self) -> None:
        """Have every message that was posted or, in a first phase, will be sent."""
        for channel in self.channels:
            end = channel.fence if channel.fence >= 0 else len(channel.messages)
            while channel.had < end:
                self.fetch(channel.messages[channel.had][0][0])

    def _act(self, action: Action) -> None:
        stage, op, mb = action
        kinds, top = self.kind(mb), self.job.stages - 1
        own = kinds.programs[stage]
        if op == "F":
            self._run(action, own, own.f, stage)
            if own.new_state:
                self.state[stage] = [self.key(own, stage, mb, n) for n in own.new_state]
            if stage == top and kinds.loss is not None:
                self._run(action, kinds.loss, kinds.loss.f, stage + 1)
            elif stage == top:
                for j, made in enumerate(kinds.wires.faces[-1].ys):
                    if made is not None:
                        self.fetch(kinds.wires.forward(stage, j, mb))
            self.send(action, stage, "F")
            return
        if op != "W":
            if stage == top and kinds.loss is not None:
                self._run(action, kinds.loss, kinds.loss.b, stage + 1)
            if stage == top:
                self.send(action, stage + 1, "I")
            self._run(action, own, own.i if op == "I" else self._with_adds(own, "B", stage), stage)
            self.send(action, stage, "I")
            if stage == 0 and self.job.wants_dx:
                for found in self._input_gradients(own, kinds, mb):
                    self.fetch(found)
        if op != "I":
            if op == "W":
                self._run(action, own, self._with_adds(own, "W", stage), stage)
            self._add(action, own, op)

    def _input_gradients(self, own: Programs, kinds: Kinds, mb: int) -> list[Key]:
        found = (kinds.wires.cotangent(-1, i, mb) for i in range(own.counts[1]))
        return [key for key in found if key is not None]

    def _run(self, action: Action, own: Programs, program: Program, stage: int) -> None:
        mb = action.microbatch
        reads = tuple(self.key(own, stage, mb, name) for name in program.inputs)
        for name, key in zip(program.inputs, reads, strict=True):
            self.fetch(key)
            if key not in self.here and key[2].startswith("0dy"):
                aval = own.y_avals[int(name[2:])]
                self.out.append(Step("ZERO", action, writes=(key,), avals=(aval,)))
                self.here.add(key)
        if program.nodes or program.outputs or own.eager:
            writes = tuple((stage, mb, name) for name in program.outputs)
            self.here.update(writes)
            self.out.append(Step(program.name, action, reads, writes, program, own))  # type: ignore[arg-type]

    def _with_adds(self, own: Programs, letter: str, stage: int) -> Program:
        """The program that adds into gradients itself, once they are all there; until then the one that makes them."""
        made = own.added_by(letter)
        if made and all(grad_key(stage, index) in self.added for index in made):
            return own.adding(letter)
        return own.b if letter == "B" else own.w

    def _add(self, action: Action, own: Programs, op: str) -> None:
        stage, mb = action.stage, action.microbatch
        into, values, how = [], [], []
        done = own.added_by(op)
        if not all(grad_key(stage, index) in self.added for index in done):
            done = {}
        for index, name in enumerate(own.dps):
            if name is None or index in done:
                continue
            target = grad_key(stage, index)
            into.append(target)
            values.append(self.key(own, stage, mb, name))
            self.fetch(values[-1])
            if target in self.added:
                how.append("add")
            else:
                how.append("take" if name in own.fresh and self.job.wide is None else "copy")
            self.added.add(target)
        if into:
            self.out.append(Step("ADD", action, tuple(values), tuple(into), how=tuple(how)))

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

    def _leaves(self, stage: int) -> list[int]:
        return [i for s, i in self.job.grad_specs if s == stage]

    def _sum(self, number: int, group: list[tuple[int, int]]) -> None:
        """Every home of every member gets the sum of all, added in one order everywhere."""
        places = [(leaf, rank) for leaf in group for rank in self.placement.ranks_of(leaf[0])]
        mine = [leaf for leaf, rank in places if rank == self.rank]
        if not mine:
            return
        for leaf in mine:
            if grad_key(*leaf) not in self.added:
                self.out.append(Step("ZERO", writes=(grad_key(*leaf),), avals=(self.job.grad_specs[leaf],)))
                self.added.add(grad_key(*leaf))
        others = sorted({rank for _, rank in places} - {self.rank})
        for peer in others:
            for leaf in mine:
                self.out.append(Step("SEND", reads=(grad_key(*leaf),), peer=peer, avals=(self.job.grad_specs[leaf],)))
        parts: list[Key] = []
        for leaf, rank in places:
            if rank == self.rank:
                parts.append(grad_key(*leaf))
                continue
            parts.append((leaf[0], -3 - rank, f"p{leaf[1]}.{number}"))
        for peer in others:
            for part, (leaf, rank) in zip(parts, places, strict=True):
                if rank == peer:
                    specs = (self.job.grad_specs[leaf],)
                    self.out.append(Step("RECV", peer=peer, number=-1 - len(self.out), avals=specs))
                    self.out.append(Step("WAIT", writes=(part,), peer=peer, number=self.out[-1].number, avals=specs))
        total = (group[0][0], -3 - self.placement.ranks, f"sum{number}")
        self.out.append(Step("SUM", reads=tuple(parts), writes=(total,)))
        for leaf in mine:
            self.out.append(Step("SUM", reads=(total,), writes=(grad_key(*leaf),)))

    def _wanted(self) -> Iterator[Key]:
        """Keys that must stand at the end."""
        job, top = self.job, self.job.stages - 1
        yield from self.added
        for keys in self.state.values():
            yield from keys
        for mb in range(job.schedule.microbatches):
            path, kinds = self.placement.path(mb), self.kind(mb)
            if path[top] == self.rank:
                if kinds.loss is not None:
                    yield from (self.key(kinds.loss, top + 1, mb, n) for n in kinds.loss.ys if n is not None)
                else:
                    faces = kinds.wires.faces
                    yield from (kinds.wires.forward(top, j, mb) for j, y in enumerate(faces[-1].ys) if y is not None)
            if path[0] == self.rank and job.wants_dx:
                yield from self._input_gradients(kinds.programs[0], kinds, mb)
            for stage, own in kinds.programs.items():
                if own.aux is not None and path[stage] == self.rank:
                    yield self.key(own, stage, mb, own.aux)


def _given(programs: Programs) -> dict[str, tuple[str, int]]:
    """What a stage's own names for its inputs mean."""
    p, x, k, t = programs.counts
    names = {f"{letter}{i}": (letter, i) for letter, n in zip("pxkt", (p, x, k, t), strict=True) for i in range(n)}
    names |= {name: ("dy", j) for j, name in enumerate(programs.dys) if name is not None}
    names |= {f"g{i}": ("g", i) for i in range(p)}
    return names | {"daux": ("daux", 0)}
