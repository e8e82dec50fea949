# SPDX-License-Identifier: Apache-2.0
"""The digests that the ranks of one host announce before each call, in memory that they share.

Each rank writes its digests into its memory, alternately to two places, and then how many it has
written. A rank ends a call only when every rank has begun it, so no rank is more than one call
ahead and two places are enough. This module must not know calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

#: Numbers of 64 bits of one rank: two digests, and how many were written.
NUMBERS = 3
_COUNT = 2
_PAUSE = 1e-4  #: seconds between two looks


class Board(NamedTuple):
    """An exchange of digests. ``others`` are those of the other ranks, ``reason`` says why a rank
    will not write.

    >>> first, second = (memoryview(bytearray(8 * NUMBERS)).cast("Q") for _ in range(2))
    >>> board = Board(first, {1: second}, lambda rank: "")
    >>> board.start(0, 7); board.equal(0, 7), board.missing(0)
    (None, 1)
    >>> Board(second, {0: first}, lambda rank: "").start(0, 8)
    >>> board.equal(0, 7), board.missing(0)
    (False, None)
    """

    digests: memoryview
    others: Mapping[int, memoryview]
    reason: Callable[[int], str]
    poll: float = 0.0  # seconds to look again and again before the first pause

    def start(self, number: int, digest: int) -> None:
        """Write the digest, and then the number of digests."""
        self.digests[number & 1] = digest
        self.digests[_COUNT] = number + 1

    def equal(self, number: int, digest: int) -> bool | None:
        """Whether every rank has written this digest; None while one has not written."""
        place, others = number & 1, self.others.values()
        if all(view[place] == digest for view in others):
            return True
        # a digest is written before its count, so it is read after it
        if any(view[_COUNT] > number and view[place] != digest for view in others):
            return False
        return None

    def missing(self, number: int) -> int | None:
        """The first rank that has not written."""
        return next((rank for rank, view in self.others.items() if view[_COUNT] <= number), None)

    def pause(self) -> None:
        """Sleep between two looks."""
        time.sleep(_PAUSE)

    def gone(self, number: int) -> str:
        """Why a rank that has not written will not."""
        missing = self.missing(number)
        return "" if missing is None else self.reason(missing)
