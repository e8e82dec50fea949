# SPDX-License-Identifier: Apache-2.0
"""From a string of letters to a row of actions.

A rank's row is a pattern: ``"FFBFBB"`` is two forwards, a backward, and so on. Each letter has a
tape: an iterator over its actions. :func:`deal` takes, for each letter of the pattern, the next
action of its tape. Capital letters are a rank's first chunk, small ones its second.

This file knows letters and tapes. It knows no particular schedule and no dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TypeAlias

from ..actions.action import Action, AnyAction, Fused, Row, joined
from ..actions.action_kinds import Op
from ..actions.unit import Slice

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


def deal(pattern: Iterable[str], tapes: Mapping[str, Tape]) -> Row:
    """The row of ``pattern``."""
    return tuple([next(tapes[letter]) for letter in pattern])


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
