# SPDX-License-Identifier: Apache-2.0
"""A schedule of few microbatches becomes one of many: its middle is repeated, so that time does not
grow with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...generators.problem import Rows


def extended(rows: Rows, more: int) -> Iterator[Rows]:
    """The same rows with ``more`` microbatches, the likeliest first; none where a rank has no
    period in its middle.

    A period of a rank runs each of its actions once, from after the last backward of a microbatch
    to that of the next. First the one of the same microbatch is repeated on all ranks, then on each
    rank the one that occurs most.

    >>> print(*extended([[(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1), (1, 0, 2)]],
    ...     more=1))
    [[(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1), (0, 0, 3), (1, 0, 2), (1, 0, 3)]]
    """
    letters = [[(op, s) for op, s, _ in row] for row in rows]
    for choice in periods_of(rows):
        yield [_repeated(row, *place, more) for row, place in zip(letters, choice, strict=True)]


def periods_of(rows: Rows) -> list[list[tuple[int, int]]]:
    """Choices of a period for each rank, the likeliest first: where it begins and ends in the
    rank's row.

    >>> periods_of([[(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1), (1, 0, 2)]])
    [[(3, 5)]]
    """
    letters = [[(op, s) for op, s, _ in row] for row in rows]
    periods = [_periods(row) for row in letters]
    common = sorted(set.intersection(*map(set, periods)))
    middle = len(common) // 2
    choices = [[places[index] for places in periods] for index in common[middle : middle + 3]]
    if all(periods):
        choices.append([_usual(row, places) for row, places in zip(letters, periods, strict=True)])
    return [choice for at, choice in enumerate(choices) if choice not in choices[:at]]


def _repeated(
    letters: Sequence[tuple[int, int]], start: int, stop: int, more: int
) -> list[tuple[int, int, int]]:
    counts: Counter[tuple[int, int]] = Counter()
    longer = []
    for letter in (*letters[:stop], *list(letters[start:stop]) * more, *letters[stop:]):
        longer.append((*letter, counts[letter]))
        counts[letter] += 1
    return longer


def _periods(letters: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """By microbatch, where a period begins and ends."""
    kinds = set(letters)
    last = min(letter for letter in kinds if letter[0] == 1)
    ends = [at + 1 for at, letter in enumerate(letters) if letter == last]
    return {
        index: (start, stop)
        for index, (start, stop) in enumerate(pairwise(ends))
        if stop - start == len(kinds) and set(letters[start:stop]) == kinds
    }


def _usual(
    letters: Sequence[tuple[int, int]], periods: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """A period of the kind that occurs most, in the middle of them."""
    kinds: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for start, stop in periods.values():
        kinds.setdefault(tuple(letters[start:stop]), []).append((start, stop))
    most = max(kinds.values(), key=len)
    return most[len(most) // 2]
