# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank, which the others open: lanes of messages, and the calls that it announces.

Before each call a rank writes its digest, alternately to two places, and then how many it has
written. A rank ends a call only when every rank has begun it, so no rank is more than one call
ahead and two places are enough. This module must not know calls.
"""

from __future__ import annotations

import mmap
import os
import select
import time
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from . import _native
from .lane import LANE, PAGE

_ENDED = slice(64, 68)  #: of the first page: not 0 once the rank has failed
#: Of the same page, numbers of 64 bits: the digests of two calls, and how many were written.
_DIGESTS = slice(128, 152)
_COUNT = 2
LANES = 4  #: from one rank to another
_PAUSE = 1e-4  #: seconds between two looks


class Outbox:
    """The memory of a rank, as the rank itself or another one has it open: a file of some bytes."""

    def __init__(self, file: int, size: int):
        self.file = file
        weakref.finalize(self, os.close, file)
        _native.check_memory_file(file, size)
        view = memoryview(mmap.mmap(file, PAGE))
        self.ended = view[_ENDED].cast("I")
        self.digests = view[_DIGESTS].cast("Q")

    def announce(self, number: int, digest: int) -> None:
        """Write the digest of a call."""
        digests = self.digests
        digests[number & 1] = digest
        digests[_COUNT] = number + 1

    def lane(self, dst: int, kind: int) -> mmap.mmap:
        """The memory of a lane to a rank."""
        return mmap.mmap(self.file, LANE, offset=PAGE + (LANES * dst + kind) * LANE)


class Peer(Outbox):
    """The outbox of another rank, by its process and file descriptor, and whether the process
    exists.
    """

    def __init__(self, process: int, file: int, size: int):
        super().__init__(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC), size)
        exists = os.pidfd_open(process)
        weakref.finalize(self, os.close, exists)
        self._poll = select.poll()
        self._poll.register(exists, select.POLLIN)

    def gone(self) -> str:
        """Why no further message will arrive; empty while one may."""
        if self.ended[0]:
            return "it failed, and ended its messages"
        if self._poll.poll(0):
            return "its process has ended"
        return ""


class Board(NamedTuple):
    """The digests of a call: of this rank, and as the ``others`` announce them.

    ``poll``: seconds to look again and again before the first pause.
    """

    number: int
    digest: int
    others: Mapping[int, Peer]
    poll: float

    def equal(self) -> bool | None:
        """Whether the digests of all ranks are equal; None while one is missing. Never blocks."""
        place = self.number & 1
        boards = [peer.digests for peer in self.others.values()]
        if all(digests[place] == self.digest for digests in boards):
            return True
        # a digest is written before its count, so it is read after it
        if any(d[_COUNT] > self.number and d[place] != self.digest for d in boards):
            return False
        return None

    def missing(self) -> int | None:
        """The first rank that has not written."""
        late = (rank for rank, peer in self.others.items() if peer.digests[_COUNT] <= self.number)
        return next(late, None)

    def pause(self) -> None:
        """Sleep between two looks."""
        time.sleep(_PAUSE)

    def gone(self) -> str:
        """Why a rank that has not written will not."""
        missing = self.missing()
        return "" if missing is None else self.others[missing].gone()
