# SPDX-License-Identifier: Apache-2.0
"""One connection between two ranks: frames in both directions, each a header and the bytes of a
message.

The header contains the size of the message and the header of its call, and travels with the bytes.
A send hands over to the system what it takes at once; the rest is queued. A receive knows the size
of its message, so header and bytes are read by one call, the bytes to where they stay. This module
must not know ranks and backends.
"""

from __future__ import annotations

import ctypes
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct

from torch import Tensor

_HEADER = Struct("<QQ")
_MOST = 512  #: parts of memory in one call of the system


class Frame:
    """A message under way: the parts of memory that are left to send or to fill, and what keeps
    them alive.
    """

    __slots__ = ("held", "left", "parts")

    def __init__(self, header: bytes | bytearray, buffers: Sequence[Tensor], sizes: Sequence[int]):
        self.held = buffers
        self.left = _HEADER.size + sum(sizes)
        self.parts = [memoryview(header), *map(_bytes, buffers, sizes)]

    def first(self) -> list[memoryview]:
        """The parts that come next, as many as one call of the system takes."""
        return self.parts if len(self.parts) <= _MOST else self.parts[:_MOST]

    def advance(self, count: int) -> None:
        """So many bytes more were sent or filled."""
        self.left -= count
        parts = self.parts
        while count and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


def _bytes(buffer: Tensor, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(buffer.data_ptr())).cast("B")


class Incoming(Frame):
    """A message that was requested: the frame that it fills, and the header that it must have."""

    __slots__ = ("_header", "_read", "size")

    def __init__(self, buffers: Sequence[Tensor], sizes: Sequence[int], head: int):
        self.size = sum(sizes)
        self._header, self._read = _HEADER.pack(self.size, head), bytearray(_HEADER.size)
        super().__init__(self._read, buffers, sizes)

    def odd(self) -> bool:
        """Whether it has another header: it is another message."""
        return self._read != self._header


class Stream:
    """One end of a connection. ``head`` is the header of this rank's current call.

    Another thread may continue sends, by ``retry``.

    >>> import torch
    >>> a, b = (Stream(end, [7]) for end in socket.socketpair())
    >>> a.send([torch.arange(3.)], (12,))
    True
    >>> tensor = torch.empty(3)
    >>> frame = b.request([tensor], (12,))
    >>> b.fill(); frame.left, tensor
    (0, tensor([0., 1., 2.]))
    """

    def __init__(self, connection: socket.socket, head: list[int]):
        connection.setblocking(False)
        weakref.finalize(self, connection.close)
        self.connection, self.head = connection, head
        self.queued: deque[Frame] = deque()  # what the system has not taken yet, in order
        self.requested: deque[Incoming] = deque()
        self.ended = ""  # why nothing more arrives
        self.odd = False  # a message arrived that is not the one that was requested

    # ---- sending ----
    def send(self, buffers: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Send a message; False if some of it is queued. Its buffers must not change until it is
        sent.
        """
        frame = Frame(_HEADER.pack(sum(sizes), self.head[0]), buffers, sizes)
        if self.queued or not self._sent(frame):
            self.queued.append(frame)
            return False
        return True

    def retry(self) -> bool:
        """Send what is queued, as far as the system takes it now; whether nothing is left."""
        while self.queued:
            if not self._sent(self.queued[0]):
                return False
            self.queued.popleft()
        return True

    def _sent(self, frame: Frame) -> bool:
        while frame.left:
            try:
                frame.advance(self.connection.sendmsg(frame.first()))
            except BlockingIOError:
                return False
            except OSError as error:  # the message is lost, as one that nobody reads
                self.ended = ended(error)
                return True
        return True

    # ---- receiving ----
    def request(self, buffers: Sequence[Tensor], sizes: Sequence[int]) -> Incoming:
        """Request the next message, to be read into these buffers."""
        frame = Incoming(buffers, sizes, self.head[0])
        self.requested.append(frame)
        return frame

    def fill(self) -> None:
        """Read what has arrived for the messages that were requested."""
        while self.requested and not self.odd and not self.ended:
            frame = self.requested[0]
            try:
                count = self.connection.recvmsg_into(frame.first())[0]
            except BlockingIOError:
                return
            except OSError as error:
                self.ended = ended(error)
                return
            if count == 0:
                self.ended = ended()
                return
            header = len(frame.parts) > len(frame.held)
            frame.advance(count)
            if header and len(frame.parts) <= len(frame.held) and frame.odd():
                self.odd, frame.left = True, -1  # it is never filled
            elif not frame.left:
                self.requested.popleft()

    def close(self) -> None:
        """End the connection at once."""
        self.connection.close()

    def finish(self) -> None:
        """Tell the other end that no message follows."""
        ending(self.connection)


def ended(error: OSError | None = None) -> str:
    """Why nothing more arrives, as text."""
    return "it ended its connection" + ("" if error is None else f" ({error})")


def ending(connection: socket.socket) -> None:
    """End one direction of a connection: the other end reads what is under way, and then that it
    has ended.
    """
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_WR)
