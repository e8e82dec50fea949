# SPDX-License-Identifier: Apache-2.0
"""What each rank did last and which rank it waits for, published through the store for error messages.

Recording sets an attribute; a daemon thread writes changes ten times a second, so that the last action of a rank that
is killed or stopped stays known, and once a second without changes, as a sign of life. A journal never makes a step
fail: errors of the store are ignored. This module must not know messages.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ..errors import GroupError
from .bounded import BoundedStore, StoreLostError
from .data import decode, encode

EVERY = 0.1
BEAT = 1.0
_PATIENCE, _PAUSE = 2.0, 30.0  #: seconds for the store to answer, and until the next try
T = TypeVar("T")


class Entry(NamedTuple):
    """The state of a rank: its action since ``when``, the rank it waits for, its failure, and the writes so far.

    ``lost``: the failure is a broken connection to ``peer``. ``where``: the process and its host.
    """

    when: float
    note: str
    peer: int | None = None
    failure: str = ""
    lost: bool = False
    beat: int = 0
    where: str = ""

    @property
    def ago(self) -> str:
        """The age of the action, as text."""
        return f"{max(0.0, time.time() - self.when):.1f} s ago"


class Journal:
    """Writes the entries of one rank, and reads those of all.

    ``text`` is the newest action of this rank, and ``peer`` the rank that it waits for, set by the caller.

    >>> import torch.distributed as dist
    >>> store = BoundedStore(dist.HashStore(), 5.0)
    >>> first, second = (Journal(store, rank) for rank in range(2))
    >>> first.note("3F1"); first.write(); second.last(0).note; first.close()
    '3F1'
    """

    def __init__(self, store: BoundedStore, rank: int):
        self.text = ""
        self.peer: int | None = None
        self._rank, self._where = rank, f"process {os.getpid()} on {socket.gethostname()}"
        self._entry, self._written = Entry(0.0, ""), 0.0
        self._store = store.bounded(_PATIENCE, _PAUSE)
        self._gone = False
        self._watched: tuple[float, Callable[[], object]] | None = None
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, text: str) -> None:
        """Record the newest action; the thread writes it."""
        self.text = text
        if self._thread is None:
            self._start()

    def watch(self, deadline: float, expired: Callable[[], object]) -> None:
        """Call a function in the thread if the time passes before :meth:`relax`."""
        self._watched = (deadline, expired)
        if self._thread is None:
            self._start()

    def relax(self) -> None:
        """End :meth:`watch`."""
        self._watched = None

    def tick(self) -> None:
        """One round of the thread."""
        self.write()
        watched = self._watched
        if watched is not None and time.monotonic() > watched[0]:
            watched[1]()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_keep_writing, args=(weakref.ref(self), self._end), name="fpipe-journal", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._thread, self._end)

    def write(self) -> None:
        """Write changes now, and a sign of life if the last one is old."""
        with self._lock:
            last, text, peer, now = self._entry, self.text, self.peer, time.time()
            if (text, peer) != (last.note, last.peer):
                last = Entry(now, text, peer, beat=last.beat, where=self._where)
            elif now - self._written < BEAT:
                return
            self._written, self._entry = now, last._replace(beat=last.beat + 1)
            self._set("last", self._entry)

    def failed(self, text: str, peer: int | None = None, lost: bool = False) -> None:
        """Publish this rank's failure now, with the peer that it waited for and whether the connection broke."""
        self._set("failed", Entry(time.time(), self.text, peer, text, lost, where=self._where))

    def last(self, rank: int) -> Entry | None:
        """The newest entry of a rank."""
        return self._get(f"last/{rank}")

    def failure(self, rank: int) -> Entry | None:
        """The failure of a rank."""
        return self._get(f"failed/{rank}")

    @property
    def lost(self) -> bool:
        """Whether the store cannot be reached."""
        return self._gone or self._store.lost

    def close(self) -> None:
        """End the thread."""
        _stop(self._thread, self._end)

    def _set(self, kind: str, entry: Entry) -> None:
        self._use(lambda store: store.set(f"{kind}/{self._rank}", encode(entry)))

    def _get(self, key: str) -> Entry | None:
        entry = self._use(lambda store: decode(store.get(key)) if store.check([key]) else None)
        return entry if isinstance(entry, Entry) else None

    def _use(self, call: Callable[[BoundedStore], T]) -> T | None:
        with self._lock:
            try:
                return None if self._gone else call(self._store)
            except (StoreLostError, GroupError):  # the process of the store is stopped, or another one writes
                return None
            except RuntimeError:  # the process of the store is gone: a further call would only print a warning
                self._gone = True
                return None


def _keep_writing(journal: weakref.ref[Journal], end: threading.Event) -> None:
    """The thread. Between writes it holds no reference to the journal, so that dropping the journal ends it."""
    while not end.is_set():
        current = journal()
        if current is None:
            return
        current.tick()
        del current
        end.wait(EVERY)


def _stop(thread: threading.Thread | None, end: threading.Event) -> None:
    end.set()
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout=_PATIENCE + EVERY)
