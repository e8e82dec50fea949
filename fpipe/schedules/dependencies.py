"""What each action needs and provides, and an order of a schedule's actions in which each follows what it needs.

This is the only file that knows which action must come before which: the table ``RULE``. The checker, the simulator,
the lowering, the pictures and the tests all read it, by :func:`needs` and :func:`provides` or, for millions of
actions, by the offsets that :class:`Facts` derives from it. It knows nothing of time, placement or counts.

In a walk facts are integers: fact ``(kind, stage, microbatch)`` is the index
``(kind * (stages + 2) + stage + 1) * microbatches + microbatch``. The two extra stages, one before the first and one
after the last, are the targets of offsets that leave the model; their facts are present from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .actions import Action, AnyAction, Row

#: op -> (facts it makes, facts it needs). A fact is (kind, stage offset): F "the output is there", I "the input's
#: gradient is there", W "the parameters' gradient is there". An offset that leaves the model asks for nothing.
RULE: dict[str, tuple[tuple[str, ...], tuple[tuple[str, int], ...]]] = {
    "F": (("F",), (("F", -1),)),
    "I": (("I",), (("F", 0), ("I", +1))),
    "W": (("W",), (("I", 0),)),
    "B": (("I", "W"), (("F", 0), ("I", +1))),
}


class Fact(NamedTuple):
    """Something an action makes and others need: output (F), input gradient (I) or weight gradient (W)."""

    kind: Literal["F", "I", "W"]
    stage: int
    microbatch: int


def provides(action: Action) -> tuple[Fact, ...]:
    """The facts that ``action`` makes.

    >>> provides(Action(2, "B", 5))
    (Fact(kind='I', stage=2, microbatch=5), Fact(kind='W', stage=2, microbatch=5))
    """
    made, _ = RULE[action.op]
    return tuple(Fact(kind, action.stage, action.microbatch) for kind in made)  # type: ignore[arg-type]


def needs(action: Action, stages: int) -> tuple[Fact, ...]:
    """The facts that must be there before ``action`` can run, in a model of ``stages`` stages.

    >>> needs(Action(2, "I", 5), stages=4)
    (Fact(kind='F', stage=2, microbatch=5), Fact(kind='I', stage=3, microbatch=5))
    >>> needs(Action(0, "F", 5), stages=4)
    ()
    """
    _, asked = RULE[action.op]
    stage, mb = action.stage, action.microbatch
    return tuple(Fact(k, stage + d, mb) for k, d in asked if 0 <= stage + d < stages)  # type: ignore[arg-type]


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
