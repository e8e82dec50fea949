# SPDX-License-Identifier: Apache-2.0
"""Messages between CPU ranks through TCP, where they share no memory: between hosts, or on other
systems than Linux.

A send returns when the system has its bytes, or has queued them: a thread, which sleeps while
nothing is queued, sends the rest. Messages wait in the memory of the system until their receiver
needs them. A waiting rank polls, then sleeps until something arrives, and regularly checks the
other ranks. This module must not know backends: they carry the collectives.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import GroupError, MismatchError
from ..agreement import Agreement
from ..faults import FaultMonitor
from ..group import Done, Pending, Sender, Work
from ..wire import WireFormat
from .connecting import Links
from .progress import Progress
from .stream import Incoming, Stream
from .words import Words

#: The two connections between two ranks: messages of plans, and broadcasts.
PLANS, SHARED = 0, 1
_POLL = 400e-6  #: seconds to poll before sleeping, where every rank has a core
_SLICE = 0.05  #: seconds to sleep between two checks of the other ranks
_CPU = torch.device("cpu")
_SENT = Done()


class Sockets:
    """Messages of one rank to and from the ranks of other hosts; ``rank in sockets`` tells which
    those are.
    """

    def __init__(
        self, monitor: FaultMonitor, agreement: Agreement, links: Mapping[int, Links], poll: bool
    ):
        self.rank = monitor.rank
        self._monitor, self._agreement = monitor, agreement
        self._poll = _POLL if poll else 0.0
        self._connect(links)

    def _connect(self, links: Mapping[int, Links]) -> None:
        self._streams = {
            (rank, kind): Stream(connection, self._agreement.head)
            for rank, both in links.items()
            for kind, connection in enumerate((both.plans, both.shared))
        }
        self._begun: dict[
            int, Work
        ] = {}  # by rank: the message that a fetch requested, and that had not arrived
        self._progress = Progress()
        self.words = Words({rank: both.words for rank, both in links.items()}, self._poll)
        self._ranks = frozenset(links)

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def renew(self, links: Mapping[int, Links]) -> None:
        """Use other connections, to the same ranks: what is under way through the old ones is
        dropped.
        """
        self.close()
        if self._ranks != frozenset(links):
            missing = ", ".join(
                str(self._monitor.names[rank]) for rank in sorted(self._ranks - frozenset(links))
            )
            raise GroupError(
                f"rank {self._monitor.me} cannot connect to rank {missing} again; start the job "
                "anew"
            )
        self._connect(links)

    def send(
        self, form: WireFormat, tensors: Sequence[Tensor], dst: int, kind: int = PLANS
    ) -> Work:
        """Send a message; what the system does not take at once is sent later."""
        stream = self._streams[dst, kind]
        if not stream.send(form.pack(tensors, self.rank, dst), form.sizes):
            self._progress.send(stream)
        return _SENT

    def sender(self, form: WireFormat, dst: int) -> Sender:
        """:meth:`send` for messages of one form."""
        monitor = self._monitor

        def send(tensors: tuple[Tensor, ...]) -> None:
            if monitor.broken is not None:
                monitor.check()
            self.send(form, tensors, dst)

        return send

    def fetcher(self, form: WireFormat, src: int) -> Callable[[], tuple[Tensor, ...] | None]:
        """For the next message if it arrives within the time of polling, and no earlier one was
        requested and not read; otherwise the returned function returns None, and :meth:`recv`
        continues.
        """
        monitor, clock, poll = self._monitor, time.perf_counter, self._poll

        def fetch() -> tuple[Tensor, ...] | None:
            stream = self._streams[src, PLANS]
            if stream.requested or monitor.broken is not None:
                return None
            buffers = form.empty(_CPU)
            frame = stream.request(buffers, form.sizes)
            stream.fill()
            if frame.left and poll:
                until = clock() + poll
                while frame.left and not stream.odd and clock() < until:
                    stream.fill()
            if not frame.left:
                return form.unpack(buffers, _CPU)
            self._begun[src] = self._work(form, stream, frame, buffers, src)
            return None

        return fetch

    def share(
        self, form: WireFormat, tensors: tuple[Tensor, ...] | None, src: int
    ) -> tuple[Tensor, ...]:
        """Broadcast from one rank to those that it is connected to."""
        if tensors is None:
            return self.recv(form, src, SHARED).wait()
        for dst in self._ranks:
            self.send(form, tensors, dst, SHARED)
        return tensors

    def recv(self, form: WireFormat, src: int, kind: int = PLANS) -> Work:
        """Request the next message of a rank."""
        if kind == PLANS and src in self._begun:
            return self._begun.pop(src)
        stream, buffers = self._streams[src, kind], form.empty(_CPU)
        return self._work(form, stream, stream.request(buffers, form.sizes), buffers, src)

    def _work(
        self, form: WireFormat, stream: Stream, frame: Incoming, buffers: list[Tensor], src: int
    ) -> Pending:
        def finish() -> tuple[Tensor, ...]:
            if frame.left:
                self._wait(stream, frame, src)
            return form.unpack(buffers, _CPU)

        def ready() -> bool:
            stream.fill()
            return not frame.left

        return Pending(finish, ready)

    def flush(self) -> None:
        """Wait until no message is queued."""
        for (dst, _), stream in self._streams.items():
            if stream.queued:
                self._until(
                    lambda stream=stream: not stream.queued,
                    dst,
                    "to send to",
                    lambda: time.sleep(0.001),
                )

    def close(self) -> None:
        """End the connections at once: what is under way is lost."""
        self._progress.close()
        for stream in self._streams.values():
            stream.close()
        self.words.close()

    def fail(self) -> None:
        """End the messages of this rank, so that the others do not wait for further ones."""
        for stream in self._streams.values():
            stream.finish()
        self.words.finish()

    # ---- waiting ----
    def _wait(self, stream: Stream, frame: Incoming, src: int) -> None:
        until = time.perf_counter() + self._poll
        while not self._arrived(stream, frame, src) and time.perf_counter() < until:
            pass
        if frame.left:
            ready = select.poll()
            ready.register(stream.connection, select.POLLIN)

            def sleep():
                return ready.poll(1e3 * _SLICE)

            self._until(lambda: self._arrived(stream, frame, src), src, "for a message from", sleep)

    def _arrived(self, stream: Stream, frame: Incoming, src: int) -> bool:
        stream.fill()
        if frame.left and stream.odd:
            self._agreement.confirm()  # a message of another call
            raise MismatchError(
                f"rank {src} sent another message than the {frame.size} bytes that rank "
                f"{self.rank} "
                "expected; both must run one plan"
            )
        return not frame.left

    def _until(
        self, ready: Callable[[], bool], peer: int, doing: str, sleep: Callable[[], object]
    ) -> None:
        self._monitor.until(ready, peer, doing, sleep, lambda: self._gone(peer))

    def _gone(self, peer: int) -> str:
        self._agreement.check()
        return next(filter(None, (self._streams[peer, kind].ended for kind in (PLANS, SHARED))), "")
