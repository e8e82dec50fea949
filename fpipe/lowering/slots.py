# SPDX-License-Identifier: Apache-2.0
"""Register allocation: instructions over keys become instructions over slots.

A slot is reused after the last use of its value; a program takes values that it uses last out of
their slots, so that they can be freed inside it. Knows one rank and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .instruction import Instruction
from .job import LoweringInput
from .keys import Key
from .plan import Plan, Use


def assign(
    job: LoweringInput, rank: int, keyed: Sequence[Instruction], split: int, wanted: Sequence[Key]
) -> Plan:
    """Assign slots to the instructions of a rank; ``wanted`` are the keys of its results."""
    feeds = _feeds(keyed, wanted)
    uses = tuple(reversed(list(_uses(keyed, wanted, feeds))))
    slots, spare, size = dict(feeds), list[int](), len(feeds)
    instructions = []
    for ins, (ends, needed) in zip(keyed, uses, strict=True):
        reads = tuple([slots[key] for key in ins.reads])
        for key, later in zip(ins.writes, needed, strict=True):
            if later and key not in slots:
                if not spare:
                    spare, size = [size], size + 1
                slots[key] = spare.pop()
        writes = tuple([slots.get(key, -1) for key in ins.writes])
        frees = tuple([slots.pop(ins.reads[place]) for place in ends])
        spare += frees
        instructions.append(Instruction(ins.op, ins.action, reads, writes, frees))
    results = {key: slots[key] for key in wanted if key in slots}
    row = job.schedule[rank]
    return Plan(
        rank, tuple(instructions), size, feeds, results, split, row, tuple(keyed), uses, job.wired
    )


def _uses(
    keyed: Sequence[Instruction], wanted: Sequence[Key], feeds: dict[Key, int]
) -> Iterator[Use]:
    """The use of each instruction, from the last one to the first."""
    used = {*wanted, *feeds}
    for step in reversed(keyed):
        needed = tuple([key in used for key in step.writes])
        if step.op.updates:
            used.update(step.writes)
        elif step.op.renews:
            used.difference_update(step.writes)
        ends = []
        for place, key in enumerate(step.reads):
            if key not in used:
                used.add(key)
                ends.append(place)
        yield tuple(ends), needed


def _feeds(keyed: Sequence[Instruction], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller passes these."""
    written: set[Key] = set()
    feeds: dict[Key, int] = {}
    for reads, writes in (*((ins.reads, ins.writes) for ins in keyed), (wanted, ())):
        for key in reads:
            if key not in written and key not in feeds:
                feeds[key] = len(feeds)
        written.update(writes)
    return feeds
