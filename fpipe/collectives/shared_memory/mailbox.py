"""One lane of messages from a process to another of the same host, in memory that both have mapped.

The sender copies a message in and counts ``sent`` up; the receiver copies it out and counts ``taken`` up. Each counter
has one writer, so there are no locks. Messages lie where the sender found room, and a note a message says where; an
empty lane starts again at its beginning, so that what is in use stays in the cache. Knows no process and no backend.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...specs import Spec
from ..wire import ALIGN
from . import _futex

PAGE = 4096
NOTES = 4096  #: messages that may be on their way
AREA = 256 << 20  #: bytes that may be; only those that were ever used take memory
_NOTES_AT, _AREA_AT = PAGE, PAGE + NOTES * 16
#: What one lane takes of an outbox.
LANE = _AREA_AT + AREA
LARGE = AREA // 4  #: from here on a message travels in pieces
_MASK = 2**32 - 1
_CPU = torch.device("cpu")  # whatever the default device is
_UNASKED = 16  # so many messages may lie one after another before it is asked which were taken


class Piece(NamedTuple):
    """What travels at once: parts of buffers (which, from where, how many bytes, where in the piece)."""

    parts: tuple[tuple[int, int, int, int], ...]
    size: int


@lru_cache(maxsize=4096)
def pieces(sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """A message of buffers of these sizes: one piece, unless it is so large that it should not need all the room.

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
    """One end of a lane: its counters, its notes and its bytes."""

    def __init__(self, memory: mmap.mmap):
        self.sent = ctypes.c_uint32.from_buffer(memory, 0)
        self.taken = ctypes.c_uint32.from_buffer(memory, 64)
        self.notes = (ctypes.c_uint64 * (2 * NOTES)).from_buffer(memory, _NOTES_AT)
        self.area = ctypes.addressof(ctypes.c_char.from_buffer(memory, _AREA_AT))
        self.asleep = ctypes.c_uint32.from_buffer(memory, 128)  # whether the receiver is, or is about to be
        self.bell = ctypes.addressof(self.sent)
        self.count = 0  # pieces put in, or taken out, at this end


class Outlet(_End):
    """The sender's end.

    >>> import torch
    >>> memory = mmap.mmap(-1, LANE)
    >>> outlet, inlet = Outlet(memory), Inlet(memory)
    >>> outlet.put([torch.arange(3.)], pieces((12,)))
    True
    >>> found = torch.empty(3)
    >>> inlet.there(0), inlet.take([found], pieces((12,))[0]), found
    (True, True, tensor([0., 1., 2.]))
    """

    def __init__(self, memory: mmap.mmap):
        super().__init__(memory)
        self._freed = 0
        self._live: deque[tuple[int, int]] = deque()
        self.late: deque[tuple[Sequence[Tensor], Piece]] = deque()  # found no room yet

    def put(self, buffers: Sequence[Tensor], message: Sequence[Piece]) -> bool:
        """Copy a message in; False where some of it found no room, and waits for :meth:`pump`."""
        for piece in message:
            if self.late or not self._put(buffers, piece):
                self.late.append((buffers, piece))
        return not self.late

    def carrier(self, spec: Spec, nbytes: int) -> Callable[[Tensor], bool]:
        """:meth:`put`, made ready for messages of one tensor that is laid out as its Spec says; False where one is not,
        or where nothing may overtake what waits: then it was not sent.

        Every message of a plan passes here, so what the methods do is written out.
        """
        (piece,) = pieces((nbytes,))
        (shape, stride, dtype), size, last = spec, piece.size, AREA - piece.size
        move, area, notes, sent, asleep, bell = ctypes.memmove, self.area, self.notes, self.sent, self.asleep, self.bell
        live, late, room, fence, wake = self._live, self.late, self._room, _futex.fence, _futex.wake

        def carry(tensor: Tensor) -> bool:
            if tensor.stride() != stride or tensor.shape != shape or tensor.dtype is not dtype or tensor.is_neg():
                return False
            if late:
                return False
            start = live[-1][1] if live else 0
            if not (0 < len(live) < _UNASKED and live[0][0] < start <= last):
                start = room(size)
                if start < 0:
                    return False
            move(area + start, tensor.data_ptr(), nbytes)
            count = self.count
            note = 2 * (count % NOTES)
            notes[note], notes[note + 1] = start, size
            live.append((start, start + size))
            self.count = count + 1
            sent.value = (count + 1) & _MASK
            fence()
            if asleep.value:
                wake(bell)
            return True

        return carry

    def pump(self) -> bool:
        """Copy in what waits and finds room now; whether all did."""
        while self.late:
            if not self._put(*self.late[0]):
                return False
            self.late.popleft()
        return True

    def _put(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        start = self._room(piece.size)
        if start < 0:
            return False
        at = self.area + start
        for index, skip, size, place in piece.parts:
            ctypes.memmove(at + place, buffers[index].data_ptr() + skip, size)
        note = 2 * (self.count % NOTES)
        self.notes[note], self.notes[note + 1] = start, piece.size
        self._live.append((start, start + piece.size))
        self.count += 1
        self.sent.value = self.count & _MASK
        _futex.fence()
        if self.asleep.value:
            _futex.wake(self.bell)
        return True

    def _room(self, size: int) -> int:
        """Where so many bytes in a row are free; -1 where nowhere."""
        live = self._live
        if live and len(live) < _UNASKED and live[-1][1] + size <= AREA and live[0][0] < live[-1][1]:
            return live[-1][1]
        for _ in range((self.taken.value - self._freed) & _MASK):
            live.popleft()
            self._freed += 1
        if not live:
            return 0
        if len(live) == NOTES:
            return -1
        first, last = live[0][0], live[-1][1]
        if last <= first:  # the newest lie before the oldest: free is what lies between
            return last if last + size <= first else -1
        if last + size <= AREA:
            return last
        return 0 if size <= first else -1


class Inlet(_End):
    """The receiver's end."""

    def sleep(self, number: int, seconds: float) -> None:
        """Sleep until a piece, by its number, has come, or some seconds are over; may wake for nothing."""
        seen = self.sent.value
        self.asleep.value = 1
        _futex.fence()
        if not self.there(number):
            _futex.sleep(self.bell, seen, seconds)
        self.asleep.value = 0

    def there(self, number: int) -> bool:
        """Whether a piece, by its number, has come."""
        return (self.sent.value - number - 1) & _MASK < 1 << 31

    def fetcher(self, spec: Spec, nbytes: int) -> Callable[[], Tensor | None]:
        """:meth:`take`, made ready for messages of one plain tensor; None where the next is not there, or another."""
        (piece,) = pieces((nbytes,))
        (shape, _, dtype), size, new = spec, piece.size, torch.empty
        move, sent, taken, notes, area = ctypes.memmove, self.sent, self.taken, self.notes, self.area

        def fetch() -> Tensor | None:
            count = self.count
            note = 2 * (count % NOTES)
            if sent.value == count & _MASK or notes[note + 1] != size:
                return None
            found = new(shape, dtype=dtype, device=_CPU)
            move(found.data_ptr(), area + notes[note], nbytes)
            self.count = count + 1
            taken.value = (count + 1) & _MASK
            return found

        return fetch

    def take(self, buffers: Sequence[Tensor], piece: Piece) -> bool:
        """Copy the next piece, which is there, out into buffers; False where it is not of this size."""
        note = 2 * (self.count % NOTES)
        if self.notes[note + 1] != piece.size:
            return False
        at = self.area + self.notes[note]
        for index, skip, size, place in piece.parts:
            ctypes.memmove(buffers[index].data_ptr() + skip, at + place, size)
        self.count += 1
        self.taken.value = self.count & _MASK
        return True
