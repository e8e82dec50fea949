# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a group that runs on one host, through memory that they share.

Each rank has an outbox: a memory file without a name, which the others open through ``/proc``.
Nothing is left behind, however a rank ends. The bytes of a send are copied when it returns. A
message that does not fit is queued, and written when this rank next sends or waits, so sends never
block. A waiting rank polls, then sleeps, and regularly checks that the sender's process exists.
This module must not know backends: they carry messages between hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...devices import cores
from ...errors import MismatchError
from ..agreement import Agreement
from ..faults import FaultMonitor, too_many_files
from ..group import Following, Receiver, Sender, Tensors, Work
from ..rendezvous import Gather
from ..wire import WireFormat
from . import _native
from .lane import LANE, PAGE, LaneReader, LaneWriter, Piece, pieces
from .outbox import LANES, Board, Outbox, Peer

#: The lanes from one rank to another: messages of plans, and broadcasts, which a plan in phases
#: sends before messages of an earlier phase are received. Each stream of a plan has a lane.
PLANS, *_, SHARED = range(LANES)
_POLL = 400e-6  #: seconds to poll before sleeping, where every rank has a core
_SLICE = 0.05  #: seconds to sleep between two checks of the sender's process
_GLANCE = 0.0002  #: seconds to sleep between two looks at several lanes
_RETRY = 0.001  #: seconds between two attempts to write what is queued
_CPU = torch.device("cpu")
_CLOCK = time.perf_counter


class SharedMemory:
    """Messages of one rank to and from the others of its group."""

    def __init__(
        self,
        monitor: FaultMonitor,
        agreement: Agreement,
        outbox: Outbox,
        peers: Mapping[int, Peer],
    ):
        self._monitor = monitor
        self._agreement = agreement
        self._outbox = outbox
        self._peers = peers
        head = agreement.head
        self._writers = {
            (dst, kind): LaneWriter(outbox.lane(dst, kind), head)
            for dst in peers
            for kind in range(LANES)
        }
        self._inboxes = {
            (src, kind): _Inbox(self, src, LaneReader(peer.lane(monitor.rank, kind), head))
            for src, peer in peers.items()
            for kind in range(LANES)
        }
        self._late: list[LaneWriter] = []  # those with queued messages
        self._poll = _POLL if len(peers) < cores() else 0.0

    def exchange(self, number: int, digest: int) -> Board:
        """Announce a call to the other ranks."""
        self._outbox.announce(number, digest)
        return Board(number, digest, self._peers, self._poll)

    # ---- sending ----
    def sender(self, form: WireFormat, dst: int, kind: int = PLANS) -> Sender:
        """A function that copies a message into the outbox; if it does not fit it is written
        later.
        """
        monitor = self._monitor
        writer = self._writers[dst, kind]
        message = pieces(form.sizes)
        pack = form.pack
        put = writer.put
        src = monitor.rank
        single = message[0] if len(message) == 1 else None

        def send(tensors: Tensors) -> None:
            if monitor.broken is not None:
                monitor.check()
            buffers = pack(tensors, src, dst)
            if self._late or single is None or not put(buffers, single):
                self._write(writer, buffers, message)

        return send

    def share(self, form: WireFormat, tensors: Tensors | None, src: int) -> Tensors:
        """Send the tensors of one rank to all others."""
        if tensors is None:
            return self._inboxes[src, SHARED].receive(form, pieces(form.sizes))
        for dst in self._peers:
            self.sender(form, dst, SHARED)(tensors)
        return tensors

    def _write(
        self,
        writer: LaneWriter,
        buffers: Sequence[Tensor],
        message: Sequence[Piece],
    ) -> None:
        if self._late:
            self._retry()
        if not writer.write(buffers, message) and writer not in self._late:
            self._late.append(writer)

    def _retry(self) -> bool:
        """Write queued messages that fit now; whether none is left."""
        self._late = [writer for writer in self._late if not writer.retry()]
        return not self._late

    def flush(self) -> None:
        """Wait until no message is queued."""
        if not self._retry():
            dst = next(dst for (dst, _), writer in self._writers.items() if writer in self._late)
            self._until(self._retry, dst, "to send to", lambda: time.sleep(_RETRY))

    def drop(self) -> None:
        """Drop the messages of a call that was refused: those that are queued, and those that no
        rank reads.
        """
        for writer in self._late:
            writer.queued.clear()
        self._late.clear()
        for inbox in self._inboxes.values():
            inbox.reader.skip()

    def fail(self) -> None:
        """Mark the outbox so that readers do not wait for further messages."""
        self._outbox.ended[0] = 1
        for writer in self._writers.values():
            _native.wake(writer.bell)

    # ---- receiving ----
    def receiver(self, form: WireFormat, src: int, kind: int = PLANS) -> Receiver:
        """Functions that receive the next message. ``fetch`` returns it if it arrives within the
        time of polling.
        """
        inbox = self._inboxes[src, kind]
        monitor = self._monitor
        poll = self._poll
        arrived = inbox.reader.has
        message = pieces(form.sizes)

        def fetch() -> Tensors | None:
            if monitor.broken is not None:
                return None
            if message and not arrived():
                end = _CLOCK() + poll
                while not arrived():
                    if _CLOCK() >= end:
                        return None
            return inbox.receive(form, message)

        def post() -> Work:
            monitor.check()
            return following

        following = Following(partial(arrived, len(message)), partial(inbox.receive, form, message))
        return Receiver(post, fetch)

    def wait(self, src: int, reader: LaneReader) -> None:
        """Poll, then sleep, until the next piece has arrived."""
        self._poll_for(reader.has, src, lambda: reader.sleep(_SLICE if self._retry() else _RETRY))

    def wait_any(self, receives: Sequence[tuple[int, Work]]) -> None:
        """Poll, then sleep for short times, until one of several receives is done."""
        src, _ = receives[0]
        reader = self._inboxes[src, PLANS].reader

        def sleep() -> None:
            if self._retry():
                reader.sleep(_GLANCE)
            else:
                time.sleep(_RETRY)

        self._poll_for(lambda: any(work.done() for _, work in receives), src, sleep)

    def _poll_for(self, ready: Callable[[], bool], src: int, sleep: Callable[[], None]) -> None:
        end = _CLOCK() + self._poll
        while not ready():
            if _CLOCK() >= end:
                self._until(ready, src, "for a message from", sleep)

    def refuse(self, src: int, nbytes: int) -> None:
        """Raise for a message that is not the one that this rank expects."""
        self._agreement.confirm()  # it is of another call
        raise MismatchError(
            f"rank {src} sent a message of another size than the {nbytes} bytes that rank "
            f"{self._monitor.rank} expected; both must run one plan"
        )

    def _until(
        self,
        ready: Callable[[], bool],
        peer: int,
        doing: str,
        sleep: Callable[[], None],
    ) -> None:
        self._monitor.until(ready, peer, doing, sleep, lambda: self._gone(peer))

    def _gone(self, peer: int) -> str:
        self._agreement.check()
        return self._peers[peer].gone()


class _Inbox(NamedTuple):
    """One lane from a rank."""

    memory: SharedMemory
    src: int
    reader: LaneReader

    def receive(self, form: WireFormat, message: Sequence[Piece]) -> Tensors:
        """The next message, in pieces that may have to be waited for."""
        buffers = form.empty(_CPU)
        reader = self.reader
        for piece in message:
            if reader.read(buffers, piece):
                continue
            self.memory.wait(self.src, reader)
            if not reader.read(buffers, piece):
                self.memory.refuse(self.src, piece.size)
        return form.unpack(buffers, _CPU)


def connect(monitor: FaultMonitor, agreement: Agreement, gather: Gather) -> SharedMemory | None:
    """Shared memory of the ranks of a host, by two rounds of ``gather``; None on all of them unless
    each could open the outboxes of all others.
    """
    outbox = None
    address = None
    peers: dict[int, Peer] = {}
    # Lanes in both directions; the rest of a limited address space is for tensors.
    nbytes = PAGE + monitor.size * LANES * LANE
    if _native.AVAILABLE and 2 * nbytes <= _native.address_space() / 4:
        with _or_backend():
            outbox = Outbox(_native.memory_file(nbytes), nbytes)
            address = os.getpid(), outbox.file
    addresses = gather(address)
    if None not in addresses:
        with _or_backend():
            for rank, (process, file) in enumerate(addresses):
                if rank != monitor.rank:
                    peers[rank] = Peer(process, file, nbytes)
    all_opened = all(gather(len(peers) == monitor.size - 1))
    if outbox is None or not all_opened:
        return None
    return SharedMemory(monitor, agreement, outbox, peers)


@contextmanager
def _or_backend() -> Iterator[None]:
    """Ignore what the system refuses: the backend then carries the messages. It needs file
    descriptors too.
    """
    try:
        yield
    except OSError as error:  # another user's memory, or no memory files, or no address space
        if too_many_files(error):
            raise
