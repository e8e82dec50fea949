"""What each rank did last and whom it waits for, shared through the store of torch.distributed for error messages.

Noting only sets an attribute; a daemon thread writes what changed ten times a second, so that a rank which is
killed or stopped leaves its last known action behind, and every second that it is alive. Failing to write is no
failure: a journal never makes a step fail. Knows nothing of messages.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from datetime import timedelta
from typing import NamedTuple

from ._store import Store, own

EVERY = 0.1
BEAT = 1.0
_PATIENCE = timedelta(seconds=2)


class Entry(NamedTuple):
    """What is known of a rank: since when it did what, whom it waited for, how it failed, how often it was heard."""

    when: float
    note: str
    peer: int | None = None
    failure: str = ""
    lost: bool = False
    beat: int = 0

    @property
    def ago(self) -> str:
        """How long ago, in words."""
        return f"{max(0.0, time.time() - self.when):.1f} s ago"


class Journal:
    """The notes of one rank, and the others' by rank.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> mine, yours = (Journal(store, rank) for rank in range(2))
    >>> mine.note("3F1"); mine.write(); yours.last(0).note; mine.close()
    '3F1'
    """

    def __init__(self, store: Store, rank: int):
        self._rank = rank
        self._pulse = _Pulse(own(store, _PATIENCE), f"last/{rank}")
        weakref.finalize(self, self._pulse.stop)

    def note(self, text: str) -> None:
        """Keep the newest note; the pulse writes it."""
        self._pulse.text = text
        if not self._pulse.started:
            self._pulse.start()

    def waits(self, peer: int | None) -> None:
        """Keep whom this rank waits for now."""
        self._pulse.peer = peer

    @property
    def here(self) -> str:
        """This rank's newest note."""
        return self._pulse.text

    def write(self) -> None:
        """Write what changed, now."""
        self._pulse.write()

    def failed(self, text: str, peer: int | None = None, lost: bool = False) -> None:
        """Leave word of this rank's failure, at once: of whom it waited for, and whether that one was lost."""
        self._pulse.set(f"failed/{self._rank}", Entry(time.time(), self.here, peer, text, lost))

    def last(self, rank: int) -> Entry | None:
        """What a rank wrote last, if anything."""
        return self._pulse.get(f"last/{rank}")

    def failure(self, rank: int) -> Entry | None:
        """How a rank failed, if it left word."""
        return self._pulse.get(f"failed/{rank}")

    def close(self) -> None:
        """End the thread."""
        self._pulse.stop()


class _Pulse:
    """The thread and its connection; knows no journal, so that a forgotten journal ends it."""

    def __init__(self, store: Store, key: str):
        self.text = ""
        self.peer: int | None = None
        self.started = False
        self._written: tuple[str, int | None] = ("", None)
        self._since = self._last = 0.0
        self._count = 0
        self._store: Store | None = store
        self._key = key
        self._end = threading.Event()
        self._lock = threading.RLock()
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
        self.write()
        while not self._end.wait(EVERY):
            self.write()

    def write(self) -> None:
        with self._lock:
            state, now = (self.text, self.peer), time.time()
            if state != self._written:
                self._written, self._since = state, now
            elif now - self._last < BEAT:
                return
            self._last, self._count = now, self._count + 1
            self.set(self._key, Entry(self._since, *state, beat=self._count))

    def set(self, key: str, entry: Entry) -> None:
        with self._lock:
            if self._store is None:
                return
            try:
                self._store.set(key, json.dumps(entry))
            except RuntimeError:  # the process that kept the store is gone
                self._store = None

    def get(self, key: str) -> Entry | None:
        with self._lock:
            if self._store is None:
                return None
            try:
                return Entry(*json.loads(self._store.get(key))) if self._store.check([key]) else None
            except RuntimeError:
                self._store = None
                return None
