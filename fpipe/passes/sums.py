# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over ranks: of stages that several ranks hold, and of tied parameters.

Every rank of every member of a group receives the gradients of the others and adds all of them in
one order: leaf by leaf, and within a leaf rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..lowering.builder import Builder
from ..lowering.instruction import Instruction, Machine, Op, Registers, StepFn
from ..lowering.instructions import Recv, Send, Wait
from ..lowering.keys import GradSum, Key, PartialGrad
from ..lowering.memory import MemoryAccount
from ..lowering.plan import Feature
from ..lowering.value_graph import grad
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

    def start(self, builder: Builder) -> Feature:
        return _OnRank(self, builder)


class _OnRank(Feature):
    def __init__(self, sums: Sums, builder: Builder):
        self.sums = sums
        self.builder = builder

    def finish(self) -> None:
        ranks_of = self.builder.job.schedule.placement.ranks_of
        tied = {leaf for group in self.sums.tied for leaf in group}
        replicated = [
            (leaf,)
            for leaf in sorted(self.sums.specs, key=lambda leaf: leaf[0])
            if leaf not in tied | self.sums.whole and len(ranks_of(leaf[0])) > 1
        ]
        for number, group in enumerate([*replicated, *self.sums.tied]):
            self._emit(number, group)

    def _emit(self, number: int, group: Sequence[Leaf]) -> None:
        builder = self.builder
        specs = self.sums.specs
        rank = self.builder.rank
        out = builder.out
        ranks_of = builder.job.schedule.placement.ranks_of
        whole = self.sums.whole
        places = [
            (leaf, home)
            for leaf in group
            for home in ranks_of(leaf[0])[: 1 if leaf in whole else None]
        ]

        def has(peer, leaf, home):
            return peer == home or (leaf in whole and peer in ranks_of(leaf[0]))

        local = [leaf for leaf in group if rank in ranks_of(leaf[0])]
        if not local:
            return
        for leaf in local:
            if grad(*leaf) not in builder.accumulated:
                out.append(Instruction(Zero(specs[leaf]), writes=(grad(*leaf),)))
                builder.accumulated.add(grad(*leaf))
        parts: list[Key] = [
            grad(*leaf) if has(rank, leaf, home) else (PartialGrad(*leaf, home, number), None)
            for leaf, home in places
        ]
        peers = sorted({home for leaf in group for home in ranks_of(leaf[0])} - {rank})
        waits = []
        for peer in peers:
            for (leaf, home), part in zip(places, parts, strict=True):
                if home == peer and not has(rank, leaf, home):
                    wait = Wait(peer, -1 - len(out) - len(waits), (specs[leaf],))
                    waits.append(Instruction(wait, writes=(part,)))
        for ins in waits:
            wait = ins.op
            out.append(Instruction(Recv(wait.peer, wait.number, wait.specs)))
        for peer in peers:
            for leaf, home in places:
                if home == rank and not has(peer, leaf, home):
                    out.append(Instruction(Send(peer, (specs[leaf],)), reads=(grad(*leaf),)))
        out += waits
        total: Key = (GradSum(number), None)
        out.append(Instruction(Sum(), reads=tuple(parts), writes=(total,)))
        out += [Instruction(Sum(), reads=(total,), writes=(grad(*leaf),)) for leaf in local]


@dataclass(frozen=True, slots=True)
class Zero(Op):
    """ZERO: a gradient to which nothing was added."""

    spec: Spec
    kind = "ZERO"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key in ins.writes:
            account.begin(key, key, self.spec.bytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        (slot,), spec, device = ins.writes, self.spec, machine.device

        def step(r: Registers) -> None:
            r.slots[slot] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)

        return step


@dataclass(frozen=True, slots=True)
class Sum(Op):
    """SUM: the sum of what is read, in order."""

    kind = "SUM"
    updates = True

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key in ins.writes:
            account.copy(key, ins.reads[0])
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        reads, (write,), frees = ins.reads, ins.writes, ins.frees

        def step(r: Registers) -> None:
            slots = r.slots
            total = slots[reads[0]].clone()
            for i in reads[1:]:
                total.add_(slots[i])
            for i in frees:
                slots[i] = None
            slots[write] = total

        return step
