# SPDX-License-Identifier: Apache-2.0
"""Gathering of objects through the store: no device and no backend is needed, and an error names a missing rank.

Objects are data (``data.py``): to read them runs no code. For handshakes and barriers, a few per step at most. It
polls: a blocking wait of the store prints warnings when it ends without a result. This module must not know messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ..errors import GroupError
from .bounded import BoundedStore
from .data import decode, encode
from .faults import FaultMonitor

_LINGER = 5.0  #: seconds that rank 0, which may host the store, waits for the others to leave a round
_POLL_FIRST, _POLL_LAST = 0.0005, 0.02  #: seconds between two polls, initially and at most
_POLL_FAILURES = 1.0  #: seconds between two polls for a reported failure


class Rendezvous:
    """Numbered rounds in which every rank contributes one object; a round ends when all objects were read.

    ``check`` is called while a rank waits; it raises where the other ranks are known not to come.
    """

    def __init__(self, store: BoundedStore, monitor: FaultMonitor, check: Callable[[], object]):
        self._store, self._monitor, self._check = store, monitor, check
        self._rounds = count()

    def gather(self, obj: object) -> list[Any]:
        """The object of every rank, by rank."""
        monitor, store = self._monitor, self._store
        monitor.check()
        number = next(self._rounds)
        if monitor.size == 1:
            return [obj]
        raw = self._encoded(obj)
        with monitor.waiting(None, "to meet"):
            store.set(f"round/{number}/{monitor.rank}", raw)
            if number >= 2:  # a rank in round n-1 has read all of round n-2
                store.delete_key(f"round/{number - 2}/{monitor.rank}")
        objects = [obj if rank == monitor.rank else self._read(number, rank) for rank in range(monitor.size)]
        self._leave(number)
        return objects

    def _encoded(self, obj: object) -> bytes:
        try:
            return encode(obj)
        except GroupError as error:
            self._monitor.failed(error)  # the others wait for this rank
            raise

    def _read(self, number: int, rank: int) -> Any:
        key = f"round/{number}/{rank}"
        with self._monitor.waiting(rank, "to meet"):
            if not self._appears(key, rank, self._monitor.timeout):
                raise RuntimeError(f"timed out: rank {rank} has not called it")
            return decode(self._store.get(key))

    def _appears(self, key: str, rank: int | None, seconds: float) -> bool:
        """Poll until a key is set; raises if the rank that should set it reports a failure."""
        start = checked = time.monotonic()
        pause = _POLL_FIRST
        while not self._store.check([key]):
            now = time.monotonic()
            if now - start > seconds:
                return False
            if rank is not None:
                self._check()
            if rank is not None and now - checked > _POLL_FAILURES:
                checked = now
                if self._monitor.journal.failure(rank) is not None:
                    raise RuntimeError(f"rank {rank} failed before it called it")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_LAST)
        return True

    def _leave(self, number: int) -> None:
        """Rank 0 leaves last: its process may host the store, and may exit right after."""
        store, rank, size = self._store, self._monitor.rank, self._monitor.size
        try:
            if rank == 0:
                for other in range(1, size):
                    self._appears(f"left/{number}/{other}", None, _LINGER)
                return
            store.set(f"left/{number}/{rank}", "")
            if number >= 2:
                store.delete_key(f"left/{number - 2}/{rank}")
        except RuntimeError:  # all objects were read: the next message reports a rank that is gone
            return
