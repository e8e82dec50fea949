# SPDX-License-Identifier: Apache-2.0
"""Register allocation: steps over keys become instructions over slots, with frees, and every byte is counted.

A slot is given back at the last use of its value; a program takes the values that end with it out of their slots, so
that they can be freed inside. Bytes are counted by storage: two views of one tensor count once. Knows no ranks but its
own and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tree import Aval
from .keys import Key
from .memory import Ledger
from .plan import Instruction, LoweringInput, Plan, Step, spec_of


def assign(job: LoweringInput, rank: int, steps: Sequence[Step], split: int, wanted: Sequence[Key]) -> Plan:
    """Give out slots and count bytes."""
    feeds = _feeds(steps, wanted)
    uses = _uses(steps, wanted, feeds)
    table = _Slots(feeds)
    ledger = Ledger(job.wired)
    instructions, curve = [], []
    for step, (ends, needed) in zip(steps, reversed(uses), strict=True):
        reads = tuple([table.where[key] for key in step.reads])
        during = ledger.run(step, ends) if step.program is not None else ledger.other(step)
        writes = tuple([table.put(key, later) for key, later in zip(step.writes, needed, strict=True)])
        for key, later in zip(step.writes, needed, strict=True):
            if not later:
                ledger.end(key)
        for place in ends:
            ledger.end(step.reads[place])
        frees = tuple([table.free(step.reads[place]) for place in ends])
        curve.append(max(during, ledger.live))
        if step.kind != "ZERO" or writes:
            instructions.append(_instruction(step, reads, writes, frees))
    results = {key: table.where[key] for key in wanted if key in table.where}
    return Plan(
        rank, tuple(instructions), table.size, feeds, results, split, max(curve, default=0), tuple(curve),
        row=job.schedule[rank],
    )  # fmt: skip


def _instruction(
    step: Step, reads: tuple[int, ...], writes: tuple[int, ...], frees: tuple[int, ...]
) -> Instruction:  # fmt: skip
    specs = tuple(spec_of(a) if isinstance(a, Aval) else a for a in step.avals)
    return Instruction(step.kind, step.action, reads, writes, frees, step.program, step.peer, step.number, specs,
                       step.how, step.share, step.owner)  # fmt: skip


def _uses(
    steps: Sequence[Step], wanted: Sequence[Key], feeds: dict[Key, int]
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """From the last step to the first: the places of the reads that end there, and which writes are used later.

    A gradient is made by its first ADD and read, as what it is written into, by the later ones.
    """
    used = {*wanted, *feeds}
    found = []
    for step in reversed(steps):
        needed = tuple([key in used for key in step.writes])
        if step.kind == "ADD" or step.kind == "SUM":
            used.update(step.writes)
        elif step.share is not None:  # parameters may be gathered more than once: what was there before ended before
            used.difference_update(step.writes)
        ends = []
        for place, key in enumerate(step.reads):
            if key not in used:
                used.add(key)
                ends.append(place)
        found.append((tuple(ends), needed))
    return found


def _feeds(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller brings those."""
    made: set[Key] = set()
    feeds: dict[Key, int] = {}
    for step in steps:
        for key in step.reads:
            if key not in made and key not in feeds:
                feeds[key] = len(feeds)
        made.update(step.writes)
    for key in wanted:
        if key not in made and key not in feeds:
            feeds[key] = len(feeds)
    return feeds


class _Slots:
    def __init__(self, feeds: dict[Key, int]):
        self.where: dict[Key, int] = dict(feeds)
        self.size = len(feeds)
        self.spare: list[int] = []

    def put(self, key: Key, needed: bool) -> int:
        if key in self.where:
            return self.where[key]
        if not needed:
            return -1
        if self.spare:
            slot = self.spare.pop()
        else:
            slot, self.size = self.size, self.size + 1
        self.where[key] = slot
        return slot

    def free(self, key: Key) -> int:
        slot = self.where.pop(key)
        self.spare.append(slot)
        return slot
