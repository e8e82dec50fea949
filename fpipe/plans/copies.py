"""REDUCE, UNSHARD, RESHARD and their waits as functions of the registers.

What is under way stands beside the receives, by its number. A wait for other copies blocks: all copies run one plan, so
they come here in one order, which another rank of this process could not keep if it went first. Knows no backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..collectives.group import Work, part_of
from .plan import Instruction
from .sharding import Bucket, Share

Registers = list[Any]


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
    return _wait(ins, share, lambda: journal(rank, f"waiting for the {what} of stage {share.stage} of other copies"))


def _reduce(ins: Instruction, share: Share) -> Callable[[Registers], None]:
    copies, frees, key = share.copies, ins.frees, (-1, ins.number)
    slots = dict(zip(share.leaves, ins.reads, strict=True))
    op = "mean" if copies.mean else "sum"
    buckets = [(b, [slots.get(leaf, -1) for leaf in b.leaves], share.carried(b)) for b in share.buckets()]

    def step(r: Registers) -> None:
        works = []
        for bucket, reads, dtype in buckets:
            memory = share.layout.pack(bucket, [r[i] if i >= 0 else None for i in reads], dtype)
            works.append(copies.group.start_reduce(memory, op, scatter=copies.zero > 1))
        for i in frees:
            r[i] = None
        r[-2][key] = works

    return step


def _unshard(ins: Instruction, share: Share) -> Callable[[Registers], None]:
    copies, key = share.copies, (-1, ins.number)
    slots = dict(zip(share.leaves, ins.reads, strict=True))
    buckets = [(b, [slots[leaf] for leaf in b.leaves]) for b in share.buckets()]

    def step(r: Registers) -> None:
        r[-2][key] = [
            copies.group.start_gather(share.layout.fill(bucket, [r[i] for i in reads])) for bucket, reads in buckets
        ]

    return step


def _reshard(ins: Instruction) -> Callable[[Registers], None]:
    frees = ins.frees

    def step(r: Registers) -> None:
        for i in frees:
            r[i] = None

    return step


def _wait(ins: Instruction, share: Share, journal: Callable[[], None]) -> Callable[[Registers], None]:
    key, slots = (-1, ins.number), dict(zip(share.leaves, ins.writes, strict=True))
    buckets = share.buckets()

    def step(r: Registers) -> None:
        journal()
        works: Sequence[Work] = r[-2].pop(key)
        for bucket, work in zip(buckets, works, strict=True):
            (memory,) = work.wait()
            for leaf, value in zip(bucket.leaves, _landed(share, bucket, memory), strict=True):
                if slots.get(leaf, -1) >= 0:
                    r[slots[leaf]] = value

    return step


def _landed(share: Share, bucket: Bucket, memory: Tensor) -> list[Tensor]:
    """What has come, as values of the leaves."""
    layout = share.layout
    if not share.gradients:
        return layout.whole(bucket, memory)
    memory = memory.to(share.dtype(bucket))
    if not share.copies.cut:
        return layout.whole(bucket, memory)
    mine = part_of(memory, layout.part, layout.parts).clone() if share.copies.zero == 1 else memory
    return layout.split(bucket, mine)
