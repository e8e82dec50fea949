"""The ranks of a group that run on one host, and their messages through memory that they share.

Each rank keeps an outbox, a file in memory without a name, that the others open through its process: nothing is left
behind, however a rank ends. A send has its bytes copied when it returns; one that finds no room is kept, and goes when
this rank next sends or waits, so sends never block. Whoever waits looks, then sleeps, and now and then asks whether the
sender still lives. Knows no backend: where ranks are on several hosts, theirs carries the messages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import MismatchError
from ..faults import Watch
from ..group import Done, Work
from ..wire import Wire
from . import _futex
from .mailbox import LANE, PAGE, Inlet, Outlet, Piece, pieces

#: Set to 0, this keeps messages of one host on the backend too.
SWITCH = "FPIPE_SHARED_MEMORY"
#: ProgramSet of lanes between two ranks: the messages of plans, and what one rank tells all.
PLANS, SHARED = 0, 1
_LANES = 2
_TOKEN = 16
_LOOK = 400e-6  #: seconds to look before sleeping, where every rank has a core of its own
_SLICE = 0.05  #: seconds to sleep before asking whether the sender lives
_CPU = torch.device("cpu")
_SENT = Done()


class Offer(NamedTuple):
    """What a rank says of itself: its host, and where its outbox is found."""

    host: str
    process: int
    file: int
    token: bytes


def host() -> str:
    """What two processes must have in common to share memory; network namespaces stand for hosts of their own."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))))


class _Outbox:
    """This rank's memory, one lane for every other rank and kind."""

    def __init__(self, size: int):
        self.file = os.memfd_create("fpipe")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, PAGE + size * _LANES * LANE)
        self.token = os.urandom(_TOKEN)
        self._page = mmap.mmap(self.file, PAGE)
        self._page[:_TOKEN] = self.token
        self.ended = ctypes.c_uint32.from_buffer(self._page, 64)

    def lane(self, dst: int, kind: int) -> Outlet:
        return Outlet(_lane(self.file, dst, kind))


class _Neighbour:
    """Another rank's memory, and whether its process lives."""

    def __init__(self, offer: Offer, me: int):
        self._me = me
        self.file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self._page = mmap.mmap(self.file, PAGE)
        if self._page[:_TOKEN] != offer.token:
            raise OSError("another process has this number here")
        self._ended = ctypes.c_uint32.from_buffer(self._page, 64)
        self._process = os.pidfd_open(offer.process)
        weakref.finalize(self, os.close, self._process)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)

    def lane(self, kind: int) -> Inlet:
        return Inlet(_lane(self.file, self._me, kind))

    def gone(self) -> str:
        """Why nothing more will come; empty while something may."""
        if self._ended.value:
            return "it failed, and ended its messages"
        return "its process has ended" if self._poll.poll(0) else ""


def _lane(file: int, dst: int, kind: int) -> mmap.mmap:
    return mmap.mmap(file, LANE, offset=PAGE + (dst * _LANES + kind) * LANE)


class Nearby:
    """Messages of one rank to and from those of its host."""

    def __init__(self, rank: int, size: int, watch: Watch):
        self.rank, self.size = rank, size
        self._watch = watch
        self._outbox = _Outbox(size)
        self._peers: dict[int, _Neighbour] = {}
        self._out: dict[tuple[int, int], Outlet] = {}
        self._in: dict[tuple[int, int], _Waiting] = {}
        self._late: list[Outlet] = []
        self.look = 0.0

    def offer(self) -> Offer:
        """For the other ranks."""
        return Offer(host(), os.getpid(), self._outbox.file, self._outbox.token)

    def open(self, offers: Sequence[Offer | None]) -> tuple[int, ...]:
        """Open the outboxes of this host's ranks; those that could be opened, this rank among them."""
        mine = offers[self.rank]
        assert mine is not None
        for rank, offer in enumerate(offers):
            if rank != self.rank and offer is not None and offer.host == mine.host:
                try:
                    self._peers[rank] = _Neighbour(offer, self.rank)
                except OSError:  # of another user, or hidden: the backend carries the messages
                    continue
        return tuple(sorted((*self._peers, self.rank)))

    def keep(self, ranks: Sequence[int]) -> None:
        """Have messages with these ranks alone: those that could open this one's outbox, too."""
        self._peers = {rank: peer for rank, peer in self._peers.items() if rank in ranks}
        self.look = _LOOK if len(self._peers) < len(os.sched_getaffinity(0)) else 0.0

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    @property
    def all(self) -> bool:
        """Whether every rank is on this host."""
        return len(self._peers) == self.size - 1

    # ---- messages -----------------------------------------------------------------------------------------------
    def send(self, way: Wire, tensors: Sequence[Tensor], dst: int, kind: int = PLANS) -> Work:
        """Copy a message out; what finds no room goes later, by itself."""
        outlet = self._outlet(dst, kind)
        if self._late:
            self.pump()
        if not outlet.put(way.pack(tensors, self.rank, dst), pieces(way.sizes)) and outlet not in self._late:
            self._late.append(outlet)
        return _SENT

    def _outlet(self, dst: int, kind: int) -> Outlet:
        found = self._out.get((dst, kind))
        if found is None:
            found = self._out[dst, kind] = self._outbox.lane(dst, kind)
        return found

    def sender(self, way: Wire, dst: int) -> Callable[[tuple[Tensor, ...]], object]:
        """:meth:`send`, made ready for messages of one kind."""
        watch = self._watch
        carry = self._outlet(dst, PLANS).carrier(way.specs[0], way.sizes[0]) if _short(way) else lambda _: False

        def send(tensors: tuple[Tensor, ...]) -> None:
            if watch.broken is not None:
                watch.check()
            if len(tensors) != 1 or not carry(tensors[0]):
                self.send(way, tensors, dst)

        return send

    def recv(self, way: Wire, src: int, kind: int = PLANS) -> Work:
        """Ask for the next message of a rank."""
        return self._inlet(src, kind).ask(way, pieces(way.sizes))

    def fetcher(self, way: Wire, src: int) -> Callable[[], Tensor | None]:
        """Gives the next message if it is one plain tensor, and there or about to come, and no other was asked for
        before it."""
        if not _short(way):
            return lambda: None
        watch, waiting, clock, look = self._watch, self._inlet(src, PLANS), time.perf_counter, self.look
        fetch, asked = waiting.inlet.fetcher(way.specs[0], way.sizes[0]), waiting.asked

        def take() -> Tensor | None:
            if asked or watch.broken is not None:
                return None
            found = fetch()
            if found is None and look:
                until = clock() + look
                while found is None and clock() < until:
                    found = fetch()
            if found is not None:
                waiting.number += 1
            waiting.looked = found is None
            return found

        return take

    def _inlet(self, src: int, kind: int) -> _Waiting:
        found = self._in.get((src, kind))
        if found is None:
            found = self._in[src, kind] = _Waiting(self, src, self._peers[src].lane(kind))
        return found

    def share(self, way: Wire, tensors: tuple[Tensor, ...] | None, src: int) -> tuple[Tensor, ...]:
        """From one rank to all."""
        if tensors is None:
            return self.recv(way, src, SHARED).wait()
        for dst in self._peers:
            self.send(way, tensors, dst, SHARED)
        return tensors

    def pump(self) -> bool:
        """Send what found no room before; whether nothing is left."""
        self._late = [outlet for outlet in self._late if not outlet.pump()]
        return not self._late

    def flush(self) -> None:
        """Until nothing is left."""
        if self.pump():
            return
        start = time.monotonic()
        (dst, _), *_ = (key for key, outlet in self._out.items() if outlet in self._late)
        with self._watch.talking(dst, "to send to"):
            while not self.pump():
                _patient(start, self._watch.timeout, self._peers[dst])
                time.sleep(0.001)

    def fail(self) -> None:
        """Tell who waits, or will, that nothing more comes from here."""
        self._outbox.ended.value = 1
        for outlet in self._out.values():
            _futex.wake(outlet.bell)

    def wait(self, src: int, inlet: Inlet, number: int, looked: bool) -> None:
        """Until a piece has come from a rank, by its number: look for a while, unless that was done, then sleep."""
        until = 0.0 if looked else time.perf_counter() + self.look
        while not inlet.there(number):
            if time.perf_counter() > until:
                break
        else:
            return
        start = time.monotonic()
        with self._watch.talking(src, "for a message from"):
            while not inlet.there(number):
                inlet.sleep(number, _SLICE if self.pump() else 0.001)
                if not inlet.there(number):
                    _patient(start, self._watch.timeout, self._peers[src])


def _short(way: Wire) -> bool:
    """Whether a message is one plain tensor that travels at once."""
    return way.simple and len(pieces(way.sizes)) == 1


def _patient(start: float, timeout: float, peer: _Neighbour) -> None:
    """Raise where there is nothing to wait for any more."""
    gone = peer.gone()
    if gone:
        raise RuntimeError(gone)
    if time.monotonic() - start > timeout:
        raise RuntimeError("timed out")


class _Waiting:
    """The receives from one rank that were asked for and not had yet."""

    def __init__(self, nearby: Nearby, src: int, inlet: Inlet):
        self.nearby, self.src, self.inlet = nearby, src, inlet
        self.asked: deque[_Receipt] = deque()
        self.number = 0  # pieces that were asked for
        self.looked = False  # for the next piece, in vain

    def ask(self, way: Wire, message: tuple[Piece, ...]) -> _Receipt:
        self.number += len(message)
        receipt = _Receipt(self, way, message, self.number - 1)
        self.asked.append(receipt)
        return receipt

    def bring(self, receipt: _Receipt) -> None:
        """Have a message, and those before it."""
        while receipt.tensors is None:
            first = self.asked[0]
            buffers = first.way.empty(_CPU)
            for piece in first.message:
                self._take(buffers, piece)
            first.tensors = first.way.unpack(buffers, _CPU)
            self.asked.popleft()

    def _take(self, buffers: Sequence[Tensor], piece: Piece) -> None:
        inlet = self.inlet
        if not inlet.there(inlet.count):
            self.nearby.wait(self.src, inlet, inlet.count, self.looked)
            self.looked = False
        if not inlet.take(buffers, piece):
            raise MismatchError(
                f"rank {self.src} sent a message of another size than the {piece.size} bytes that rank "
                f"{self.nearby.rank} expected; both must run one plan"
            )


class _Receipt:
    __slots__ = ("message", "number", "tensors", "waiting", "way")

    def __init__(self, waiting: _Waiting, way: Wire, message: tuple[Piece, ...], number: int):
        self.waiting, self.way, self.message, self.number = waiting, way, message, number
        self.tensors: tuple[Tensor, ...] | None = None

    def done(self) -> bool:
        return self.tensors is not None or self.waiting.inlet.there(self.number)

    def wait(self) -> tuple[Tensor, ...]:
        if self.tensors is None:
            self.waiting.bring(self)
        assert self.tensors is not None
        return self.tensors


def meet(rank: int, size: int, watch: Watch, gather: Callable[[object], list[Any]]) -> Nearby | None:
    """The ranks of this host, found by two rounds of ``gather``; None where there are no others, or they cannot."""
    nearby = offer = None
    if size > 1 and _futex.AVAILABLE and os.environ.get(SWITCH, "1") != "0":
        try:
            nearby = Nearby(rank, size, watch)
            offer = nearby.offer()
        except OSError:  # no such memory, or no word of this host, where this runs
            nearby = None
    offers = gather(offer)
    opened = gather(() if nearby is None else nearby.open(offers))
    if nearby is None:
        return None
    nearby.keep([peer for peer in opened[rank] if rank in opened[peer]])
    return nearby
