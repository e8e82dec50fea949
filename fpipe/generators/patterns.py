# SPDX-License-Identifier: Apache-2.0
"""From a string of letters to a row of actions.

The row of a rank is a pattern: ``"FFBFBB"`` is two forwards, a backward, and so on. Each letter has
a tape, which is a row of actions of one op. :func:`row_of` takes, for each letter of the pattern,
the next action of its tape. Capital letters are the first chunk of a rank, small ones its second.

This file knows letters and tapes. It knows no particular schedule and no dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import repeat
from typing import TypeAlias, get_args

from ..actions.action import LARGE, Action, Fused, Placement, Row, joined
from ..actions.action_kinds import Op

#: The actions of one op on microbatches, of one stage or of a stage for each microbatch.
Tape: TypeAlias = tuple[int | Iterable[int], Op, Iterable[int]]
#: What a generator makes of counts: a row of actions for each rank, and the ranks of stages.
Made: TypeAlias = tuple[Sequence[Row], Placement]


def actions(stage: int | Iterable[int], op: Op, microbatches: Iterable[int]) -> Iterator[Action]:
    """The actions of a tape.

    >>> list(actions(3, "F", range(2)))
    [3F0, 3F1]
    """
    stages = repeat(stage) if isinstance(stage, int) else stage
    fields = zip(stages, repeat(op), microbatches, strict=False)
    return map(tuple.__new__, repeat(Action), fields)  # a faster Action(*fields)


def tapes(stage: int, microbatches: int, *, small: bool = False) -> dict[str, Tape]:
    """The tapes of a stage: one for each op, on all microbatches. ``small`` gives small letters.

    >>> row_of("FFBFBB", tapes(0, 3))
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)
    """
    return {op.lower() if small else op: (stage, op, range(microbatches)) for op in get_args(Op)}


def fused(*sources: Iterable[Action]) -> Iterator[Fused]:
    """Fused actions, each of the next action of every source.

    >>> f, b = actions(0, "F", range(2)), actions(3, "B", range(2))
    >>> next(f), list(fused(f, b))
    (0F0, [(0F1;3B0)OVERLAP_F_B])
    """
    return map(Fused, zip(*sources, strict=False))


def row_of(pattern: str, tapes: Mapping[str, Tape]) -> Row:
    """The row of a pattern: for each letter the next action of its tape."""
    sources = {letter: actions(*tape) for letter, tape in tapes.items()}
    return tuple([next(sources[letter]) for letter in pattern])


def rows_of(rows: Sequence[tuple[str, Mapping[str, Tape]]]) -> Sequence[Row]:
    """The rows of patterns and their tapes. Those of a large schedule are made when they are read.

    >>> rows_of([("FB", tapes(0, 1)), ("FB", tapes(1, 1))])
    [(0F0, 0B0), (1F0, 1B0)]
    """
    if sum(len(pattern) for pattern, _ in rows) < LARGE:
        return [row_of(*row) for row in rows]
    return import_module("fpipe.actions.columns").Columns.of_patterns(rows)


def two_chunks(patterns: Sequence[str], microbatches: int) -> Sequence[Row]:
    """The rows of a V: the second chunk of a rank, in small letters, is as far from the last stage
    as its first chunk is from stage 0.

    >>> two_chunks(["FfbB"], 1)
    [(0F0, 1F0, 1B0, 0B0)]
    """
    last = 2 * len(patterns) - 1
    rows = [
        (pattern, tapes(rank, microbatches) | tapes(last - rank, microbatches, small=True))
        for rank, pattern in enumerate(patterns)
    ]
    return rows_of(rows)


def keep_microbatches(
    rows: Sequence[Row], made_for: int, microbatches: Sequence[int]
) -> Sequence[Row]:
    """Rows for ``made_for`` microbatches without all but these, which are numbered from 0 again.

    A schedule for many microbatches becomes one for few. It stays valid, because microbatches do
    not depend on each other. A fused action that loses parts keeps the others.

    >>> keep_microbatches([row_of("FFBB", tapes(0, 2))], 2, [1])
    [(0F0, 0B0)]
    """
    if len(microbatches) == made_for:
        return rows
    number = {old: new for new, old in enumerate(microbatches)}

    def kept_parts(action):
        return [
            part._replace(microbatch=number[part.microbatch])
            for part in action.parts
            if part.microbatch in number
        ]

    return [tuple(map(joined, filter(None, map(kept_parts, row)))) for row in rows]
