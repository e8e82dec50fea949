"""Register allocation: steps over keys become instructions over slots, with frees, and every byte is counted.

A slot is given back at the last use of its value; a program takes the values that end with it out of their slots, so
that they can be freed inside. Bytes are counted by storage: two views of one tensor count once. Knows no ranks but its
own and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ledger import Ledger
from .plan import Instruction, Job, Plan, Step, spec_of
from .route import Key
from .stage import Aval

_PROGRAMS = frozenset("FBIW")


def assign(job: Job, rank: int, steps: Sequence[Step], split: int, wanted: Sequence[Key]) -> Plan:
    """Give out slots and count bytes."""
    last = _last_uses(steps, wanted)
    feeds = _feeds(steps, wanted)
    table = _Slots(feeds)
    ledger = Ledger(job.wired)
    instructions, curve = [], []
    for index, step in enumerate(steps):
        reads = tuple(map(table.where.__getitem__, step.reads))
        # a gradient is made by its first ADD and read by the later ones
        ends = [key for key in dict.fromkeys(step.reads) if last[key] == index and key not in feeds]
        during = ledger.run(step, ends) if step.kind in _PROGRAMS else ledger.other(step)
        writes = tuple(table.put(key, last.get(key, -1) > index) for key in step.writes if key is not None)
        for key in step.writes:
            if key is not None and last.get(key, -1) <= index:
                ledger.end(key)
        for key in ends:
            ledger.end(key)
        frees = tuple(table.free(key) for key in ends)
        curve.append(max(during, ledger.live))
        if step.kind != "ZERO" or writes:
            instructions.append(_instruction(step, reads, writes, frees))
    results = {key: table.where[key] for key in wanted if key in table.where}
    return Plan(rank, tuple(instructions), table.size, feeds, results, split, max(curve, default=0), tuple(curve))


def _instruction(
    step: Step, reads: tuple[int, ...], writes: tuple[int, ...], frees: tuple[int, ...]
) -> Instruction:  # fmt: skip
    specs = tuple(spec_of(a) if isinstance(a, Aval) else a for a in step.avals)
    return Instruction(step.kind, step.action, reads, writes, frees, step.program, step.peer, step.number, specs,
                       step.how)  # fmt: skip


def _last_uses(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    last: dict[Key, int] = {}
    for index, step in enumerate(steps):
        for key in step.reads:
            last[key] = index
        if step.kind in ("ADD", "SUM"):
            for key in step.writes:
                if key is not None:
                    last[key] = index
    for key in wanted:
        last[key] = len(steps)
    return last


def _feeds(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller brings those."""
    made: set[Key] = set()
    feeds: dict[Key, int] = {}
    for step in steps:
        for key in step.reads:
            if key not in made and key not in feeds:
                feeds[key] = len(feeds)
        made.update(key for key in step.writes if key is not None)
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
