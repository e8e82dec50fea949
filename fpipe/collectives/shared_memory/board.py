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
    """The digests of a call on the boards of the ``others``; ``reason`` says why a rank will not
    write.
    """

    number: int
    digest: int
    others: Mapping[int, memoryview]
    reason: Callable[[int], str]
    poll: float  # seconds to look again and again before the first pause

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


def board(
    digests: memoryview,
    others: Mapping[int, memoryview],
    reason: Callable[[int], str],
    poll: float = 0.0,
) -> Callable[[int, int], Board]:
    """The exchange through memory: this rank writes its ``digests``.

    >>> first, second = (memoryview(bytearray(8 * NUMBERS)).cast("Q") for _ in range(2))
    >>> compared = board(first, {1: second}, lambda rank: "")(0, 7)
    >>> compared.equal(), compared.missing()
    (None, 1)
    >>> _ = board(second, {0: first}, lambda rank: "")(0, 8)
    >>> compared.equal(), compared.missing()
    (False, None)
    """

    def write(number: int, digest: int) -> Board:
        digests[number & 1] = digest
        digests[_COUNT] = number + 1
        return Board(number, digest, others, reason, poll)

    return write
