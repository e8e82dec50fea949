# SPDX-License-Identifier: Apache-2.0
"""Messages between CPU ranks that no backend carries: through shared memory on one host, else
through sockets.

This module must not know backends: they carry the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..devices import cores
from .agreement import Agreement, Exchange
from .faults import FaultMonitor
from .group import Sender, Work
from .shared_memory import SWITCH as MEMORY_SWITCH
from .shared_memory.transport import connect as share_memory
from .sockets import SWITCH as SOCKETS_SWITCH
from .sockets.connecting import connect as connect_sockets
from .sockets.transport import Sockets
from .wire import WireFormat

Gather: TypeAlias = Callable[[object], list[Any]]
Fetch: TypeAlias = Callable[[], tuple[Tensor, ...] | None]
#: Connections of each rank to all others take so many files.
MOST = 64


class Transport(Protocol):
    """What carries messages to some ranks: ``rank in transport`` tells which."""

    @property
    def words(self) -> Exchange:
        """The exchange through which these ranks compare their calls."""
        ...

    def __contains__(self, rank: int) -> bool:
        """Whether it carries messages to a rank."""
        ...

    def send(self, form: WireFormat, tensors: Sequence[Tensor], dst: int) -> Work:
        """Send a message, without waiting for its receiver."""
        ...

    def sender(self, form: WireFormat, dst: int) -> Sender:
        """:meth:`send` for messages of one form."""
        ...

    def recv(self, form: WireFormat, src: int) -> Work:
        """Request the next message of a rank."""
        ...

    def fetcher(self, form: WireFormat, src: int) -> Fetch:
        """For the next message if it has arrived."""
        ...

    def share(
        self, form: WireFormat, tensors: tuple[Tensor, ...] | None, src: int
    ) -> tuple[Tensor, ...]:
        """Broadcast from one rank to those of this transport."""
        ...

    def flush(self) -> None:
        """Wait until no message is queued."""
        ...

    def fail(self) -> None:
        """End the messages of this rank: it failed."""
        ...


class Direct:
    """The transports of one rank. ``whole``: every two ranks of the group use one, none the
    backend.
    """

    def __init__(self, monitor: FaultMonitor, agreement: Agreement, gather: Gather, sockets: bool):
        self._monitor, self._gather = monitor, gather
        self.memory, self.whole = share_memory(monitor, agreement, gather)
        self._near = [
            rank for rank in range(monitor.size) if self.memory is not None and rank in self.memory
        ]
        self.sockets: Sockets | None = None
        if sockets and not self.whole and monitor.size <= MOST:
            links, self.whole = self._linked()
            self.sockets = Sockets(monitor, agreement, links, _ranks_here(monitor.size) <= cores())
        self._all: tuple[Transport, ...] = tuple(
            each for each in (self.memory, self.sockets) if each is not None
        )
        #: The exchange of words, if all ranks use a transport; with one transport it is that of it,
        #: which is shorter.
        self.words: Exchange | None = None
        if self.whole:
            self.words = (
                self.memory.words
                if self.memory is not None and self.sockets is None
                else _Every(self._all)
            )

    def _linked(self) -> Any:
        wanted = os.environ.get(SOCKETS_SWITCH, "1") != "0"
        return connect_sockets(
            self._monitor.rank, self._monitor.size, self._near, self._gather, wanted
        )

    def __str__(self) -> str:
        """How messages are sent, where not by the backend."""
        through = [
            (self.memory, f"through shared memory ({MEMORY_SWITCH}=0 turns it off)"),
            (self.sockets, f"through sockets ({SOCKETS_SWITCH}=0 turns them off)"),
        ]
        size = self._monitor.size
        counts = [
            (sum(rank in each for rank in range(size)), text)
            for each, text in through
            if each is not None
        ]
        parts = [
            text if count == size - 1 else f"{text} with {count} of {size - 1} ranks"
            for count, text in counts
            if count
        ]
        return ", ".join(
            [*parts, *(["by the backend with the others"] if parts and not self.whole else [])]
        )

    def to(self, rank: int) -> Transport | None:
        """What carries messages to and from a rank; None for the backend."""
        return next((each for each in self._all if rank in each), None)

    def share(
        self, form: WireFormat, tensors: tuple[Tensor, ...] | None, src: int
    ) -> tuple[Tensor, ...]:
        """Broadcast from one rank to all, if every two ranks use a transport."""
        if tensors is None:
            transport = self.to(src)
            assert transport is not None
            return transport.share(form, None, src)
        for transport in self._all:
            transport.share(form, tensors, src)
        return tensors

    def flush(self) -> None:
        """Wait until no message is queued."""
        for transport in self._all:
            transport.flush()

    def drop(self) -> None:
        """Drop the messages of a call that was refused; all ranks do, after the last of them was
        sent.
        """
        if self.memory is not None:
            self.memory.drop()
        if self.sockets is not None:
            self.sockets.renew(self._linked()[0])

    def fail(self) -> None:
        """End the messages of this rank: it failed."""
        for transport in self._all:
            transport.fail()


def _ranks_here(size: int) -> int:
    """How many ranks this host has, of so many."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", size)), size)


class _Every(NamedTuple):
    """The exchanges of transports as one: each has the words of its ranks."""

    transports: tuple[Transport, ...]

    def start(self, number: int, word: int) -> None:
        for each in self.transports:
            each.words.start(number, word)

    def equal(self, number: int, word: int) -> bool | None:
        found = [each.words.equal(number, word) for each in self.transports]
        return False if False in found else None if None in found else True

    def missing(self, number: int) -> int | None:
        return next(
            (rank for each in self.transports if (rank := each.words.missing(number)) is not None),
            None,
        )

    def pause(self, number: int, waited: float) -> str:
        late = next(
            (each.words for each in self.transports if each.words.missing(number) is not None), None
        )
        return "" if late is None else late.pause(number, waited)
