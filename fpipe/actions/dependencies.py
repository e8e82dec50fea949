# SPDX-License-Identifier: Apache-2.0
"""What each action needs and provides, and an order of a schedule's actions in which each follows
what it needs.

This is the only file that knows which action must come before which: the table ``RULE``. The
checker, the simulator, the lowering, the pictures and the tests all read it, by :func:`needs` and
:func:`provides` or, for millions of actions, by the offsets that :class:`Facts` derives from it. It
knows nothing of time, placement or counts. Where microbatches have slices, what is said of
microbatches here holds for slices, counted through all microbatches.

A walk numbers facts by integers: fact ``(kind, stage, microbatch)`` is the index
``(kind * (stages + 2) + stage + 1) * microbatches + microbatch``. The two extra stages, one before
the first and one after the last, are the targets of offsets that leave the model; their facts are
present from the start.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

from .action import Action, Row, Slice, unit

Kind: TypeAlias = Literal["F", "I", "W"]

#: op -> (facts it provides, facts it needs). A fact is (kind, stage offset): F an output, I the
#: gradient of an input, W the gradient of parameters. An offset that leaves the model needs
#: nothing. What other stages need is the first fact provided; what another stage provides is the
#: last one needed.
RULE: dict[str, tuple[tuple[Kind, ...], tuple[tuple[Kind, int], ...]]] = {
    "F": (("F",), (("F", -1),)),
    "I": (("I",), (("F", 0), ("I", +1))),
    "W": (("W",), (("I", 0),)),
    "B": (("I", "W"), (("F", 0), ("I", +1))),
}
_KINDS: tuple[Kind, ...] = ("F", "I", "W")


#: op -> what it needs besides of its own stage, where microbatches have slices: a fact and the
#: offset of the slice. The state of a sequence goes from each slice to the next, and its gradient
#: back. All slices of a microbatch are on one rank, so this concerns the order within a row alone.
SLICE_RULE: dict[str, tuple[Kind, int]] = {"F": ("F", -1), "I": ("I", +1), "B": ("I", +1)}


class Fact(NamedTuple):
    """What one action provides and others need: an output (F), an input's gradient (I) or the
    parameters' (W).
    """

    kind: Kind
    stage: int
    microbatch: int


def provides(action: Action) -> tuple[Fact, ...]:
    """The facts that ``action`` provides.

    >>> provides(Action(2, "B", 5))
    (Fact(kind='I', stage=2, microbatch=5), Fact(kind='W', stage=2, microbatch=5))
    """
    return tuple(Fact(kind, action.stage, action.microbatch) for kind in RULE[action.op][0])


def needs(action: Action, stages: int) -> tuple[Fact, ...]:
    """The facts that ``action`` needs before it can run, in a model of ``stages`` stages; without
    other slices.

    >>> needs(Action(2, "I", 5), stages=4)
    (Fact(kind='F', stage=2, microbatch=5), Fact(kind='I', stage=3, microbatch=5))
    >>> needs(Action(0, "F", 5), stages=4)
    ()
    """
    stage, mb = action.stage, action.microbatch
    return tuple(
        Fact(kind, stage + by, mb) for kind, by in RULE[action.op][1] if 0 <= stage + by < stages
    )


def needs_slice(action: Action) -> Fact | None:
    """The fact of another slice that ``action`` needs.

    >>> needs_slice(Action(2, "F", Slice(3, 1, of=2))), needs_slice(Action(2, "F", Slice(3, 0,
    ...     of=2)))
    (Fact(kind='F', stage=2, microbatch=3.0), None)
    """
    at = action.microbatch
    if not isinstance(at, Slice) or action.op not in SLICE_RULE:
        return None
    kind, by = SLICE_RULE[action.op]
    return Fact(kind, action.stage, unit(at + by, at.of)) if 0 <= at.slice + by < at.of else None


@dataclass(frozen=True)
class Facts:
    """The indices of facts for a count of stages and microbatches.

    ``table[op]`` is (offsets of what it needs, offsets of what it provides); an offset is added to
    ``stage * microbatches + microbatch`` of the action.
    """

    stages: int
    microbatches: int

    @property
    def size(self) -> int:
        """The number of indices."""
        return len(_KINDS) * (self.stages + 2) * self.microbatches

    @property
    def table(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """``RULE`` as offsets."""

        def offset(kind: Kind, by: int) -> int:
            return (_KINDS.index(kind) * (self.stages + 2) + by + 1) * self.microbatches

        return {
            op: (
                tuple(offset(kind, by) for kind, by in needed),
                tuple(offset(kind, 0) for kind in provided),
            )
            for op, (provided, needed) in RULE.items()
        }

    def fact(self, index: int) -> Fact:
        """The fact of an index.

        >>> Facts(stages=2, microbatches=4).fact(7)
        Fact(kind='F', stage=0, microbatch=3)
        """
        row, microbatch = divmod(index, self.microbatches)
        kind, stage = divmod(row, self.stages + 2)
        return Fact(_KINDS[kind], stage - 1, microbatch)

    def at_first(self) -> bytearray:
        """1 for every fact that is present before any action runs: those beyond the ends of the
        model.
        """
        edge, inside = b"\1" * self.microbatches, bytes(self.stages * self.microbatches)
        return bytearray((edge + inside + edge) * len(_KINDS))

    def provided(self, rows: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
        """(index, rank, position) of every fact that the rows provide."""
        table, microbatches = self.table, self.microbatches
        for rank, row in enumerate(rows):
            for position, action in enumerate(row):
                for stage, op, microbatch in action.parts:
                    for offset in table[op][1]:
                        yield stage * microbatches + microbatch + offset, rank, position


class Blocked(NamedTuple):
    """A rank that cannot continue: the position that it reached and the fact that its action there
    lacks.
    """

    rank: int
    position: int
    lacks: Fact


class Walk(NamedTuple):
    """``numbers`` holds three integers per run, and ``blocked`` the ranks that did not reach their
    end.
    """

    numbers: array[int]
    blocked: tuple[Blocked, ...]

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop): positions that a rank runs without waiting."""
        numbers = iter(self.numbers)
        return zip(numbers, numbers, numbers, strict=True)

    @property
    def order(self) -> Iterator[tuple[int, int]]:
        """(rank, position) of every action that can run, each after all that it needs."""
        return (
            (rank, position) for rank, start, stop in self.runs for position in range(start, stop)
        )


def walk(rows: Sequence[Row], stages: int, microbatches: int, *, ordered: bool = False) -> Walk:
    """Run every rank as far as possible, again and again until all have ended or all wait.

    The stages and microbatches in the rows must be in range and no action occur twice (see
    ``check.inspect_rows``). ``ordered`` says that every action stands behind those of its own stage
    that it needs, and that none is fused: then only facts of other stages are looked for.

    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    >>> list(walk(rows, stages=2, microbatches=1).order)
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    facts = Facts(stages, microbatches)
    if ordered:
        return _walk_ordered(cast(Sequence[tuple[Action, ...]], rows), facts)
    present, table = facts.at_first(), facts.table
    reached, runs = [0] * len(rows), array("q")
    waiting: dict[int, list[int]] = {}  # fact -> the ranks that wait for it
    ready = list(range(len(rows) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        start = reached[rank]
        for position in range(start, len(rows[rank])):
            action = rows[rank][position]
            parts = (
                (action,) if isinstance(action, Action) else action.parts
            )  # faster than the property of Action
            lacks = -1
            for stage, op, microbatch in parts:
                base = stage * microbatches + microbatch
                for offset in table[op][0]:
                    if not present[base + offset] and lacks < 0:
                        lacks = base + offset
            if lacks >= 0:
                waiting.setdefault(lacks, []).append(rank)
                break
            for stage, op, microbatch in parts:
                for offset in table[op][1]:
                    fact = stage * microbatches + microbatch + offset
                    present[fact] = 1
                    if fact in waiting:
                        ready.extend(waiting.pop(fact))
            reached[rank] = position + 1
        if reached[rank] > start:
            runs.extend((rank, start, reached[rank]))
    blocked = (
        Blocked(rank, reached[rank], facts.fact(fact))
        for fact, ranks in waiting.items()
        for rank in ranks
    )
    return Walk(runs, tuple(sorted(blocked)))


def _walk_ordered(rows: Sequence[tuple[Action, ...]], facts: Facts) -> Walk:
    """The walk where each action needs one fact, the last in ``RULE``, and only the first that it
    provides counts.
    """
    present, microbatches = facts.at_first(), facts.microbatches
    offsets = {op: (needed[-1], provided[0]) for op, (needed, provided) in facts.table.items()}
    rest = [enumerate(row) for row in rows]
    reached, runs = [0] * len(rows), list[int]()  # an array grows slower
    gives = [-1] * len(rows)  # by rank: what the action provides for which it waits
    waiting: dict[int, int] = {}  # fact -> the rank that waits for it: that of the next stage
    ready = list(range(len(rows) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        start, provided = reached[rank], gives[rank]
        if provided >= 0:
            present[provided] = 1
            if provided in waiting:
                ready.append(waiting.pop(provided))
        for position, (stage, op, microbatch) in rest[rank]:
            at = stage * microbatches + microbatch
            need, give = offsets[op]
            if not present[at + need]:
                waiting[at + need] = rank
                gives[rank], stop = at + give, position
                break
            at += give
            present[at] = 1
            if at in waiting:
                ready.append(waiting.pop(at))
        else:
            stop = len(rows[rank])
        if stop > start:
            runs += (rank, start, stop)
            reached[rank] = stop
    blocked = (Blocked(rank, reached[rank], facts.fact(fact)) for fact, rank in waiting.items())
    return Walk(array("q", runs), tuple(sorted(blocked)))
