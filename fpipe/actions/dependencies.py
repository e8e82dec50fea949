# SPDX-License-Identifier: Apache-2.0
"""What each action needs and provides, and an order of a schedule's actions in which each follows
what it needs.

Which action must come before which is stated in ``action_kinds.KINDS`` alone. The checker, the
simulator, the lowering, the pictures and the tests read it by ``rule.needs`` and ``rule.provides``
or, for millions of actions, by the offsets that :class:`Facts` derives. Nothing here knows time,
placement or counts. Where microbatches have slices, what is said of microbatches here holds for
slices, counted through all microbatches.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from .action import Action, Row
from .action_kinds import FACTS, KINDS, FactKind
from .rule import Blocked, Fact, Walk

_FACTS = tuple(FACTS)


@dataclass(frozen=True)
class Facts:
    """The facts of so many stages and microbatches, numbered by integers.

    A fact has the index ``(kind * (stages + 2) + stage + 1) * microbatches + microbatch``. The two
    extra stages, one before the first and one after the last, are the targets of offsets that leave
    the model; their facts are present from the start.
    """

    stages: int
    microbatches: int

    @property
    def size(self) -> int:
        """The number of indices."""
        return len(_FACTS) * (self.stages + 2) * self.microbatches

    @property
    def table(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """op -> (offsets of what it needs, offsets of what it provides).

        An offset is added to ``stage * microbatches + microbatch`` of the action.
        """

        def offset(kind: FactKind, by: int = 0) -> int:
            return (_FACTS.index(kind) * (self.stages + 2) + by + 1) * self.microbatches

        return {
            op: (
                tuple(offset(fact, by) for fact, by in kind.needs),
                tuple(map(offset, kind.provides)),
            )
            for op, kind in KINDS.items()
        }

    def fact(self, index: int) -> Fact:
        """The fact of an index.

        >>> Facts(stages=2, microbatches=4).fact(7)
        Fact(kind='F', stage=0, microbatch=3)
        """
        row, microbatch = divmod(index, self.microbatches)
        kind, stage = divmod(row, self.stages + 2)
        return Fact(_FACTS[kind], stage - 1, microbatch)

    def at_first(self) -> bytearray:
        """1 for every fact that is present before any action runs: those beyond the ends of the
        model.
        """
        edge = b"\1" * self.microbatches
        inside = bytes(self.stages * self.microbatches)
        return bytearray((edge + inside + edge) * len(_FACTS))


def walk(rows: Sequence[Row], stages: int, microbatches: int, *, ordered: bool = False) -> Walk:
    """Run every rank as far as possible, in turns, until all have ended or all wait.

    The stages and microbatches in the rows must be in range and no action occur twice (see
    ``check.inspect_rows``). ``ordered`` says that every action stands behind those of its own stage
    that it needs, and that none is fused: then only facts of other stages are looked for.

    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    >>> list(walk(rows, stages=2, microbatches=1).order)
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    facts = Facts(stages, microbatches)
    present = facts.at_first() + b"\1"
    run = _run_ordered if ordered else _run
    ranks = [run(cast(Any, row), facts, present) for row in rows]
    reached, lacking = [0] * len(rows), [facts.size] * len(rows)  # that one is always present
    runs, turn, moved = list[int](), range(len(rows)), True  # an array grows slower
    while moved:
        moved = False
        for rank in turn:
            if not present[lacking[rank]]:
                continue
            start = reached[rank]
            stop, lacking[rank] = next(ranks[rank], (start, facts.size))
            if stop > start:
                runs += (rank, start, stop)
                reached[rank], moved = stop, True
        turn = turn[::-1]  # forwards go down the ranks, backwards up
    blocked = (
        Blocked(rank, reached[rank], facts.fact(lacks))
        for rank, lacks in enumerate(lacking)
        if not present[lacks]
    )
    return Walk(array("q", runs), tuple(blocked))


def _run(row: Row, facts: Facts, present: bytearray) -> Iterator[tuple[int, int]]:
    """Run a row: where it has to wait, yield the position and the fact that it lacks; at last its
    length and a number that is present.
    """
    table = facts.table
    microbatches = facts.microbatches
    for position, action in enumerate(row):
        parts = [(stage * microbatches + at, *table[op]) for stage, op, at in action.parts]
        for at, needed, _ in parts:
            for offset in needed:
                while not present[at + offset]:
                    yield position, at + offset
        for at, _, provided in parts:
            for offset in provided:
                present[at + offset] = 1
    yield len(row), facts.size


def _run_ordered(
    row: Sequence[Action], facts: Facts, present: bytearray
) -> Iterator[tuple[int, int]]:
    """The same where each action needs the last fact of its rule alone, and only the first that it
    provides counts.
    """
    offsets = {op: (needed[-1], provided[0]) for op, (needed, provided) in facts.table.items()}
    microbatches = facts.microbatches
    for position, (stage, op, microbatch) in enumerate(row):
        at = stage * microbatches + microbatch
        need, give = offsets[op]
        while not present[at + need]:
            yield position, at + need
        present[at + give] = 1
    yield len(row), facts.size


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, for what creates many objects and no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
