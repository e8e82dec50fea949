# SPDX-License-Identifier: Apache-2.0
"""REDUCE, UNSHARD, RESHARD and their WAIT: instructions that all copies carry out together.

A wait for other copies blocks and does not yield to other ranks of this process: all copies run one
plan, so they start their collectives in one order, which a rank that ran in between could break.
Knows no backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...collectives.wire import part_of
from ...lowering.instruction import Instruction, Machine, Op, Registers, StepFn
from ...lowering.memory import MemoryAccount
from .sharding import Bucket, Share


@dataclass(frozen=True, slots=True)
class _Shared(Op):
    """What concerns leaves of a stage, ``share``."""

    share: Share

    def __str__(self) -> str:
        return f"stage {self.share.stage}"


@dataclass(frozen=True, slots=True)
class _Started(_Shared):
    """A collective that is under way until the WAIT of the same number."""

    number: int

    @property
    def memory(self) -> Hashable:
        """The key of what is under way."""
        return ("of all copies", self.number)

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        account.begin(self.memory, self.memory, self.share.bytes)
        return account.live


@dataclass(frozen=True, slots=True)
class Reduce(_Started):
    """Start to reduce the gradients of a stage over the copies."""

    kind = "REDUCE"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share, frees, number = self.share, ins.frees, self.number
        copies, slot_of = share.copies, dict(zip(share.leaves, ins.reads, strict=True))
        op = "mean" if copies.mean else "sum"
        buckets = [
            (b, [slot_of.get(leaf, -1) for leaf in b.leaves], share.carried(b))
            for b in share.buckets()
        ]

        def step(r: Registers) -> None:
            slots, works = r.slots, []
            for bucket, reads, dtype in buckets:
                leaves = [slots[i] if i >= 0 else None for i in reads]
                memory = share.layout.pack(bucket, leaves, dtype)
                works.append(copies.group.start_reduce(memory, op, scatter=copies.zero > 1))
            for i in frees:
                slots[i] = None
            r.collectives[number] = works

        return step


@dataclass(frozen=True, slots=True)
class Unshard(_Started):
    """Start to gather a stage's parameters from the parts of all copies."""

    kind = "UNSHARD"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share, number, group = self.share, self.number, self.share.copies.group
        slot_of = dict(zip(share.leaves, ins.reads, strict=True))
        buckets = [(b, [slot_of[leaf] for leaf in b.leaves]) for b in share.buckets()]

        def step(r: Registers) -> None:
            r.collectives[number] = [
                group.start_gather(share.layout.fill(bucket, [r.slots[i] for i in reads]))
                for bucket, reads in buckets
            ]

        return step


@dataclass(frozen=True, slots=True)
class Reshard(_Shared):
    """Free gathered parameters."""

    kind = "RESHARD"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        frees = ins.frees

        def step(r: Registers) -> None:
            for i in frees:
                r.slots[i] = None

        return step


@dataclass(frozen=True, slots=True)
class Landed(_Started):
    """WAIT for what was reduced or gathered. Parameters may be gathered again: earlier values
    have ended then.
    """

    kind = "WAIT"
    renews = True

    def __str__(self) -> str:
        what = "gradients" if self.share.gradients else "parameters"
        return f"{what} of stage {self.share.stage}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key, nbytes in zip(ins.writes, self.share.landed(), strict=True):
            if nbytes is None:
                account.share(key, account.behind[self.memory])
            else:
                account.begin(key, key, nbytes)
        account.end(self.memory)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share, number, buckets = self.share, self.number, self.share.buckets()
        slot_of = dict(zip(share.leaves, ins.writes, strict=True))
        journal, rank = machine.group.journal, machine.rank
        text = f"waiting for the {self} of other copies"

        def step(r: Registers) -> None:
            journal(rank, text)
            for bucket, work in zip(buckets, r.collectives.pop(number), strict=True):
                (memory,) = work.wait()
                for leaf, value in zip(bucket.leaves, _landed(share, bucket, memory), strict=True):
                    if slot_of.get(leaf, -1) >= 0:
                        r.slots[slot_of[leaf]] = value

        return step


def _landed(share: Share, bucket: Bucket, memory: Tensor) -> list[Tensor]:
    """The result of a collective as values of the leaves."""
    layout = share.layout
    if not share.gradients:
        return layout.whole(bucket, memory)
    memory = memory.to(share.dtype(bucket))
    if not share.copies.cut:
        return layout.whole(bucket, memory)
    mine = part_of(memory, layout.part, layout.parts).clone() if share.copies.zero == 1 else memory
    return layout.split(bucket, mine)
