# SPDX-License-Identifier: Apache-2.0
"""Facts that actions need and provide, and an order of the actions of a schedule.

``action_kinds.KINDS`` alone states which action must come before which. The checker, the simulator,
the lowering, the pictures and the tests read it by ``rule.needs`` and ``rule.provides``. For
millions of actions they read the offsets of :class:`Facts`. Nothing here knows time, placement or
counts. Here "microbatch" means a slice, counted through all microbatches, if these have slices.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .action import Row
from .action_kinds import FACTS, KINDS, FactKind
from .rule import Blocked, Fact, Walk

_FACTS = tuple(FACTS)


@dataclass(frozen=True)
class Facts:
    """The facts of these stages and microbatches, numbered by integers.

    A fact has the index ``(kind * (stages + 2) + stage + 1) * microbatches + microbatch``. Two
    stages are extra, one before the first and one after the last. An offset may lead to them. Their
    facts are present from the start.
    """

    stages: int
    microbatches: int

    @property
    def size(self) -> int:
        """The number of facts."""
        return len(_FACTS) * (self.stages + 2) * self.microbatches

    @property
    def table(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """op -> (offsets of the facts that it needs, offsets of those that it provides).

        The index of a fact is an offset plus ``stage * microbatches + microbatch`` of the action.
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

    def initial(self) -> bytearray:
        """For each fact whether it is present before any action runs: 1 for the extra stages."""
        edge = b"\1" * self.microbatches
        inside = bytes(self.stages * self.microbatches)
        return bytearray((edge + inside + edge) * len(_FACTS))


def walk(rows: Sequence[Row], stages: int, microbatches: int) -> Walk:
    """Run every rank as far as possible, in turns, until all have ended or all wait.

    Stages and microbatches must be in range, and no action may occur twice (``check.inspect_rows``
    checks this).

    >>> from fpipe.actions.action import Action
    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    >>> list(walk(rows, stages=2, microbatches=1).order)
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    facts = Facts(stages, microbatches)
    # One byte behind the last fact is always 1. A rank that waits for nothing refers to it.
    present = facts.initial() + b"\1"
    ranks = [_run(row, facts, present) for row in rows]
    reached = [0] * len(rows)
    awaited = [facts.size] * len(rows)
    runs = list[int]()  # a list grows faster than an array
    turn = range(len(rows))
    moved = True
    while moved:
        moved = False
        for rank in turn:
            if not present[awaited[rank]]:
                continue
            start = reached[rank]
            stop, awaited[rank] = next(ranks[rank], (start, facts.size))
            if stop > start:
                runs += (rank, start, stop)
                reached[rank] = stop
                moved = True
        turn = turn[::-1]  # forwards go down the ranks, backwards up
    blocked = (
        Blocked(rank, reached[rank], facts.fact(fact))
        for rank, fact in enumerate(awaited)
        if not present[fact]
    )
    return Walk(array("q", runs), tuple(blocked))


def _run(row: Row, facts: Facts, present: bytearray) -> Iterator[tuple[int, int]]:
    """Run a row. Where it must wait, yield the position and the fact that is missing. At the end,
    yield the length of the row and the index that is always present.
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, around code that creates many objects and no cycles of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
