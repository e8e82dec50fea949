# SPDX-License-Identifier: Apache-2.0
"""From a string of letters to a row of actions.

A rank's row is a pattern: ``"FFBFBB"`` is two forwards, a backward, and so on. Each letter has a
tape: an iterator over its actions. :func:`deal` takes, for each letter of the pattern, the next
    action of its tape. Capital letters are a
rank's first chunk, small ones its second.

This file knows letters and tapes. It knows no particular schedule and no dependencies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, repeat
from typing import TypeAlias

from ..actions.action import Action, AnyAction, Fused, Row, Slice, joined
from ..actions.action_kinds import Op
from ..actions.placement import Placement
from ..errors import ScheduleError
from ..schedule import Schedule

Tape: TypeAlias = Iterator[AnyAction]


def tape(stage: int | Iterable[int], op: Op, microbatches: Iterable[int]) -> Iterator[Action]:
    """The actions ``op`` of a stage (or of one stage each) on microbatches.

    >>> list(tape(3, "F", range(2)))
    [3F0, 3F1]
    """
    stages = repeat(stage) if isinstance(stage, int) else stage
    return map(
        tuple.__new__, repeat(Action), zip(stages, repeat(op), microbatches, strict=False)
    )  # Action, in C


def tapes(
    stage: int, microbatches: int, *, small: bool = False, slices: int = 1
) -> dict[str, Tape]:
    """One tape an op, each counting its own microbatches from 0, and X, which fuses the next F and
    B.

    Slices of a microbatch go forwards in order, and backwards from the last one.

    >>> deal("FFBFBB", tapes(0, 3)), deal("FXB", tapes(0, 2))
    ((0F0, 0F1, 0B0, 0F2, 0B1, 0B2), (0F0, (0F1;0B0)OVERLAP_F_B, 0B1))
    """
    ops: Sequence[Op] = ("F", "B", "I", "W")

    def way(op):
        return range(slices) if op == "F" else range(slices - 1, -1, -1)

    def order(op):
        return (
            _numbers(microbatches)
            if slices == 1
            else (Slice(m, s, slices) for m in range(microbatches) for s in way(op))
        )

    by_op = {op: tape(stage, op, order(op)) for op in ops}
    by_letter: dict[str, Tape] = {**by_op, "X": fused(by_op["F"], by_op["B"])}
    return {letter.lower() if small else letter: tape for letter, tape in by_letter.items()}


@lru_cache(maxsize=16)
def _numbers(microbatches: int) -> tuple[int, ...]:
    """The numbers of microbatches, one object each for all rows: a large schedule is read faster by
    a tenth.
    """
    return tuple(range(microbatches))


def fused(*sources: Iterable[Action]) -> Iterator[Fused]:
    """Actions fused of parts taken from these tapes.

    >>> f, b = tape(0, "F", range(2)), tape(3, "B", range(2))
    >>> deal("FXB", {"F": f, "X": fused(f, b), "B": b})
    (0F0, (0F1;3B0)OVERLAP_F_B, 3B1)
    """
    return map(Fused, zip(*sources, strict=False))


def queueing(inputs: Iterable[Action], queue: deque[Action]) -> Iterator[Action]:
    """``inputs`` (of I), each putting its W at the end of ``queue`` as it is dealt.

    >>> queue = deque()
    >>> deal("IIWW", {"I": queueing(tape(0, "I", range(2)), queue), "W": oldest(queue)})
    (0I0, 0I1, 0W0, 0W1)
    """
    for action in inputs:
        queue.append(Action(action.stage, "W", action.microbatch))
        yield action


def oldest(queue: deque[Action]) -> Iterator[Action]:
    """The tape of the actions of a queue, oldest first."""
    while True:
        yield queue.popleft()


def deal(pattern: Iterable[str], tapes: Mapping[str, Tape]) -> Row:
    """The row of ``pattern``."""
    return tuple([next(tapes[letter]) for letter in pattern])


def evenly(microbatches: range, parts: int) -> list[range]:
    """A range cut in parts as even as can be, the larger ones first.

    >>> evenly(range(8), 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    size, larger = divmod(len(microbatches), parts)
    cuts = [k * size + min(k, larger) for k in range(parts + 1)]
    return [microbatches[a:b] for a, b in pairwise(cuts)]


def keep(rows: Iterable[Row], drawn: int, microbatches: Sequence[int]) -> tuple[Row, ...]:
    """The rows of ``drawn`` microbatches with only these, numbered anew from 0; a fused action that
    loses parts keeps the others.

    Microbatches do not depend on each other, so a valid schedule without some of them is valid. A
    schedule built for many microbatches becomes one for few.

    >>> keep([deal("FFBB", tapes(0, 2))], 2, [1])
    ((0F0, 0B0),)
    """
    if len(microbatches) == drawn:
        return tuple(rows)
    number = {old: new for new, old in enumerate(microbatches)}

    def kept(action):
        return [
            p._replace(microbatch=number[p.microbatch])
            for p in action.parts
            if p.microbatch in number
        ]

    return tuple(tuple(map(joined, filter(None, map(kept, row)))) for row in rows)


def in_pairs(
    name: str,
    ranks: int,
    microbatches: int,
    make: Callable[[int, int], Sequence[Row]],
    other: str = "",
    *,
    stages: int | None = None,
) -> Schedule:
    """The schedule with two directions: ranks pair from both ends, and of an odd count of
    microbatches one more goes down than up. ``make(going_down, going_up)`` returns the rows for two
    ranks or more. ``other`` is another remedy for an odd count of ranks; ``stages``, one a rank by
    default, go down the ranks and up again.

    >>> in_pairs("DualPipe", 1, 1, lambda going_down, going_up: [])
    Schedule(DualPipe, ranks=1, microbatches=1, stages=1)
    """
    if ranks == 1:
        return one_a_rank(name, ["FB" * microbatches], microbatches, stages or 1)
    if ranks % 2:
        remedy = ", ".join(filter(None, (f"take {ranks - 1} or {ranks + 1}", other)))
        raise ScheduleError(
            f"{name} pairs ranks from both ends, and {ranks} ranks are odd; {remedy}", rule="ranks"
        )
    going_up = microbatches // 2
    rows = tuple(make(microbatches - going_up, going_up))
    up, per_rank = range(microbatches - going_up, microbatches), (stages or ranks) // ranks
    placement = Placement.bidirectional(ranks, microbatches, up, per_rank)
    return Schedule(rows, placement, microbatches, name)


def one_a_rank(
    name: str, patterns: Sequence[str], microbatches: int, stages: int, slices: int = 1
) -> Schedule:
    """The schedule of ranks that hold one chunk each: one pattern a rank, and stage ``r`` on rank
    ``r``.

    With more stages than ranks each rank holds as many neighbours, run one after another as if they
    were one.

    >>> print(one_a_rank("1F1B", ["FFBB", "FBFB"], microbatches=2, stages=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    """
    rows = tuple(
        deal(pattern, tapes(rank, microbatches, slices=slices))
        for rank, pattern in enumerate(patterns)
    )
    per_rank = stages // len(patterns)
    home = tuple(stage // per_rank for stage in range(stages))
    if per_rank > 1:
        rows = tuple(_spread(row, per_rank) for row in rows)
    return Schedule(rows, Placement((home,), len(patterns)), microbatches, name, slices=slices)


def _spread(row: Iterable[AnyAction], per_rank: int) -> Row:
    up, down = range(per_rank), range(per_rank - 1, -1, -1)
    return tuple(
        Action(part.stage * per_rank + step, part.op, part.microbatch)
        for action in row
        for part in action.parts
        for step in (up if part.op == "F" else down)
    )
