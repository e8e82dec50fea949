# SPDX-License-Identifier: Apache-2.0
"""The words that the ranks of one host announce before each call, in memory that they share.

Each rank writes its words into its own memory, alternately to two places, and then how many it has
written. A rank ends a call only when every rank has begun it, so no rank is more than one call
ahead and two places are enough. This module must not know calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: Words of 64 bits of one rank: two places, and the number of words written.
WORDS = 3
_COUNT = 2
_LATER = 0.01  #: seconds of waiting after which a rank looks less often


class Board:
    """An exchange of words. ``others`` are the words of the other ranks, ``gone`` says why a rank
    will not write.

    >>> first, second = (memoryview(bytearray(8 * WORDS)).cast("Q") for _ in range(2))
    >>> board = Board(first, {1: second}, lambda rank: "", 0.0)
    >>> board.start(0, 7); board.equal(0, 7), board.missing(0)
    (None, 1)
    >>> Board(second, {0: first}, lambda rank: "", 0.0).start(0, 8); board.equal(0,
    ...     7), board.missing(0)
    (False, None)
    """

    def __init__(
        self,
        words: memoryview,
        others: Mapping[int, memoryview],
        gone: Callable[[int], str],
        poll: float,
    ):
        self._words, self._others, self._gone, self._poll = words, others, gone, poll
        self._views = tuple(others.values())

    def start(self, number: int, word: int) -> None:
        """Write the word."""
        words = self._words
        words[number & 1] = word
        words[_COUNT] = number + 1

    def equal(self, number: int, word: int) -> bool | None:
        """Whether every rank has written this word; None while one has not written."""
        place = number & 1
        for view in self._views:
            if view[place] != word:
                break
        else:
            return True
        for view in self._views:  # a word is written before its count, so it is read after it
            if view[_COUNT] > number and view[place] != word:
                return False
        return None

    def missing(self, number: int) -> int | None:
        """The first rank that has not written."""
        return next((rank for rank, view in self._others.items() if view[_COUNT] <= number), None)

    def pause(self, number: int, waited: float) -> str:
        """Poll for a while, then sleep between two looks."""
        if waited >= self._poll:
            time.sleep(1e-4 if waited < _LATER else 1e-3)
        missing = self.missing(number) if waited > _LATER else None
        return "" if missing is None else self._gone(missing)
