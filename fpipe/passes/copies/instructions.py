# SPDX-License-Identifier: Apache-2.0
"""REDUCE, UNSHARD, RESHARD and their WAIT: instructions that all copies carry out together.

A wait for other copies blocks and does not yield to other ranks of this process: all copies run one
plan, so they start their collectives in one order, which a rank that ran in between could break.
Knows no backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...lowering.instruction import Instruction, Machine, Op, Registers, StepFn
from ...lowering.memory import MemoryAccount
from .sharding import Share


@dataclass(frozen=True, slots=True)
class OfShare(Op):
    """What concerns leaves of a stage, ``share``."""

    share: Share

    def __str__(self) -> str:
        return f"stage {self.share.stage}"

    @property
    def memory(self) -> Hashable:
        """The key of what is under way until the WAIT; a stage has one gathering at a time."""
        return ("of all copies", self.share.stage, self.share.gradients)


@dataclass(frozen=True, slots=True)
class _Started(OfShare):
    """A collective that is under way until its WAIT."""

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        account.begin(self.memory, self.memory, self.share.bytes)
        return account.live


@dataclass(frozen=True, slots=True)
class Reduce(_Started):
    """Start to reduce the gradients of a stage over the copies."""

    kind = "REDUCE"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share = self.share
        key = self.memory
        frees = ins.frees
        copies = share.copies
        op = "mean" if copies.mean else "sum"
        buckets = [
            (bucket, slots, share.carried(bucket)) for bucket, slots in share.slots(ins.reads)
        ]

        def step(r: Registers) -> None:
            works = []
            for bucket, reads, dtype in buckets:
                leaves = [r.slots[i] if i >= 0 else None for i in reads]
                memory = share.layout.pack(bucket, leaves, dtype)
                works.append(copies.group.start_reduce(memory, op, scatter=copies.zero > 1))
            for i in frees:
                r.slots[i] = None
            r.collectives[key] = works

        return step


@dataclass(frozen=True, slots=True)
class Unshard(_Started):
    """Start to gather a stage's parameters from the parts of all copies."""

    kind = "UNSHARD"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share = self.share
        key = self.memory
        buckets = share.slots(ins.reads)

        def step(r: Registers) -> None:
            works = []
            for bucket, reads in buckets:
                memory = share.layout.fill(bucket, [r.slots[i] for i in reads])
                works.append(share.copies.group.start_gather(memory))
            r.collectives[key] = works

        return step


@dataclass(frozen=True, slots=True)
class Reshard(OfShare):
    """Free gathered parameters."""

    kind = "RESHARD"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        frees = ins.frees

        def step(r: Registers) -> None:
            for i in frees:
                r.slots[i] = None

        return step


@dataclass(frozen=True, slots=True)
class Landed(OfShare):
    """WAIT for what was reduced or gathered. Parameters may be gathered again: earlier values
    have ended then.
    """

    kind = "WAIT"
    renews = True

    def __str__(self) -> str:
        if self.share.gradients:
            what = "gradients"
        else:
            what = "parameters"
        return f"{what} of stage {self.share.stage}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key, nbytes in zip(ins.writes, self.share.landed(), strict=True):
            if nbytes is None:
                account.share(key, account.storages[self.memory])
            else:
                account.begin(key, key, nbytes)
        account.end(self.memory)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share = self.share
        key = self.memory
        buckets = share.slots(ins.writes)
        journal = machine.group.journal
        rank = machine.rank
        text = f"waiting for the {self} of other copies"

        def step(r: Registers) -> None:
            journal(rank, text)
            for (bucket, writes), work in zip(buckets, r.collectives.pop(key), strict=True):
                (memory,) = work.wait()
                for i, value in zip(writes, share.values(bucket, memory), strict=True):
                    if i >= 0:
                        r.slots[i] = value

        return step
