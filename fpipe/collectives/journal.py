# SPDX-License-Identifier: Apache-2.0
"""What each rank did last and which rank it waits for, published through the store for error
messages.

Recording sets an attribute; a daemon thread writes changes ten times a second, so that the last
action of a rank that is killed or stopped stays known, and once a second without changes, as a sign
of life. A journal never makes a step fail: errors of the store are ignored. This module must not
know messages.
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
from .codec import decode, encode

#: Seconds after the time-out of a group at which the search for the cause of a wait that has not
#: ended begins.
GRACE = 1.5
EVERY = 0.1
BEAT = 1.0
_PATIENCE, _PAUSE = 2.0, 3.0  #: seconds for the store to answer, and until the next try
_FIRST = "first"  #: the key of the first conclusion
T = TypeVar("T")
U = TypeVar("U")


class Entry(NamedTuple):
    """The state of a rank: its action, the ranks it waits for, its failure, and the writes so far.

    ``failure``: None before it; the last entry of a rank has it. It is empty if one of ``peers``
    caused it: by a broken connection if ``lost``. ``where``: its process and host. ``busy``: the
    seconds for which the process and its children used a processor. ``age``: the seconds since the
    action began, when this was written: clocks of hosts differ.
    """

    note: str
    peers: tuple[int, ...] = ()
    failure: str | None = None
    lost: bool = False
    beat: int = 0
    where: str = ""
    busy: float = 0.0
    age: float = 0.0


class Conclusion(NamedTuple):
    """The rank to examine, and why."""

    suspect: int
    text: str


class Journal:
    """Writes the entries of one rank, and reads those of all.

    ``text`` is the newest action of this rank, ``peers`` are the ranks that it waits for, and
    ``cause`` is the error with which it failed, all set by the caller. Ranks are global.

    >>> import torch.distributed as dist
    >>> store = BoundedStore(dist.HashStore(), 5.0)
    >>> first, second = (Journal(store, rank) for rank in range(2))
    >>> first.note("3F1"); first.write(); second.last(0).note; first.close()
    '3F1'
    """

    def __init__(self, store: BoundedStore, rank: int):
        self.text = ""
        self.peers: tuple[int, ...] = ()
        self.cause: BaseException | None = None
        #: The first conclusion of any rank, which its process may not survive: the rank to examine,
        #: and why.
        self.concluded: Conclusion | None = None
        self._rank = rank
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._entry = Entry("", where=self._where)
        self._begun = time.monotonic()  # when its action began
        self._written = self._looked = 0.0  # when the entry was written, and others' were read
        self._store = BoundedStore(store.raw, max(store.seconds, _PATIENCE), _PAUSE)
        self._store.connect()
        self._gone = self._late = False
        self._watched: tuple[float, Callable[[], object]] | None = None
        self._until = float("inf")
        self._lock = threading.RLock()
        end = threading.Event()
        thread = threading.Thread(
            target=_keep_writing,
            args=(weakref.ref(self), end),
            name="fpipe-journal",
            daemon=True,
        )
        thread.start()
        #: Ends the thread.
        self.close = weakref.finalize(self, _stop, thread, end)

    def note(self, text: str) -> None:
        """Record the newest action; the thread writes it."""
        self.text = text

    def watch(self, deadline: float, expired: Callable[[], object]) -> None:
        """Call a function in the thread if the time passes before :meth:`relax`."""
        self._watched = (deadline, expired)

    def prolong(self, seconds: float) -> None:
        """Let :meth:`watch` go on for some seconds and those of its grace."""
        if self._watched is not None:
            self._watched = (time.monotonic() + seconds + GRACE, self._watched[1])

    def relax(self) -> None:
        """End :meth:`watch`."""
        self._watched = None

    def tick(self) -> None:
        """One round of the thread."""
        watched = self._watched
        if watched is not None and time.monotonic() > watched[0]:
            watched[1]()
        self.write()
        if self.concluded is None and time.monotonic() - self._looked > BEAT:
            self._looked = time.monotonic()
            self.first()

    def first(self) -> Conclusion | None:
        """Read ``concluded``."""
        self.concluded = self.concluded or self._read(_FIRST, Conclusion)
        return self.concluded

    def write(self) -> None:
        """Write changes now, and a sign of life if the last one is old."""
        with self._lock:
            last = self._entry
            if last.failure is not None:
                return
            text = self.text
            peers = self.peers
            now = time.monotonic()
            if (text, peers) != (last.note, last.peers):
                self._begun = now
            elif now - self._written < BEAT:
                return
            self._written = now
            age = now - self._begun
            busy = seconds_of_processor()
            self._publish(Entry(text, peers, None, False, last.beat + 1, self._where, busy, age))

    def hurry(self, seconds: float = float("inf")) -> float:
        """Use the store for some seconds from now on; returns their end."""
        self._late = False
        self._until = time.monotonic() + seconds
        return self._until

    def failed(self, text: str, peers: tuple[int, ...] = (), lost: bool = False) -> None:
        """Publish this rank's failure now, with the peers that it waited for and whether a
        connection broke.
        """
        age = time.monotonic() - self._begun
        self._publish(Entry(self.text, peers, text, lost, where=self._where, age=age))

    def conclude(self, suspect: int | None, text: str) -> None:
        """Publish which rank to examine, and why, unless another rank did."""
        if suspect is not None:
            raw = encode(Conclusion(suspect, text))
            self._use(lambda store: None if store.check(_FIRST) else store.set(_FIRST, raw))

    def last(self, rank: int) -> Entry | None:
        """The newest entry of a rank."""
        return self._read(f"last/{rank}", Entry)

    @property
    def lost(self) -> bool:
        """Whether the store cannot be reached, or did not answer within the seconds of
        :meth:`hurry`.
        """
        return self._gone or self._store.lost or self._late

    def _publish(self, entry: Entry) -> None:
        with self._lock:  # the thread does not write over a failure
            self._entry = entry
            self._use(lambda store: store.set(f"last/{self._rank}", encode(entry)))

    def _read(self, key: str, kind: type[T]) -> T | None:
        value = self._use(lambda store: decode(store.get(key)) if store.check(key) else None)
        if isinstance(value, kind):
            return value
        return None

    def _use(self, call: Callable[[BoundedStore], U]) -> U | None:
        with self._lock:
            left = self._until - time.monotonic()
            self._late = left <= 0
            if self._gone or self._late:
                return None
            self._store.seconds = min(_PATIENCE, left)
            try:
                return call(self._store)
            except (StoreLostError, GroupError):  # the store is stopped, or another process writes
                return None
            except RuntimeError:  # its process is gone: a further call would only print a warning
                self._gone = True
                return None


def seconds_of_processor() -> float:
    """For how long this process and its children that ended used a processor."""
    return sum(os.times()[:4])


def _keep_writing(journal: weakref.ref[Journal], end: threading.Event) -> None:
    """The thread. Between writes it holds no reference to the journal, so that dropping the journal
    ends it.
    """
    while (current := journal()) is not None and not end.is_set():
        current.tick()
        del current
        end.wait(EVERY)


def _stop(thread: threading.Thread, end: threading.Event) -> None:
    end.set()
    if thread is not threading.current_thread():
        thread.join(timeout=_PATIENCE + EVERY)
