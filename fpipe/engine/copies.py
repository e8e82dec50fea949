# SPDX-License-Identifier: Apache-2.0
"""REDUCE, UNSHARD, RESHARD and their WAIT as functions of the registers.

A wait for other copies blocks and does not yield to other ranks of this process: all copies run one
plan, so they start their collectives in one order, which a rank that ran in between could break.
Knows no backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..collectives.group import Work, part_of
from ..lowering.plan import Instruction
from ..lowering.sharding import Bucket, Share
from .registers import Registers


def together(
    ins: Instruction, share: Share, journal: Callable[[int, str], None], rank: int
) -> Callable[[Registers], None]:
    """One instruction that all copies carry out together."""
    if ins.kind == "REDUCE":
        return _reduce(ins, share)
    if ins.kind == "UNSHARD":
        return _unshard(ins, share)
    if ins.kind == "RESHARD":
        return _reshard(ins)
    assert ins.kind == "WAIT", ins.kind
    what = "gradients" if share.gradients else "parameters"
    return _wait(
        ins,
        share,
        lambda: journal(rank, f"waiting for the {what} of stage {share.stage} of other copies"),
    )


def _reduce(ins: Instruction, share: Share) -> Callable[[Registers], None]:
    copies, frees, number = share.copies, ins.frees, ins.number
    slot_of = dict(zip(share.leaves, ins.reads, strict=True))
    op = "mean" if copies.mean else "sum"
    buckets = [
        (b, [slot_of.get(leaf, -1) for leaf in b.leaves], share.carried(b)) for b in share.buckets()
    ]

    def step(r: Registers) -> None:
        slots, works = r.slots, []
        for bucket, reads, dtype in buckets:
            memory = share.layout.pack(bucket, [slots[i] if i >= 0 else None for i in reads], dtype)
            works.append(copies.group.start_reduce(memory, op, scatter=copies.zero > 1))
        for i in frees:
            slots[i] = None
        r.collectives[number] = works

    return step


def _unshard(ins: Instruction, share: Share) -> Callable[[Registers], None]:
    copies, number = share.copies, ins.number
    slot_of = dict(zip(share.leaves, ins.reads, strict=True))
    buckets = [(b, [slot_of[leaf] for leaf in b.leaves]) for b in share.buckets()]

    def step(r: Registers) -> None:
        r.collectives[number] = [
            copies.group.start_gather(share.layout.fill(bucket, [r.slots[i] for i in reads]))
            for bucket, reads in buckets
        ]

    return step


def _reshard(ins: Instruction) -> Callable[[Registers], None]:
    frees = ins.frees

    def step(r: Registers) -> None:
        for i in frees:
            r.slots[i] = None

    return step


def _wait(
    ins: Instruction, share: Share, journal: Callable[[], None]
) -> Callable[[Registers], None]:
    slot_of = dict(zip(share.leaves, ins.writes, strict=True))
    buckets = share.buckets()

    def step(r: Registers) -> None:
        journal()
        works: Sequence[Work] = r.collectives.pop(ins.number)
        for bucket, work in zip(buckets, works, strict=True):
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
