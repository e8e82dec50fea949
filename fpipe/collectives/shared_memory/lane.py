# SPDX-License-Identifier: Apache-2.0
"""One lane of messages from a process to another of the same host, in memory that both have mapped.

The writer copies a message in and increments ``sent``. The reader copies it out and increments
``taken``. Each counter has one writer, so there are no locks. A message takes the first free range.
A note of each message records the range, and the header of the call that the message belongs to. An
empty lane starts again at its beginning, so that the memory in use stays in the cache. This module
must not know processes and backends.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ...errors import GroupError
from ..wire import aligned
from . import _native

PAGE = 4096
NOTES = 4096  #: messages that may be under way
AREA = 256 << 20  #: bytes that may be under way; only pages that were used take memory
_NOTES_AT = PAGE
_AREA_AT = PAGE + NOTES * 16
#: Bytes of address space of one lane.
LANE = _AREA_AT + AREA
LARGE = AREA // 4  #: larger messages are sent in several pieces
_MASK = 2**32 - 1
KEEP = 8 << 20  #: bytes of an area whose pages stay once they were used
#: how often a lane must be empty without having used more, before further pages are returned
QUIET = 64
_REMEDY = (
    "another program, or a stage that writes out of bounds, changed the memory of the job; end it"
)


class Piece(NamedTuple):
    """Bytes of one buffer that are copied at once, and the bytes that they take in the area."""

    buffer: int
    start: int
    bytes: int
    size: int


@lru_cache(maxsize=4096)
def pieces(sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of a message of buffers of these sizes; none of them needs most of the area.

    >>> pieces((4, 100))
    (Piece(buffer=0, start=0, bytes=4, size=64), Piece(buffer=1, start=0, bytes=100, size=128))
    >>> [piece.size // LARGE for piece in pieces((2 * LARGE,))]
    [1, 1]
    """
    places = (
        (buffer, start, min(LARGE, size - start))
        for buffer, size in enumerate(sizes)
        for start in range(0, size, LARGE)
    )
    return tuple(Piece(buffer, start, nbytes, aligned(nbytes)) for buffer, start, nbytes in places)


class _End:
    """One end of a lane: views of its counters (32 bits each) and notes, and the address of its
    area. ``head`` is a list of one number, the header of the current call.
    """

    def __init__(self, memory: mmap.mmap, head: list[int]):
        self.head = head  # added to the size in each note
        view = memoryview(memory)
        self.sent = view[0:4].cast("I")
        self.taken = view[64:68].cast("I")
        self.asleep = view[128:132].cast("I")  # whether the reader sleeps, or is about to
        # two numbers of each message: where it starts, and its bytes + head
        self.notes = view[_NOTES_AT : _NOTES_AT + 16 * NOTES].cast("Q")
        self.area = _native.address(memory, _AREA_AT)
        self.bell = _native.address(memory)  # of ``sent``
        self.count = 0  # pieces written, or read, at this end


class LaneWriter(_End):
    """The sender's end.

    >>> import torch
    >>> memory = mmap.mmap(-1, LANE)
    >>> writer, reader = LaneWriter(memory, [0]), LaneReader(memory, [0])
    >>> writer.write([torch.arange(3.)], pieces((12,)))
    True
    >>> tensor = torch.empty(3)
    >>> reader.has(), reader.read([tensor], pieces((12,))[0]), tensor
    (True, True, tensor([0., 1., 2.]))
    """

    def __init__(self, memory: mmap.mmap, head: list[int]):
        super().__init__(memory, head)
        self._memory = memory
        self._end = 0  # of the newest piece
        self._used = 0  # by large messages
        self._quiet = 0
        self.queued: deque[tuple[Sequence[Tensor], Piece]] = deque()  # pieces that did not fit yet

    def write(self, buffers: Sequence[Tensor], message: Sequence[Piece]) -> bool:
        """Copy a message in; False if some of it did not fit and is queued for :meth:`retry`."""
        self.queued.extend((buffers, piece) for piece in message)
        return self.retry()

    def retry(self) -> bool:
        """Write queued pieces that fit now; whether none is left."""
        while self.queued:
            if not self.put(*self.queued[0]):
                return False
            self.queued.popleft()
        return True

    def put(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        """Copy a piece in if it fits now; only where none is queued."""
        buffer, skip, nbytes, size = piece
        start = self._room(size)
        if start < 0:
            return False
        _native.copy(self.area + start, buffers[buffer].data_ptr() + skip, nbytes)
        count = self.count
        notes = self.notes
        note = 2 * (count % NOTES)
        notes[note] = start
        notes[note + 1] = size + self.head[0]
        self._end = end = start + size
        if end > KEEP:
            self._used = max(self._used, end)
            self._quiet = 0
        self.count = count = count + 1
        self.sent[0] = count & _MASK
        _native.fence()
        if self.asleep[0]:
            _native.wake(self.bell)
        return True

    def _room(self, size: int) -> int:
        """The start of a free range of so many bytes; -1 if there is none."""
        taken = self.taken[0]
        live = (self.count - taken) & _MASK
        if not live:
            if self._used:
                self._shrink()
            return 0
        if live > NOTES:
            raise GroupError(
                f"{taken} messages are marked as read, and {self.count & _MASK} were sent; "
                f"{_REMEDY}"
            )
        if live == NOTES:
            return -1
        first = self.notes[2 * (taken % NOTES)]
        last = self._end
        # where the newest lie before the oldest, the range between them is free
        if last + size <= (min(first, AREA) if last <= first else AREA):
            return last
        return 0 if size <= first < last else -1

    def _shrink(self) -> None:
        """Return the pages that large messages used, once only small ones follow. The lane is
        empty.
        """
        self._quiet += 1
        if self._quiet > QUIET:
            with suppress(OSError):  # it keeps its pages where the system cannot take them
                self._memory.madvise(mmap.MADV_REMOVE, _AREA_AT + KEEP, self._used - KEEP)
            self._used = 0


class LaneReader(_End):
    """The receiver's end."""

    def sleep(self, seconds: float) -> None:
        """Sleep until a piece has arrived, at most some seconds; may return earlier."""
        seen = self.sent[0]
        self.asleep[0] = 1
        _native.fence()
        if not self.has():
            _native.sleep(self.bell, seen, seconds)
        self.asleep[0] = 0

    def has(self, count: int = 1) -> bool:
        """Whether so many pieces have arrived that were not read."""
        return (self.sent[0] - self.count) & _MASK >= count

    def skip(self) -> None:
        """Drop all pieces that have arrived."""
        self.count += (self.sent[0] - self.count) & _MASK
        self.taken[0] = self.count & _MASK

    def read(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        """Copy the next piece into buffers; False if it has not arrived, or is another one: its
        size or header differ.
        """
        buffer, skip, nbytes, size = piece
        count = self.count
        notes = self.notes
        note = 2 * (count % NOTES)
        if self.sent[0] == count & _MASK or notes[note + 1] != size + self.head[0]:
            return False
        start = notes[note]
        if start > AREA - size:
            raise GroupError(
                f"a message of {size} bytes begins at {start} in a shared memory of {AREA} bytes; "
                f"{_REMEDY}"
            )
        _native.copy(buffers[buffer].data_ptr() + skip, self.area + start, nbytes)
        self.count = count = count + 1
        self.taken[0] = count & _MASK
        return True
