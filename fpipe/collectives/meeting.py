"""Ranks that meet through the store: no device and no backend takes part, and who has not come is named.

For handshakes and barriers, a few a step at most. Knows no message.
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

from ._store import Store
from .faults import Watch

_PARTING = timedelta(seconds=5)


class Meeting:
    """Rounds of "everybody says one thing"; round n begins when everybody has come to it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, watch: Watch):
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._watch = timeout, watch
        self._round = 0

    def gather(self, obj: object) -> list[Any]:
        """What every rank said, by rank."""
        self._watch.check()
        number, self._round = self._round, self._round + 1
        if self._size == 1:
            return [obj]
        with self._watch.talking(None, "to meet"):
            self._store.set(f"round/{number}/{self._rank}", pickle.dumps(obj))  # pyright: ignore[reportArgumentType]  # bytes are fine
            if number >= 2:  # everybody who is in round n-1 has read round n-2
                self._store.delete_key(f"round/{number - 2}/{self._rank}")
        said = [obj if rank == self._rank else self._hear(number, rank) for rank in range(self._size)]
        self._leave(number)
        return said

    def _leave(self, number: int) -> None:
        """Rank 0 goes last: it may keep the store, and its process may end right after."""
        try:
            if self._rank:
                self._store.set(f"left/{number}/{self._rank}", "")
            else:
                self._store.wait([f"left/{number}/{rank}" for rank in range(1, self._size)], _PARTING)
            if number >= 2:
                self._store.delete_key(f"left/{number - 2}/{self._rank}")
        except RuntimeError:  # everybody has been heard: who is gone by now is missed by the next message
            pass

    def _hear(self, number: int, rank: int) -> Any:
        key = f"round/{number}/{rank}"
        start = time.monotonic()
        with self._watch.talking(rank, "to meet"):
            while True:
                left = self._timeout - (time.monotonic() - start)
                if left <= 0:
                    raise RuntimeError(f"timed out: rank {rank} has not come")
                if self._arrived(key, min(left, 5.0)):
                    return pickle.loads(self._store.get(key))
                if self._watch.journal.failure(rank) is not None:
                    raise RuntimeError(f"rank {rank} failed before it came")

    def _arrived(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                return False
            raise
        return True
