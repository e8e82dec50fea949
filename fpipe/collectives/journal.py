"""What each rank did last, shared through the store of torch.distributed, for the others' error messages.

``note`` only keeps a string; a daemon thread writes the newest one every quarter of a second where it changed, so
that a rank which is killed leaves its last known action behind. Failing to write is no failure: a journal never makes
a step fail. Knows nothing of messages.
"""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta

from ._store import Store, own

EVERY = 0.25
_PATIENCE = timedelta(seconds=2)


class Journal:
    """The notes of one rank, and the others' by rank.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> mine, yours = (Journal(store, rank) for rank in range(2))
    >>> mine.note("3F1"); mine.write(); yours.last(0); mine.close()
    '3F1 (0.0 s ago)'
    """

    def __init__(self, store: Store, rank: int):
        self._rank = rank
        self._pulse = _Pulse(own(store, _PATIENCE), f"last/{rank}")
        self._store = store
        weakref.finalize(self, self._pulse.stop)

    def note(self, text: str) -> None:
        """Keep the newest note; the pulse writes it."""
        self._pulse.text = text
        if not self._pulse.started:
            self._pulse.start()

    @property
    def here(self) -> str:
        """This rank's newest note."""
        return self._pulse.text

    def write(self) -> None:
        """Write the newest note now."""
        self._pulse.write()

    def failed(self, text: str) -> None:
        """Leave word of this rank's failure, at once."""
        self.write()
        self._pulse.set(f"failed/{self._rank}", f"{time.time()}|{text}")

    def last(self, rank: int) -> str | None:
        """What a rank noted last and how long ago, where it is known."""
        found = self._get(f"last/{rank}")
        return None if found is None else f"{found[1]} ({max(0.0, time.time() - found[0]):.1f} s ago)"

    def failures(self, size: int) -> list[tuple[int, str]]:
        """(rank, what it said) of every rank that left word of a failure, the first failure first."""
        found = [(rank, self._get(f"failed/{rank}")) for rank in range(size)]
        known = sorted((entry[0], rank, entry[1]) for rank, entry in found if entry is not None)
        return [(rank, text) for _, rank, text in known]

    def close(self) -> None:
        """End the thread."""
        self._pulse.stop()

    def _get(self, key: str) -> tuple[float, str] | None:
        raw = self._pulse.get(key)
        if raw is None:
            return None
        when, _, text = raw.partition("|")
        return float(when), text


class _Pulse:
    """The thread and its connection; knows no journal, so that a forgotten journal ends it."""

    def __init__(self, store: Store, key: str):
        self.text = ""
        self.started = False
        self._written = ""
        self._store: Store | None = store
        self._key = key
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.started = True
        self._thread = threading.Thread(target=self._beat, name="fpipe-journal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_PATIENCE.total_seconds() + EVERY)
        self._thread = None

    def _beat(self) -> None:
        while not self._end.wait(EVERY):
            self.write()

    def write(self) -> None:
        text = self.text
        if text != self._written:
            self.set(self._key, f"{time.time()}|{text}")
            self._written = text

    def set(self, key: str, value: str) -> None:
        with self._lock:
            if self._store is None:
                return
            try:
                self._store.set(key, value)
            except RuntimeError:  # the process that kept the store is gone
                self._store = None

    def get(self, key: str) -> str | None:
        with self._lock:
            if self._store is None:
                return None
            try:
                return self._store.get(key).decode() if self._store.check([key]) else None
            except RuntimeError:
                self._store = None
                return None
