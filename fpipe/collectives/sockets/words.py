# SPDX-License-Identifier: Apache-2.0
"""The words that ranks announce before each call, each to every other one over a connection of
their own.

This module must not know calls.
"""

from __future__ import annotations

import select
import socket
import weakref
from collections.abc import Mapping
from struct import Struct

from .stream import ended, ending

_WORD = Struct("<QQ")
_LATER = 0.01  #: seconds of waiting after which a rank sleeps


class Words:
    """An exchange of words. A rank ends a call only when every rank has begun it, so it reads no
    word of a later one.

    >>> a, b = socket.socketpair()
    >>> first, second = Words({1: a}, 0.0), Words({0: b}, 0.0)
    >>> first.start(0, 7); second.equal(0, 7), second.equal(0, 8), first.missing(0)
    (True, False, 1)
    """

    def __init__(self, connections: Mapping[int, socket.socket], poll: float):
        self._connections, self._poll = connections, poll
        for connection in connections.values():
            connection.setblocking(False)
            weakref.finalize(self, connection.close)
        self._read = dict.fromkeys(connections, b"")
        self._said: dict[int, tuple[int, int]] = dict.fromkeys(
            connections, (-1, 0)
        )  # number of the call, word
        self._ended: dict[int, str] = {}

    def start(self, number: int, word: int) -> None:
        """Send the word."""
        for rank, connection in self._connections.items():
            try:
                connection.sendall(_WORD.pack(number, word))
            except (
                OSError
            ) as error:  # nobody reads it; whoever waits for this rank's word learns why
                self._ended[rank] = ended(error)

    def equal(self, number: int, word: int) -> bool | None:
        """Whether every rank has sent this word; None while one has not."""
        equal: bool | None = True
        for rank in self._connections:
            theirs = self._word(rank, number)
            if theirs is not None and theirs != word:
                return False
            equal = None if theirs is None else equal
        return equal

    def missing(self, number: int) -> int | None:
        """The first rank whose word is missing."""
        return next((rank for rank in self._connections if self._word(rank, number) is None), None)

    def pause(self, number: int, waited: float) -> str:
        """Poll for a while, then sleep until something arrives from a rank whose word is
        missing.
        """
        rank = self.missing(number)
        if rank is None:
            return ""
        if waited >= self._poll and rank not in self._ended:
            ready = select.poll()
            ready.register(self._connections[rank], select.POLLIN)
            ready.poll(1e3 * _LATER)
        return self._ended.get(rank, "")

    def finish(self) -> None:
        """Tell the other ranks that no word follows."""
        for connection in self._connections.values():
            ending(connection)

    def close(self) -> None:
        """End the connections."""
        for connection in self._connections.values():
            connection.close()

    def _word(self, rank: int, number: int) -> int | None:
        """The word of a rank for a call, if it has arrived."""
        while self._said[rank][0] < number and rank not in self._ended:
            try:
                found = self._connections[rank].recv(_WORD.size - len(self._read[rank]))
            except BlockingIOError:
                return None
            except OSError as error:
                self._ended[rank] = ended(error)
                return None
            if not found:
                self._ended[rank] = ended()
                return None
            self._read[rank] += found
            if len(self._read[rank]) == _WORD.size:
                self._said[rank], self._read[rank] = _WORD.unpack(self._read[rank]), b""
        at, word = self._said[rank]
        return word if at == number else None
