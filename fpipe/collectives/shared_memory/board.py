# SPDX-License-Identifier: Apache-2.0
"""The digests that the ranks of one host announce before each call, in memory that they share.

Each rank writes its digests into its memory, alternately to two places, and then how many it has
written. A rank ends a call only when every rank has begun it, so no rank is more than one call
ahead and two places are enough. This module must not know calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Numbers of 64 bits of one rank: two digests, and how many were written.
NUMBERS = 3
_COUNT = 2
_PAUSE = 1e-4  #: seconds between two looks


@dataclass
class Board:
    """The ``digests`` of this rank, and those of the ``others``; ``reason`` says why a rank will
    not write.

    ``poll``: seconds to look again and again before the first pause.

    >>> first, second = (memoryview(bytearray(8 * NUMBERS)).cast("Q") for _ in range(2))
    >>> board = Board(first, {1: second}, lambda rank: "", 0.0)
    >>> board.announce(0, 7)
    >>> board.equal(), board.missing()
    (None, 1)
    >>> Board(second, {0: first}, lambda rank: "", 0.0).announce(0, 8)
    >>> board.equal(), board.missing()
    (False, None)
    """

    digests: memoryview
    others: Mapping[int, memoryview]
    reason: Callable[[int], str]
    poll: float
    number: int = -1
    digest: int = 0

    def announce(self, number: int, digest: int) -> None:
        """Write the digest of the next call."""
        self.number, self.digest = number, digest
        self.digests[number & 1] = digest
        self.digests[_COUNT] = number + 1

    def equal(self) -> bool | None:
        """Whether the digests of all ranks are equal; None while one is missing. Never blocks."""
        place = self.number & 1
        others = self.others.values()
        if all(view[place] == self.digest for view in others):
            return True
        # a digest is written before its count, so it is read after it
        if any(view[_COUNT] > self.number and view[place] != self.digest for view in others):
            return False
        return None

    def missing(self) -> int | None:
        """The first rank that has not written."""
        late = (rank for rank, view in self.others.items() if view[_COUNT] <= self.number)
        return next(late, None)

    def pause(self) -> None:
        """Sleep between two looks."""
        time.sleep(_PAUSE)

    def gone(self) -> str:
        """Why a rank that has not written will not."""
        missing = self.missing()
        if missing is None:
            return ""
        return self.reason(missing)
