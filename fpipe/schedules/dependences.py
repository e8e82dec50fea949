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

from .actions import RULE, Action, AnyAction, Fact, Row

_KINDS = ("F", "I", "W")


@dataclass(frozen=True)
class Facts:
    """The numbering of facts for a count of stages and microbatches.

    ``table[op]`` is (offsets of what it needs, offsets of what it makes); to be added to what an action's stage and
    microbatch come to, ``stage * microbatches + microbatch``.
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

    def at_first(self) -> bytearray:
        """1 for every fact that is there before anything ran: those beyond the model's ends."""
        edge, inside = b"\1" * self.microbatches, bytes(self.stages * self.microbatches)
        return bytearray((edge + inside + edge) * len(_KINDS))


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

    The numbers in the rows must be in range and no action there twice, as ``check.check_cells`` makes sure.

    >>> from fpipe.schedules.actions import Action
    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    >>> list(walk(rows, stages=2, microbatches=1).order)
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    facts = Facts(stages, microbatches)
    there, table = facts.at_first(), facts.table
    at = [0] * len(rows)
    runs: list[tuple[int, int, int]] = []
    waiting: dict[int, list[int]] = {}  # fact -> the ranks that can go on once it is there
    ready = list(range(len(rows) - 1, -1, -1))

    def run(action: AnyAction) -> int:
        """Run the action and return -1, or return a fact that it lacks."""
        parts = (action,) if isinstance(action, Action) else action.parts  # the property of a plain action costs a call
        for stage, op, microbatch in parts:
            base = stage * microbatches + microbatch
            for need in table[op][0]:
                if not there[base + need]:
                    return base + need
        for stage, op, microbatch in parts:
            base = stage * microbatches + microbatch
            for made in table[op][1]:
                there[base + made] = 1
                if base + made in waiting:
                    ready.extend(waiting.pop(base + made))
        return -1

    while ready:
        rank = ready.pop()
        row, start, stop = rows[rank], at[rank], len(rows[rank])
        for position in range(start, stop):
            lacks = run(row[position])
            if lacks >= 0:
                waiting.setdefault(lacks, []).append(rank)
                stop = position
                break
        at[rank] = stop
        if stop > start:
            runs.append((rank, start, stop))
    blocked = sorted((rank, at[rank], facts.fact(fact)) for fact, ranks in waiting.items() for rank in ranks)
    return Walk(runs, tuple(Blocked(*who) for who in blocked))
