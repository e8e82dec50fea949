# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a group that run on one host, through memory that they share.

Each rank has an outbox, a memory file without a name, that the others open through ``/proc``:
nothing is left behind, however a rank ends. The bytes of a send are copied when it returns; a
message that does not fit is queued, and written when this rank next sends or waits, so sends never
block. A waiting rank polls, then sleeps, and regularly checks that the sender's process exists.
This module must not know backends: they carry messages between hosts.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...devices import cores
from ...errors import GroupError, MismatchError
from ..agreement import Agreement
from ..faults import FaultMonitor
from ..group import Done, Pending, Sender, Work
from ..wire import WireFormat
from . import SWITCH, _native
from .board import WORDS, Board
from .lane import LANE, PAGE, LaneReader, LaneWriter, Piece, pieces

#: The two lanes from one rank to another: messages of plans, and broadcasts.
PLANS, SHARED = 0, 1
_LANES = 2
_TOKEN = 16
_ENDED = slice(64, 68)  #: of an outbox's first page: not 0 once its rank has failed
_WORDS = slice(128, 128 + 8 * WORDS)  #: of the same page: the calls that the rank has announced
_POLL = 400e-6  #: seconds to poll before sleeping, where every rank has a core
_SLICE = 0.05  #: seconds to sleep between two checks of the sender's process
_KEPT = 256  #: forms of broadcasts for which functions are kept
_CPU = torch.device("cpu")
_SENT = Done()


class Address(NamedTuple):
    """Where a rank's outbox is: its host, process and file descriptor, and a token that the outbox
    begins with.
    """

    host: str
    process: int
    file: int
    token: bytes


def host() -> str:
    """Equal for processes that can share memory: those of one boot and one set of name spaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))))


class _Outbox:
    """This rank's memory, with the lanes to every other rank."""

    def __init__(self, size: int):
        self.file = _native.memory_file(_outbox_size(size))
        weakref.finalize(self, os.close, self.file)
        self.token = os.urandom(_TOKEN)
        page = mmap.mmap(self.file, PAGE)
        page[:_TOKEN] = self.token
        self.ended = memoryview(page)[_ENDED].cast("I")
        self.words = memoryview(page)[_WORDS].cast("Q")


class _Peer:
    """Another rank's outbox, the lanes to it, and whether its process exists."""

    def __init__(self, address: Address, rank: int, outbox: _Outbox, reader: int, size: int):
        self.file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        _native.check_memory_file(self.file, _outbox_size(size))
        page = mmap.mmap(self.file, PAGE)
        if page[:_TOKEN] != address.token:
            raise OSError("another process has this number here")
        self._ended = memoryview(page)[_ENDED].cast("I")
        self.words = memoryview(page)[_WORDS].cast("Q")
        process = os.pidfd_open(address.process)
        weakref.finalize(self, os.close, process)
        self._poll = select.poll()
        self._poll.register(process, select.POLLIN)
        self._incoming, self._outgoing = (
            _map_lanes(self.file, reader),
            _map_lanes(outbox.file, rank),
        )

    def reader(self, kind: int, head: list[int]) -> LaneReader:
        return LaneReader(self._incoming[kind], head)

    def writer(self, kind: int, head: list[int]) -> LaneWriter:
        return LaneWriter(self._outgoing[kind], head)

    def gone(self) -> str:
        """Why no further message will arrive; empty while one may."""
        if self._ended[0]:
            return "it failed, and ended its messages"
        return "its process has ended" if self._poll.poll(0) else ""


def _outbox_size(size: int) -> int:
    return PAGE + size * _LANES * LANE


def _map_lanes(file: int, dst: int) -> list[mmap.mmap]:
    return [
        mmap.mmap(file, LANE, offset=PAGE + (dst * _LANES + kind) * LANE) for kind in range(_LANES)
    ]


class SharedMemory:
    """Messages of one rank to and from the ranks of its host; ``rank in memory`` tells which those
    are.
    """

    def __init__(
        self, monitor: FaultMonitor, agreement: Agreement, outbox: _Outbox, peers: dict[int, _Peer]
    ):
        self.rank = monitor.rank
        self._monitor, self._agreement, self._outbox, self._peers = (
            monitor,
            agreement,
            outbox,
            peers,
        )
        self._writers: dict[tuple[int, int], LaneWriter] = {}
        self._inboxes: dict[tuple[int, int], _Inbox] = {}
        self._sender, self._fetcher = (
            lru_cache(_KEPT)(self.sender),
            lru_cache(_KEPT)(self.fetcher),
        )  # of broadcasts
        self._late: list[LaneWriter] = []  # those with queued messages
        self.poll = _POLL if len(peers) < cores() else 0.0
        words = {rank: peer.words for rank, peer in peers.items()}
        self.words = Board(outbox.words, words, lambda rank: peers[rank].gone(), self.poll)

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    # ---- sending ----
    def send(
        self, form: WireFormat, tensors: Sequence[Tensor], dst: int, kind: int = PLANS
    ) -> Work:
        """Copy a message into the outbox; if it does not fit it is written later."""
        writer = self._writer(dst, kind)
        if self._late:
            self.retry()
        if (
            not writer.write(form.pack(tensors, self.rank, dst), pieces(form.sizes))
            and writer not in self._late
        ):
            self._late.append(writer)
        return _SENT

    def sender(self, form: WireFormat, dst: int, kind: int = PLANS) -> Sender:
        """:meth:`send` for messages of one form."""
        monitor = self._monitor
        single = (
            self._writer(dst, kind).sender(form.specs[0], form.sizes[0])
            if _short(form)
            else lambda _: False
        )

        def send(tensors: tuple[Tensor, ...]) -> None:
            if monitor.broken is not None:
                monitor.check()
            if len(tensors) != 1 or not single(tensors[0]):
                self.send(form, tensors, dst, kind)

        return send

    def _writer(self, dst: int, kind: int) -> LaneWriter:
        writer = self._writers.get((dst, kind))
        if writer is None:
            writer = self._writers[dst, kind] = self._peers[dst].writer(kind, self._agreement.head)
        return writer

    def retry(self) -> bool:
        """Write queued messages that fit now; whether none is left."""
        self._late = [writer for writer in self._late if not writer.retry()]
        return not self._late

    def flush(self) -> None:
        """Wait until no message is queued."""
        if not self.retry():
            (dst, _), *_ = (key for key, writer in self._writers.items() if writer in self._late)
            self._until(self.retry, dst, "to send to", lambda: time.sleep(0.001))

    def drop(self) -> None:
        """Drop the messages of a call that was refused: those that are queued, and those that no
        rank reads.
        """
        for writer in self._late:
            writer.queued.clear()
        self._late.clear()
        for src in self._peers:
            for kind in range(_LANES):
                self._inbox(src, kind).drop()

    def fail(self) -> None:
        """Mark the outbox so that readers do not wait for further messages."""
        self._outbox.ended[0] = 1
        for writer in self._writers.values():
            _native.wake(writer.bell)

    # ---- receiving ----
    def recv(self, form: WireFormat, src: int, kind: int = PLANS) -> Work:
        """Request the next message of a rank."""
        return self._inbox(src, kind).request(form, pieces(form.sizes))

    def fetcher(
        self, form: WireFormat, src: int, kind: int = PLANS
    ) -> Callable[[], tuple[Tensor, ...] | None]:
        """For the next message if it is one contiguous tensor, arrives within the time of polling,
        and no earlier one was requested and not read; otherwise the returned function returns None.
        """
        if not _short(form):
            return lambda: None
        monitor, inbox, clock, poll = (
            self._monitor,
            self._inbox(src, kind),
            time.perf_counter,
            self.poll,
        )
        read, requested = inbox.reader.fetcher(form.specs[0], form.sizes[0]), inbox.requested

        def fetch() -> tuple[Tensor, ...] | None:
            if requested or monitor.broken is not None:
                return None
            tensor = read()
            if tensor is None and poll:
                until = clock() + poll
                while tensor is None and clock() < until:
                    tensor = read()
            if tensor is None:
                inbox.polled = True
                return None
            inbox.number += 1
            inbox.polled = False
            return (tensor,)

        return fetch

    def _inbox(self, src: int, kind: int) -> _Inbox:
        inbox = self._inboxes.get((src, kind))
        if inbox is None:
            inbox = self._inboxes[src, kind] = _Inbox(
                self, src, self._peers[src].reader(kind, self._agreement.head)
            )
        return inbox

    def share(
        self, form: WireFormat, tensors: tuple[Tensor, ...] | None, src: int
    ) -> tuple[Tensor, ...]:
        """Broadcast from one rank to the others of its host."""
        if tensors is None:
            return self._fetcher(form, src, SHARED)() or self.recv(form, src, SHARED).wait()
        for dst in self._peers:
            self._sender(form, dst, SHARED)(tensors)
        return tensors

    def wait(self, src: int, reader: LaneReader, number: int, polled: bool) -> None:
        """Until the piece of this number has arrived: poll for a while, unless the caller did, then
        sleep.
        """
        until = 0.0 if polled else time.perf_counter() + self.poll
        while time.perf_counter() <= until:
            if reader.has(number):
                return

        def sleep() -> None:
            reader.sleep(number, _SLICE if self.retry() else 0.001)

        self._until(lambda: reader.has(number), src, "for a message from", sleep)

    def confirm(self) -> None:
        """Raise if the other ranks run another call."""
        self._agreement.confirm()

    def _until(
        self, ready: Callable[[], bool], peer: int, doing: str, sleep: Callable[[], None]
    ) -> None:
        self._monitor.until(ready, peer, doing, sleep, lambda: self._gone(peer))

    def _gone(self, peer: int) -> str:
        self._agreement.check()
        return self._peers[peer].gone()


def _short(form: WireFormat) -> bool:
    """Whether a message is one contiguous tensor and one piece."""
    return form.simple and len(pieces(form.sizes)) == 1


class _Inbox:
    """The receives from one rank that were requested and not read yet."""

    def __init__(self, memory: SharedMemory, src: int, reader: LaneReader):
        self.memory, self.src, self.reader = memory, src, reader
        self.requested: deque[Pending] = deque()
        self.number = 0  # pieces that were requested
        self.polled = False  # for the next piece, without success

    def request(self, form: WireFormat, message: tuple[Piece, ...]) -> Pending:
        self.number += len(message)
        last = self.number - 1

        def finish() -> tuple[Tensor, ...]:
            while self.requested[0] is not work:  # earlier messages lie before this one
                self.requested[0].wait()
            buffers = form.empty(_CPU)
            for piece in message:
                self._read(buffers, piece)
            self.requested.popleft()
            return form.unpack(buffers, _CPU)

        work = Pending(finish, lambda: self.reader.has(last))
        self.requested.append(work)
        return work

    def drop(self) -> None:
        """Drop what was requested and what has arrived."""
        self.requested.clear()
        self.reader.skip()
        self.number, self.polled = self.reader.count, False

    def _read(self, buffers: Sequence[Tensor], piece: Piece) -> None:
        reader = self.reader
        if not reader.has(reader.count):
            self.memory.wait(self.src, reader, reader.count, self.polled)
            self.polled = False
        if not reader.read(buffers, piece):
            self.memory.confirm()  # a message of another call
            raise MismatchError(
                f"rank {self.src} sent a message of another size than the {piece.size} bytes that "
                "rank "
                f"{self.memory.rank} expected; both must run one plan"
            )


def connect(
    monitor: FaultMonitor, agreement: Agreement, gather: Callable[[object], list[Any]]
) -> tuple[SharedMemory | None, bool]:
    """Shared memory with the ranks of this host, by two rounds of ``gather``; None if this rank
    cannot share.

    It is used between ranks of which each could open the other's outbox. Also returns whether every
    two ranks can: the same on all ranks.
    """
    outbox = address = None
    # Lanes in both directions; the rest of a limited address space is for tensors.
    fits = (
        2 * _LANES * LANE * monitor.size <= _native.address_space() / 4
        if _native.AVAILABLE
        else False
    )
    if monitor.size > 1 and fits and os.environ.get(SWITCH, "1") != "0":
        with _or_backend(monitor):
            outbox = _Outbox(monitor.size)
            address = Address(host(), os.getpid(), outbox.file, outbox.token)
    peers: dict[int, _Peer] = {}
    for rank, other in enumerate(gather(address)):
        if (
            rank != monitor.rank
            and outbox is not None
            and address is not None
            and _here(other, address)
        ):
            with _or_backend(monitor):
                peers[rank] = _Peer(other, rank, outbox, monitor.rank, monitor.size)
    opened = gather(tuple(peers))
    whole = all(len(tuple(ranks)) == monitor.size - 1 for ranks in opened)
    if outbox is None or address is None:
        return None, whole
    both = {rank: peer for rank, peer in peers.items() if monitor.rank in tuple(opened[rank])}
    return SharedMemory(monitor, agreement, outbox, both), whole


def _here(other: object, address: Address) -> bool:
    """Whether what a rank gathered is the address of an outbox on this host."""
    if not isinstance(other, Address) or tuple(map(type, other)) != tuple(map(type, address)):
        return False
    return other.host == address.host


@contextmanager
def _or_backend(monitor: FaultMonitor) -> Iterator[None]:
    """Ignore what the system refuses: the backend then carries the messages. It needs file
    descriptors too.
    """
    try:
        yield
    except OSError as error:  # another user's memory, or no memory files, or no address space
        if error.errno in (errno.EMFILE, errno.ENFILE):
            failure = GroupError(
                f"this process cannot open another file ({error}); raise the limit of open files, "
                "as with "
                "ulimit -n 4096"
            )
            monitor.failed(failure)  # the others wait for this rank
            raise failure from error
