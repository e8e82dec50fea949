"""The one loop that puts a schedule's actions into an order in which each finds what it needs.

``check`` asks whether there is such an order, ``simulate`` follows it with a clock, lowering follows it with sends
and receives. It knows the rule of dependence (``actions.RULE``) and nothing of time, placement or counts.

Facts are numbers here, because millions pass: fact ``(kind, stage, microbatch)`` is the index
``(kind * (stages + 2) + stage + 1) * microbatches + microbatch``. The two stages too many, one before the first and
one after the last, are where offsets that leave the model land; their facts are there from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import RULE, Action, Fact, Row
from .errors import ScheduleError

_KINDS = ("F", "I", "W")


@dataclass(frozen=True)
class Facts:
    """The numbering of facts for a count of stages and microbatches.

    ``table[op]`` is (offsets of what it needs, offsets of what it makes), to be added to :meth:`base`.
    """

    stages: int
    microbatches: int

    @property
    def size(self) -> int:
        """How many indices there are."""
        return len(_KINDS) * (self.stages + 2) * self.microbatches

    @property
    def table(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """RULE in these numbers."""

        def offset(kind: str, stage: int) -> int:
            return (_KINDS.index(kind) * (self.stages + 2) + stage + 1) * self.microbatches

        return {
            op: (tuple(offset(kind, by) for kind, by in asked), tuple(offset(kind, 0) for kind in made))
            for op, (made, asked) in RULE.items()
        }

    def fact(self, index: int) -> Fact:
        """The fact of an index.

        >>> Facts(stages=2, microbatches=4).fact(7)
        Fact(kind='F', stage=0, microbatch=3)
        """
        row, microbatch = divmod(index, self.microbatches)
        kind, stage = divmod(row, self.stages + 2)
        return Fact(_KINDS[kind], stage - 1, microbatch)  # type: ignore[arg-type]

    def beyond(self) -> Iterator[range]:
        """The indices of the stages before the first and after the last."""
        for kind in range(len(_KINDS)):
            for stage in (0, self.stages + 1):
                first = (kind * (self.stages + 2) + stage) * self.microbatches
                yield range(first, first + self.microbatches)


class Blocked(NamedTuple):
    """A rank that cannot go on: the position it stands at and the fact that its action there lacks."""

    rank: int
    position: int
    lacks: Fact


class Walk(NamedTuple):
    """``runs`` of (rank, start, stop), each positions that a rank runs without waiting; and who is ``blocked``."""

    runs: list[tuple[int, int, int]]
    blocked: tuple[Blocked, ...]

    @property
    def order(self) -> Iterator[tuple[int, int]]:
        """(rank, position) of every action that can run, each after all that it needs."""
        for rank, start, stop in self.runs:
            for position in range(start, stop):
                yield rank, position


def walk(rows: Sequence[Row], stages: int, microbatches: int) -> Walk:
    """Run every rank as far as it gets, again and again until all are done or all wait.

    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    >>> list(walk(rows, stages=2, microbatches=1).order)
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    facts = Facts(stages, microbatches)
    guard(rows, facts)
    there = bytearray(facts.size)
    for indices in facts.beyond():
        there[indices.start : indices.stop] = b"\1" * len(indices)
    table = facts.table
    at = [0] * len(rows)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(rows) - 1, -1, -1))
    runs: list[tuple[int, int, int]] = []
    lacks: dict[int, int] = {}
    while ready:
        rank = ready.pop()
        start = at[rank]
        position = start
        missing = -1
        for action in rows[rank][start:] if start else rows[rank]:
            missing = _step(action, table, microbatches, there, waiting, ready)
            if missing >= 0:
                break
            position += 1
        at[rank] = position
        if position > start:
            runs.append((rank, start, position))
        if missing >= 0:
            waiting.setdefault(missing, []).append(rank)
            lacks[rank] = missing
    return Walk(runs, tuple(Blocked(r, at[r], facts.fact(lacks[r])) for r in range(len(rows)) if at[r] < len(rows[r])))


def _step(action, table, microbatches, there, waiting, ready) -> int:
    for part in action.parts:
        needs, _ = table[part[1]]
        base = part[0] * microbatches + part[2]
        for offset in needs:
            if not there[base + offset]:
                return base + offset
    for part in action.parts:
        base = part[0] * microbatches + part[2]
        for offset in table[part[1]][1]:
            there[base + offset] = 1
            if base + offset in waiting:
                ready.extend(waiting.pop(base + offset))
    return -1


def guard(rows: Sequence[Row], facts: Facts) -> None:
    """Refuse numbers so far beyond the count of actions that a table of all facts would be mostly empty."""
    actions = sum(map(len, rows))
    if facts.size > 1_000_000 + 1_000 * actions:
        raise ScheduleError(
            f"{actions} actions cannot fill {facts.stages} stages and {facts.microbatches} microbatches; "
            "number both from 0 without gaps",
            rule="count",
        )
