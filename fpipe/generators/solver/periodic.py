# SPDX-License-Identifier: Apache-2.0
"""A schedule of few microbatches becomes one of many: its middle is repeated, so that time does not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .problem import Rows


def extended(rows: Rows, more: int) -> Rows | None:
    """The same rows with ``more`` microbatches; None where a rank has no period in its middle.

    A period of a rank runs each of its actions once, from after the last backward of a microbatch to that of the next.

    >>> extended([[(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1), (1, 0, 2)]], more=1)
    [[(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1), (0, 0, 3), (1, 0, 2), (1, 0, 3)]]
    """
    result: Rows = []
    for row in rows:
        letters = [(op, s) for op, s, _ in row]
        place = _period(letters)
        if place is None:
            return None
        start, stop = place
        letters[stop:stop] = letters[start:stop] * more
        counts: Counter[tuple[int, int]] = Counter()
        longer = []
        for letter in letters:
            longer.append((*letter, counts[letter]))
            counts[letter] += 1
        result.append(longer)
    return result


def _period(letters: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Where a period begins and ends: one of the kind that occurs most, in the middle of them."""
    kinds = set(letters)
    last = min(letter for letter in kinds if letter[0] == 1)
    ends = [at + 1 for at, letter in enumerate(letters) if letter == last]
    periods: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for index in range(len(ends) - 1):
        period = tuple(letters[ends[index] : ends[index + 1]])
        if len(period) == len(kinds) and set(period) == kinds:
            periods.setdefault(period, []).append(index)
    if not periods:
        return None
    indices = max(periods.values(), key=len)
    index = indices[len(indices) // 2]
    return ends[index], ends[index + 1]
