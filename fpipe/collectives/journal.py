# SPDX-License-Identifier: Apache-2.0
"""What each rank did last and which rank it waits for, published through the store for error messages.

Recording sets an attribute; a daemon thread writes changes ten times a second, so that the last action of a rank that
is killed or stopped stays known, and once a second without changes, as a sign of life. A journal never makes a step
fail: errors of the store are ignored. This module must not know messages.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from datetime import timedelta
from typing import NamedTuple

from ._store import Store, connection

EVERY = 0.1
BEAT = 1.0
_PATIENCE = timedelta(seconds=2)


class Entry(NamedTuple):
    """The state of a rank: its action since ``when``, the rank it waits for, its failure, and the writes so far.

    ``lost``: the failure is a broken connection to ``peer``.
    """

    when: float
    note: str
    peer: int | None = None
    failure: str = ""
    lost: bool = False
    beat: int = 0

    @property
    def ago(self) -> str:
        """The age of the action, as text."""
        return f"{max(0.0, time.time() - self.when):.1f} s ago"


class Journal:
    """Writes the entries of one rank, and reads those of all.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> first, second = (Journal(store, rank) for rank in range(2))
    >>> first.note("3F1"); first.write(); second.last(0).note; first.close()
    '3F1'
    """

    def __init__(self, store: Store, rank: int):
        self._rank = rank
        self._writer = _Writer(connection(store, _PATIENCE), f"last/{rank}")
        weakref.finalize(self, self._writer.stop)

    def note(self, text: str) -> None:
        """Record the newest action; the thread writes it."""
        self._writer.text = text
        if self._writer.thread is None:
            self._writer.start()

    def waits_for(self, peer: int | None) -> None:
        """Record the rank that this one waits for."""
        self._writer.peer = peer

    @property
    def text(self) -> str:
        """The newest action of this rank."""
        return self._writer.text

    def write(self) -> None:
        """Write changes now."""
        self._writer.write()

    def failed(self, text: str, peer: int | None = None, lost: bool = False) -> None:
        """Publish this rank's failure now, with the peer that it waited for and whether the connection broke."""
        self._writer.set(f"failed/{self._rank}", Entry(time.time(), self.text, peer, text, lost))

    def last(self, rank: int) -> Entry | None:
        """The newest entry of a rank."""
        return self._writer.get(f"last/{rank}")

    def failure(self, rank: int) -> Entry | None:
        """The failure of a rank."""
        return self._writer.get(f"failed/{rank}")

    def close(self) -> None:
        """End the thread."""
        self._writer.stop()


class _Writer:
    """The thread and its connection. Holds no reference to the journal, so that dropping the journal ends it."""

    def __init__(self, store: Store, key: str):
        self.text = ""
        self.peer: int | None = None
        self.thread: threading.Thread | None = None
        self._entry = Entry(0.0, "")
        self._written = 0.0
        self._store: Store | None = store
        self._key = key
        self._end = threading.Event()
        self._lock = threading.RLock()

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="fpipe-journal", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._end.set()
        if self.thread is not None and self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout=_PATIENCE.total_seconds() + EVERY)

    def _run(self) -> None:
        self.write()
        while not self._end.wait(EVERY):
            self.write()

    def write(self) -> None:
        with self._lock:
            last, text, peer, now = self._entry, self.text, self.peer, time.time()
            if (text, peer) != (last.note, last.peer):
                last = Entry(now, text, peer, beat=last.beat)
            elif now - self._written < BEAT:
                return
            self._written, self._entry = now, last._replace(beat=last.beat + 1)
            self.set(self._key, self._entry)

    def set(self, key: str, entry: Entry) -> None:
        with self._lock:
            if self._store is None:
                return
            try:
                self._store.set(key, json.dumps(entry))
            except RuntimeError:  # the process that hosted the store is gone
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
