# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over ranks: of stages that several ranks hold, and of tied parameters.

Every rank of every member of a group receives the gradients of the others and adds all of them in
one order: leaf by leaf, and within a leaf rank by rank. Where ``by_order`` says so, gradients of a
stage on several ranks are added in the order of microbatches instead, whatever their ranks.

The running sum goes from rank to rank: the rank of microbatch m receives the sum of all before it,
adds its gradient, and sends the sum to the rank of microbatch m + 1. The rank of the last one sends
the total to the others. A gradient that comes before its turn is kept apart until then, and no rank
waits for its turn before it has something else to run.

For m microbatches these are m - 1 messages of the size of the gradients, where neighbouring
microbatches are on different ranks, and one for each other rank at the end. A rank receives and
sends once for each of its microbatches.

``by_order`` says for which stages: those whose ranks run all their stages for each of their
microbatches, as with ``make_schedule(replicas=)``. In DualPipe and Chimera a rank runs one of its
stages for some microbatches and another one for others; there each rank has a sum of its own.

The places of steps in the rows come from one simulation of all ranks, in which the stages of a rank
take as long as it has copies. All steps have one order, by time and microbatch, and a step stands
behind the actions that began before it and before those that begin later. So there is an order of
all actions and steps that agrees with all rows and all messages, and no rank waits for ever. On a
group that blocks sends until they are received, all steps stand at the end of the rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch

from ..actions.action import Action, AnyAction, Placement
from ..actions.costs import Costs
from ..lowering.builder import Builder, Gradient
from ..lowering.instruction import Instruction, Machine, Opcode, Registers, StepFn
from ..lowering.instructions import Add, Recv, Send, Wait
from ..lowering.keys import GradSum, Key, PartialGrad
from ..lowering.memory import MemoryAccount
from ..lowering.plan import Feature
from ..lowering.value_graph import grad
from ..lowering.wired import Settle
from ..schedule import Schedule
from ..tree import Spec

#: A leaf of the parameters: its stage, and its index there.
Leaf = tuple[int, int]


@dataclass(frozen=True)
class Sums(Feature):
    """``tied`` groups leaves that are one parameter; ``specs`` describes the gradients that are
    sent, of replicated stages and ties. Of the leaves ``whole`` each rank of the stage has the sum.
    """

    tied: tuple[tuple[Leaf, ...], ...] = ()
    specs: Mapping[Leaf, Spec] = field(default_factory=dict)
    whole: frozenset[Leaf] = frozenset()

    def finish(self) -> None:
        ranks_of = self.builder.job.schedule.placement.ranks_of
        tied = {leaf for group in self.tied for leaf in group}
        replicated = [
            (leaf,)
            for leaf in sorted(self.specs, key=lambda leaf: leaf[0])
            if leaf not in tied | self.whole and len(ranks_of(leaf[0])) > 1
        ]
        for number, group in enumerate([*replicated, *self.tied]):
            self._emit(number, group)

    def _emit(self, number: int, group: Sequence[Leaf]) -> None:
        builder: Builder = self.builder
        specs = self.specs
        rank = builder.rank
        out = builder.out
        ranks_of = builder.job.schedule.placement.ranks_of
        local = [leaf for leaf in group if rank in ranks_of(leaf[0])]
        if not local:
            return
        for leaf in local:
            if grad(*leaf) not in builder.accumulated:
                out.append(Instruction(Zero(specs[leaf]), writes=(grad(*leaf),)))
                builder.accumulated.add(grad(*leaf))
        #: The leaf of each gradient, and the ranks that have it: the first one sends it.
        parts: list[tuple[Leaf, tuple[int, ...]]] = []
        for leaf in group:
            ranks = ranks_of(leaf[0])
            parts += [(leaf, ranks)] if leaf in self.whole else [(leaf, (r,)) for r in ranks]
        keys: list[Key] = [
            grad(*leaf) if rank in ranks else (PartialGrad(*leaf, ranks[0], number), None)
            for leaf, ranks in parts
        ]
        peers = sorted({peer for leaf in group for peer in ranks_of(leaf[0])} - {rank})
        waits = []
        for peer in peers:
            for (leaf, ranks), key in zip(parts, keys, strict=True):
                if ranks[0] == peer and rank not in ranks:
                    wait = Wait(peer, -1 - len(out) - len(waits), (specs[leaf],))
                    waits.append(Instruction(wait, writes=(key,)))
        out += [Instruction(Recv(w.peer, w.number, w.specs)) for w, *_ in waits]
        for peer in peers:
            for leaf, ranks in parts:
                if ranks[0] == rank and peer not in ranks:
                    out.append(Instruction(Send(peer, (specs[leaf],)), reads=(grad(*leaf),)))
        out += waits
        total: Key = (GradSum(number), None)
        out.append(Instruction(Sum(), reads=tuple(keys), writes=(total,)))
        out += [Instruction(Sum(), reads=(total,), writes=(grad(*leaf),)) for leaf in local]


@dataclass(frozen=True, slots=True)
class Zero(Opcode):
    """ZERO: a gradient to which nothing was added."""

    spec: Spec
    kind = "ZERO"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key in ins.writes:
            account.begin(key, key, self.spec.bytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        (slot,) = ins.writes
        spec = self.spec
        device = machine.device

        def step(r: Registers) -> None:
            r.slots[slot] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)

        return step


@dataclass(frozen=True, slots=True)
class Sum(Opcode):
    """SUM: the sum of what is read, in order."""

    kind = "SUM"
    updates = True

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key in ins.writes:
            account.copy(key, ins.reads[0])
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        reads = ins.reads
        (write,) = ins.writes
        frees = ins.frees

        def step(r: Registers) -> None:
            slots = r.slots
            total = slots[reads[0]].clone()
            for i in reads[1:]:
                total.add_(slots[i])
            for i in frees:
                slots[i] = None
            slots[write] = total

        return step


def by_order(placement: Placement) -> frozenset[int]:
    """The stages on several ranks whose gradients are added in the order of microbatches.

    >>> sorted(by_order(Placement([[0, 1, 3], [0, 2, 3]], 4, route=[0, 1])))
    [1]
    >>> by_order(Placement.bidirectional(2, 4, up=[2, 3]))
    frozenset()
    """
    split = {
        rank
        for path in placement.paths
        for rank in set(path)
        if path.count(rank) < len(placement.stages_of(rank))
    }
    return frozenset(
        stage
        for stage in range(placement.stages)
        if len(placement.ranks_of(stage)) > 1 and split.isdisjoint(placement.ranks_of(stage))
    )


class Step(NamedTuple):
    """The addition of a microbatch's gradients to the running sum of its stage.

    ``place`` is that of the microbatch in the order, ``position`` that of the first action of
    the rank behind the step.
    """

    time: float
    place: int
    stage: int
    unit: int
    rank: int
    position: float


def steps_of(schedule: Schedule, stages: frozenset[int], late: bool) -> dict[int, list[Step]]:
    """By stage its steps, in the order of microbatches; ``late``: they stand behind all actions.

    >>> from fpipe import make_schedule
    >>> s = make_schedule("1F1B", 3, 4, replicas=(2, 1))
    >>> [(step.rank, step.position) for step in steps_of(s, frozenset({0}), False)[0]]
    [(0, 3), (1, 3), (0, 4), (1, 4)]
    """
    copies = [len(schedule.placement.ranks_of(stage)) for stage in range(schedule.stages)]
    line = schedule.simulate(Costs(F=copies, I=copies, W=copies))
    found: dict[int, list[tuple[int, float, int, int]]] = {stage: [] for stage in stages}
    for rank, row in enumerate(schedule):
        for action, end in zip(row, line.ends[rank], strict=True):
            for stage, op, unit in action.parts:
                if stage in stages and op in "BW":
                    found[stage].append((unit // schedule.slices, end, unit, rank))
    chains: dict[int, list[Step]] = {}
    for stage, parts in found.items():
        time = 0.0
        chains[stage] = []
        for index, (_, end, unit, rank) in enumerate(sorted(parts)):
            starts = line.starts[rank]
            begun = bisect_left(starts, max(time, end)) - 1
            time = max(time, end, line.ends[rank][begun])
            position = inf if late else bisect_left(starts, time)
            chains[stage].append(Step(time, index, stage, unit, rank, position))
    return chains


@dataclass(frozen=True)
class OrderedSums(Sums):
    """``chains`` are the steps of the stages of which a running sum goes from rank to rank."""

    chains: Mapping[int, Sequence[Step]] = field(default_factory=dict)

    def start(self, builder: Builder) -> Feature:
        return _InOrder(self, builder)


class _InOrder(Feature):
    def __init__(self, sums: OrderedSums, builder: Builder):
        rank = builder.rank
        self.builder = builder
        self.specs = sums.specs
        self.chains = sums.chains
        self.rest = Sums.start(sums, builder)
        every = sorted(step for chain in self.chains.values() for step in chain)
        self.own = deque(step for step in every if step.rank == rank)
        held = builder.job.schedule.placement.stages_of(rank)
        #: By stage of the rank and place: the leaves that have a sum before that step.
        self.leaves = {stage: self._leaves(stage) for stage in self.chains if stage in held}
        #: By rank: the steps before which it sends the sum to this one, in that order.
        self.coming: dict[int, deque[Step]] = defaultdict(deque)
        for step in every:
            following = self._next(step)
            if following is not None and following.rank == rank != step.rank:
                self.coming[step.rank].append(following)
        self.received: set[Step] = set()
        #: By rank: the steps after which this one sent the sum to it, and which are not settled.
        self.unsettled: dict[int, deque[Step]] = defaultdict(deque)
        #: By stage: the microbatch from whose step on this rank has the running sum.
        self.since: dict[int, int] = {}
        self.gradients: dict[tuple[int, int], list[Gradient]] = {}

    def _leaves(self, stage: int) -> list[tuple[int, ...]]:
        known: tuple[int, ...] = ()
        found: list[tuple[int, ...]] = [known]
        for step in self.chains[stage]:
            dps = self.builder.job.kind(step.unit).programs[stage].dps
            leaves = {leaf for leaf, name in enumerate(dps) if name is not None}
            if not leaves.issubset(known):
                known = tuple(sorted(leaves.union(known)))
            found.append(known)
        return found

    def _next(self, step: Step) -> Step | None:
        """The step after one of the same stage."""
        chain = self.chains[step.stage]
        return chain[step.place + 1] if step.place + 1 < len(chain) else None

    def _before(self, step: Step) -> int:
        """The rank of the step before one of the same stage; -1: it is the first."""
        return self.chains[step.stage][step.place - 1].rank if step.place else -1

    # ---- what the builder calls ----
    def act(self, action: AnyAction, position: int) -> bool:
        self._until(position)
        return False

    def add(self, action: Action) -> bool:
        """Keep the gradients of an action until their turn."""
        stage, _, unit = action
        if stage not in self.chains:
            return False
        self.gradients[stage, unit] = self.builder.gradients(action)
        return True

    def finish(self) -> None:
        self._until(inf)
        for stage in sorted(self.leaves):
            self._total(stage)
        self.rest.finish()

    # ---- steps ----
    def _until(self, position: float) -> None:
        """Emit the steps up to a position of the row."""
        rank = self.builder.rank
        while self.own and self.own[0].position <= position:
            step = self.own.popleft()
            if self._before(step) != rank:
                self.since[step.stage] = step.unit
                if step.place:
                    self._receive(step)
            self._add(step)
            following = self._next(step)
            if following is not None and following.rank != rank:
                self._send(step, following.rank)

    def _add(self, step: Step) -> None:
        """Add the gradients of a microbatch to the running sum."""
        gradients = self.gradients.pop((step.stage, step.unit))
        since = self.since[step.stage]
        begun = self._keys(step.stage, since, self.leaves[step.stage][step.place])
        sums = self._keys(step.stage, since, [gradient.leaf for gradient in gradients])
        self.builder.add(Action(step.stage, "W", step.unit), gradients, sums, begun)

    def _total(self, stage: int) -> None:
        """The rank of the last microbatch sends the total to the other ranks of a stage."""
        builder = self.builder
        last = self.chains[stage][-1]
        leaves = self.leaves[stage][-1]
        totals: tuple[Key, ...] = tuple(grad(stage, leaf) for leaf in leaves)
        builder.accumulated.update(totals)
        if last.rank != builder.rank:
            self._get(last.rank, stage, leaves, totals)
        elif leaves:
            sums = self._keys(stage, self.since[stage], leaves)
            add = Add(("take",) * len(leaves))
            builder.out.append(Instruction(add, reads=sums, writes=totals))
            for rank in sorted(set(builder.job.schedule.placement.ranks_of(stage))):
                if rank != builder.rank:
                    self._put(rank, stage, leaves, totals)

    # ---- messages ----
    def _keys(self, stage: int, unit: int, leaves: Sequence[int]) -> tuple[Key, ...]:
        """The keys of the running sum on this rank, from the step of a microbatch on."""
        rank = self.builder.rank
        return tuple((PartialGrad(stage, leaf, rank, -1), unit) for leaf in leaves)

    def _receive(self, step: Step) -> None:
        """Receive the running sum before a step, and all that its sender sends before that."""
        sender = self._before(step)
        while step not in self.received:
            coming = self.coming[sender].popleft()
            leaves = self.leaves[coming.stage][coming.place]
            keys = self._keys(coming.stage, coming.unit, leaves)
            self._get(sender, coming.stage, leaves, keys)
            self.received.add(coming)
            # what this rank sent for the stage has arrived: the sum came by way of it
            for rank, sent in self.unsettled.items():
                known = [
                    count
                    for count, one in enumerate(sent, 1)
                    if one.stage == coming.stage and one.place < coming.place
                ]
                if known:
                    for _ in range(known[-1]):
                        sent.popleft()
                    self.builder.out.append(Instruction(Settle(rank, known[-1])))

    def _send(self, step: Step, rank: int) -> None:
        """Send the running sum after a step."""
        leaves = self.leaves[step.stage][step.place + 1]
        self._put(rank, step.stage, leaves, self._keys(step.stage, self.since[step.stage], leaves))
        if leaves and self.builder.job.wired:
            self.unsettled[rank].append(step)

    def _get(self, rank: int, stage: int, leaves: Sequence[int], keys: tuple[Key, ...]) -> None:
        out = self.builder.out
        specs = tuple(self.specs[stage, leaf] for leaf in leaves)
        if specs:
            wait = Wait(rank, -1 - len(out), specs)
            out.append(Instruction(Recv(rank, wait.number, specs)))
            out.append(Instruction(wait, writes=keys))

    def _put(self, rank: int, stage: int, leaves: Sequence[int], keys: tuple[Key, ...]) -> None:
        specs = tuple(self.specs[stage, leaf] for leaf in leaves)
        if specs:
            self.builder.out.append(Instruction(Send(rank, specs), reads=keys))
