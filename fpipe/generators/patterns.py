# SPDX-License-Identifier: Apache-2.0
"""From a string of letters to a row of actions.

The row of a rank is a pattern: ``"FFBFBB"`` is two forwards, a backward, and so on. Each letter has
a tape, which is an iterator over its actions. :func:`row_of` takes, for each letter of the pattern,
the next action of its tape. Capital letters are the first chunk of a rank, small ones its second.

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
    """The actions ``op`` on microbatches, of one stage or of a stage for each microbatch.

    >>> list(tape(3, "F", range(2)))
    [3F0, 3F1]
    """
    stages = repeat(stage) if isinstance(stage, int) else stage
    fields = zip(stages, repeat(op), microbatches, strict=False)
    return map(tuple.__new__, repeat(Action), fields)  # a faster Action(*fields)


def tapes(
    stage: int, microbatches: int, *, small: bool = False, slices: int = 1
) -> dict[str, Tape]:
    """The tapes of a stage: one for each op, on all microbatches, and X for the next F and B fused.

    F runs the slices of a microbatch in order, the others run them from the last one. ``small``
    gives small letters.

    >>> row_of("FFBFBB", tapes(0, 3)), row_of("FXB", tapes(0, 2))
    ((0F0, 0F1, 0B0, 0F2, 0B1, 0B2), (0F0, (0F1;0B0)OVERLAP_F_B, 0B1))
    """
    ops: Sequence[Op] = ("F", "B", "I", "W")

    def units(op):
        if slices == 1:
            return _numbers(microbatches)
        order = range(slices) if op == "F" else range(slices - 1, -1, -1)
        return (Slice(m, s, slices) for m in range(microbatches) for s in order)

    by_op = {op: tape(stage, op, units(op)) for op in ops}
    by_letter: dict[str, Tape] = {**by_op, "X": fused(by_op["F"], by_op["B"])}
    return {letter.lower() if small else letter: tape for letter, tape in by_letter.items()}


@lru_cache(maxsize=16)
def _numbers(microbatches: int) -> tuple[int, ...]:
    """The numbers of microbatches. All rows share these objects, which makes reading a large
    schedule faster by a tenth.
    """
    return tuple(range(microbatches))


def fused(*sources: Iterable[Action]) -> Iterator[Fused]:
    """Fused actions, each of the next action of every source.

    >>> f, b = tape(0, "F", range(2)), tape(3, "B", range(2))
    >>> row_of("FXB", {"F": f, "X": fused(f, b), "B": b})
    (0F0, (0F1;3B0)OVERLAP_F_B, 3B1)
    """
    return map(Fused, zip(*sources, strict=False))


def row_of(pattern: Iterable[str], tapes: Mapping[str, Tape]) -> Row:
    """The row of a pattern: for each letter the next action of its tape."""
    return tuple([next(tapes[letter]) for letter in pattern])


def keep_microbatches(
    rows: Iterable[Row], drawn: int, microbatches: Sequence[int]
) -> tuple[Row, ...]:
    """Rows for ``drawn`` microbatches without all but these, which are numbered from 0 again.

    A schedule for many microbatches becomes one for few. It stays valid, because microbatches do
    not depend on each other. A fused action that loses parts keeps the others.

    >>> keep_microbatches([row_of("FFBB", tapes(0, 2))], 2, [1])
    ((0F0, 0B0),)
    """
    if len(microbatches) == drawn:
        return tuple(rows)
    number = {old: new for new, old in enumerate(microbatches)}

    def kept_parts(action):
        return [
            part._replace(microbatch=number[part.microbatch])
            for part in action.parts
            if part.microbatch in number
        ]

    return tuple(tuple(map(joined, filter(None, map(kept_parts, row)))) for row in rows)
