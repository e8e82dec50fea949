# SPDX-License-Identifier: Apache-2.0
"""Gathering of objects through the store: no device and no backend is needed, and an error names a
missing rank.

Objects are data (``codec.py``): to read them runs no code. For handshakes and barriers, a few per
step at most. This module must not know messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from ..errors import GroupError
from .bounded import BoundedStore, host
from .codec import decode, encode
from .faults import FaultMonitor
from .journal import Entry

#: seconds that the rank which hosts the store waits at most for all others to leave a round
_LINGER = 5.0
_SLICE = 0.5  #: seconds between two looks at the calls and failures of other ranks
#: What the journal entry of a rank that traces begins with.
TRACING = "tracing"
_BUSY = 0.05  #: seconds of its processor that a rank which computes uses in each beat, at least
_TRACING_LIMIT = 10


#: The object of every rank, by rank, of the object of this one.
Gather: TypeAlias = Callable[[object], list[Any]]


class Rendezvous(NamedTuple):
    """Numbered rounds in which every rank contributes one object; a round ends when all objects
    were read.

    ``check`` is called while a rank waits; it raises where the other ranks are known not to come.
    ``next_round`` returns the number of the next round.
    """

    store: BoundedStore
    monitor: FaultMonitor
    check: Callable[[], object]
    next_round: Callable[[], int]

    def gather(self, obj: object) -> list[Any]:
        """The object of every rank, by rank."""
        monitor = self.monitor
        store = self.store
        monitor.check()
        number = self.next_round()
        if monitor.size == 1:
            return [obj]
        try:
            raw = encode(obj)
        except GroupError as error:
            monitor.failed(error)  # the others wait for this rank
            raise
        start = time.monotonic()
        with monitor.waiting(None, "to meet"):
            store.set(f"round/{number}/{monitor.rank}", raw)
            if number >= 2:  # a rank in round n-1 has read all of round n-2, and rank 0 has left it
                store.delete(*(f"{kind}/{number - 2}/{monitor.rank}" for kind in ("round", "left")))
        objects = [
            obj if rank == monitor.rank else self._read(number, rank, start)
            for rank in range(monitor.size)
        ]
        self._leave(number)
        return objects

    def _read(self, number: int, rank: int, start: float) -> Any:
        with self.monitor.waiting(rank, "to meet", start=start):
            self._await(number, rank, start)
            return decode(self.store.get(f"round/{number}/{rank}"))

    def _await(self, number: int, rank: int, start: float) -> None:
        """Wait until a rank has come, at most a time-out from the start of the round; raises if any
        rank that has not come will not.

        A first trace may take longer than any message: while the rank traces and its process
        computes, the time-out begins again, for up to ``_TRACING_LIMIT`` times as long.
        """
        monitor = self.monitor
        seconds = monitor.timeout
        ranks = count(rank)
        before = None
        now = time.monotonic()
        end = start + seconds
        key = f"round/{number}/{rank}"
        while not self.store.appears(key, end, now + _SLICE):
            now = time.monotonic()
            self.check()
            self._ask(number, next(ranks) % monitor.size)
            entry = monitor.last(rank)
            if _traces(before, entry):
                end = min(now + seconds, start + _TRACING_LIMIT * seconds)
                monitor.journal.prolong(end - now)
            if now >= end:
                raise RuntimeError(f"timed out: rank {rank} has not called it")
            before = entry

    def _ask(self, number: int, rank: int) -> None:
        """Raise if a rank that has not come to a round will not."""
        try:
            self.monitor.ask(rank)
        except RuntimeError as error:
            if not self.store.check(f"round/{number}/{rank}"):
                raise self.monitor.diagnose(error, rank, "to meet") from None

    def _leave(self, number: int) -> None:
        """The rank that hosts the store leaves last: its process may exit right after."""
        store = self.store
        monitor = self.monitor
        with suppress(RuntimeError):  # all objects were read: the next message reports a lost rank
            if monitor.me != host()[1]:
                # without an answer: a store that is lost delays no rank
                store.set(f"left/{number}/{monitor.rank}", "")
                return
            end = time.monotonic() + min(_LINGER, monitor.timeout / 8)
            for other in range(1, monitor.size):
                store.appears(f"left/{number}/{other}", end)


def _traces(before: Entry | None, entry: Entry | None) -> bool:
    """Whether a rank traces, and began to or used its processor between two entries, if there are
    two.
    """
    if entry is None or entry.peers or not entry.note.startswith(TRACING):
        return False
    return before is None or entry.note != before.note or entry.busy - before.busy > _BUSY
