"""Ranks that meet through the store: no device and no backend takes part, and who has not come is named.

For handshakes and barriers, a few a step at most. Looks again and again rather than letting the store block: a wait in
the store that ends without a result writes warnings of its own. Knows no message.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from ._store import Store
from .faults import Watch

_PARTING = 5.0  #: seconds that rank 0 stays for the others to leave
_FIRST, _SLOWEST = 0.0005, 0.02  #: seconds between two looks, at first and later
_FAILURES = 1.0  #: seconds between two looks for word of a failure


class Meeting:
    """Rounds of "everybody says one thing"; a round ends when everybody has been heard."""

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

    def _hear(self, number: int, rank: int) -> Any:
        key = f"round/{number}/{rank}"
        with self._watch.talking(rank, "to meet"):
            if not self._there(key, rank, self._timeout):
                raise RuntimeError(f"timed out: rank {rank} has not come")
            return pickle.loads(self._store.get(key))

    def _there(self, key: str, rank: int | None, seconds: float) -> bool:
        """Look until a key is there; word of the rank's failure ends it."""
        now = start = failures = time.monotonic()
        pause = _FIRST
        while not self._store.check([key]):
            now = time.monotonic()
            if now - start > seconds:
                return False
            if rank is not None and now - failures > _FAILURES:
                failures = now
                if self._watch.journal.failure(rank) is not None:
                    raise RuntimeError(f"rank {rank} failed before it came")
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST)
        return True

    def _leave(self, number: int) -> None:
        """Rank 0 goes last: it may keep the store, and its process may end right after."""
        try:
            if self._rank:
                self._store.set(f"left/{number}/{self._rank}", "")
            for rank in range(1, self._size) if self._rank == 0 else ():
                self._there(f"left/{number}/{rank}", None, _PARTING)
            if number >= 2 and self._rank:
                self._store.delete_key(f"left/{number - 2}/{self._rank}")
        except RuntimeError:  # everybody has been heard: who is gone by now is missed by the next message
            return
