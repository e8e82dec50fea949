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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import GroupError
from ...tree import Spec
from ..wire import ALIGN
from . import _native

PAGE = 4096
NOTES = 4096  #: messages that may be under way
AREA = 256 << 20  #: bytes that may be under way; only pages that were used take memory
_NOTES_AT, _AREA_AT = PAGE, PAGE + NOTES * 16
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
    """What is copied at once: parts of buffers as (buffer, offset in it, bytes, offset in the
    piece).
    """

    parts: tuple[tuple[int, int, int, int], ...]
    size: int


@lru_cache(maxsize=4096)
def pieces(sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """A message of buffers of these sizes: one piece, or several so that no piece needs most of the
    area.

    >>> pieces((4, 100))
    (Piece(parts=((0, 0, 4, 0), (1, 0, 100, 64)), size=192),)
    >>> [piece.size // LARGE for piece in pieces((2 * LARGE,))]
    [1, 1]
    """
    if sum(map(_padded, sizes)) <= LARGE:
        parts, at = [], 0
        for index, size in enumerate(sizes):
            parts.append((index, 0, size, at))
            at += _padded(size)
        return (Piece(tuple(parts), max(at, ALIGN)),)
    return tuple(
        Piece(((index, start, min(LARGE, size - start), 0),), _padded(min(LARGE, size - start)))
        for index, size in enumerate(sizes)
        for start in range(0, size, LARGE)
    )


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class _End:
    """One end of a lane: views of its counters (32 bits each) and notes, and the address of its
    area. ``head`` is a list of one number, the header of the current call.
    """

    def __init__(self, memory: mmap.mmap, head: list[int] | None = None):
        self.head = [0] if head is None else head  # added to the size in each note
        view = memoryview(memory)
        self.sent, self.taken = view[0:4].cast("I"), view[64:68].cast("I")
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
    >>> writer, reader = LaneWriter(memory), LaneReader(memory)
    >>> writer.write([torch.arange(3.)], pieces((12,)))
    True
    >>> tensor = torch.empty(3)
    >>> reader.has(0), reader.read([tensor], pieces((12,))[0]), tensor
    (True, True, tensor([0., 1., 2.]))
    """

    def __init__(self, memory: mmap.mmap, head: list[int] | None = None):
        super().__init__(memory, head)
        self._freed = 0
        self._memory, self._used, self._quiet = memory, 0, 0
        self._live: deque[tuple[int, int]] = deque()
        self.queued: deque[tuple[Sequence[Tensor], Piece]] = deque()  # pieces that did not fit yet

    def write(self, buffers: Sequence[Tensor], message: Sequence[Piece]) -> bool:
        """Copy a message in; False if some of it did not fit and is queued for :meth:`retry`."""
        for piece in message:
            if self.queued or not self._write(buffers, piece):
                self.queued.append((buffers, piece))
        return not self.queued

    def sender(self, spec: Spec, nbytes: int) -> Callable[[Tensor], bool]:
        """:meth:`write` for messages of one tensor that is laid out as its Spec says.

        The function returns False, and writes nothing, if the tensor is laid out differently or a
        message is still queued. Every message of a plan passes here, so the methods are written
        out: a third of the time.
        """
        (piece,) = pieces((nbytes,))
        (shape, stride, dtype), size = spec, piece.size
        copy, fence, wake = _native.copy, _native.fence, _native.wake
        area, notes, sent, asleep, bell = self.area, self.notes, self.sent, self.asleep, self.bell
        live, queued, room, head = self._live, self.queued, self._room, self.head

        def send(tensor: Tensor) -> bool:
            planned = tensor.stride() == stride and tensor.shape == shape and tensor.dtype is dtype
            if not planned or tensor.is_neg() or queued:
                return False
            start = room(size)
            if start < 0:
                return False
            copy(area + start, tensor.data_ptr(), nbytes)
            count = self.count
            note = 2 * (count % NOTES)
            notes[note], notes[note + 1] = start, size + head[0]
            live.append((start, start + size))
            self.count = count + 1
            sent[0] = (count + 1) & _MASK
            fence()
            if asleep[0]:
                wake(bell)
            return True

        return send

    def retry(self) -> bool:
        """Write queued pieces that fit now; whether none is left."""
        while self.queued:
            if not self._write(*self.queued[0]):
                return False
            self.queued.popleft()
        return True

    def _write(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        parts, size = piece
        start = self._room(size)
        if start < 0:
            return False
        at, count, notes = self.area + start, self.count, self.notes
        for index, skip, nbytes, place in parts:
            _native.copy(at + place, buffers[index].data_ptr() + skip, nbytes)
        note = 2 * (count % NOTES)
        notes[note], notes[note + 1] = start, size + self.head[0]
        self._live.append((start, start + size))
        self.count = count = count + 1
        self.sent[0] = count & _MASK
        _native.fence()
        if self.asleep[0]:
            _native.wake(self.bell)
        return True

    def _room(self, size: int) -> int:
        """The start of a free range of so many bytes; -1 if there is none."""
        live = self._live
        taken = (self.taken[0] - self._freed) & _MASK
        if taken:
            self._free(taken)
        if not live:
            if self._used:
                self._shrink()
            return 0
        if len(live) == NOTES:
            return -1
        first, last = live[0][0], live[-1][1]
        if last <= first:  # the newest lie before the oldest: the range between them is free
            return last if last + size <= first else -1
        if last + size <= AREA:
            return last
        return 0 if size <= first else -1

    def _free(self, taken: int) -> None:
        """The ranges of so many messages, the oldest, are free."""
        live = self._live
        if taken > len(live):
            raise GroupError(
                f"{taken} messages are marked as read, and {len(live)} were sent; {_REMEDY}"
            )
        high = max(live.popleft()[1] for _ in range(taken))
        self._freed += taken
        if high > KEEP:
            self._used, self._quiet = max(self._used, high), 0

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

    def sleep(self, number: int, seconds: float) -> None:
        """Sleep until the piece of this number has arrived, at most some seconds; may return
        earlier.
        """
        seen = self.sent[0]
        self.asleep[0] = 1
        _native.fence()
        if not self.has(number):
            _native.sleep(self.bell, seen, seconds)
        self.asleep[0] = 0

    def has(self, number: int) -> bool:
        """Whether the piece of this number has arrived."""
        return (self.sent[0] - number - 1) & _MASK < 1 << 31

    def skip(self) -> None:
        """Drop all pieces that have arrived."""
        self.count += (self.sent[0] - self.count) & _MASK
        self.taken[0] = self.count & _MASK

    def fetcher(self, spec: Spec, nbytes: int) -> Callable[[], Tensor | None]:
        """:meth:`read` for messages of one contiguous tensor, written out as for sends.

        The function returns None, and reads nothing, if the next message has not arrived, has
        another size or belongs to another call.
        """
        (piece,) = pieces((nbytes,))
        (shape, stride, dtype), size, new = spec, piece.size, torch.empty_strided
        copy, sent, taken, notes, area = _native.copy, self.sent, self.taken, self.notes, self.area
        head, last, cpu = self.head, AREA - piece.size, torch.device("cpu")

        def fetch() -> Tensor | None:
            count = self.count
            note = 2 * (count % NOTES)
            if sent[0] == count & _MASK or notes[note + 1] != size + head[0]:
                return None
            start = notes[note]
            if start > last:
                raise _overwritten(start, size)
            tensor = new(shape, stride, dtype=dtype, device=cpu)
            copy(tensor.data_ptr(), area + start, nbytes)
            self.count = count + 1
            taken[0] = (count + 1) & _MASK
            return tensor

        return fetch

    def read(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        """Copy the next piece, which has arrived, into buffers; False if it has another size or
        header.
        """
        parts, size = piece
        note = 2 * (self.count % NOTES)
        if self.notes[note + 1] != size + self.head[0]:
            return False
        start = self.notes[note]
        if start > AREA - size:
            raise _overwritten(start, size)
        at = self.area + start
        for index, skip, nbytes, place in parts:
            _native.copy(buffers[index].data_ptr() + skip, at + place, nbytes)
        self.count = count = self.count + 1
        self.taken[0] = count & _MASK
        return True


def _overwritten(start: int, size: int) -> GroupError:
    return GroupError(
        f"a message of {size} bytes begins at {start} in a shared memory of {AREA} bytes; {_REMEDY}"
    )
