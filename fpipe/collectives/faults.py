# SPDX-License-Identifier: Apache-2.0
"""Translating a backend's error into one that names who waited, for whom, and the most likely cause.

The rank that is waited for often waits itself, or failed because of a third one. Each rank publishes its state in the
journal; following it from rank to rank leads to the one to examine first. This module knows how backends phrase a
time-out; it must not know messages.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from ..errors import FpipeError, GroupError, MismatchError, PeerError, StalledError
from .bounded import BoundedStore, host
from .journal import BEAT, Entry, Journal
from .watchdog import GRACE, give_up

_LATE = ("timed out", "timeout", "time out")
#: The failure that a rank publishes while it searches for the cause of its own.
LOOKING = "looking"
#: Seconds to wait for the report of a rank whose connection broke: for any report, and for one that is searching.
_SOON, _LONG = 0.5, 4.0


class _Trail(NamedTuple):
    """A chain of ranks, each stopped by the next, as text; the last rank, and whether it is known to be the cause."""

    text: str
    suspect: int | None
    sure: bool


class FaultMonitor:
    """One rank's view of the others' failures; remembers the first error of its group.

    ``names`` are the global ranks of the group's ranks. Messages contain them, as the output of torchrun does.
    """

    def __init__(self, store: BoundedStore, rank: int, size: int, timeout: float, names: Sequence[int] | None = None):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.names = range(size) if names is None else names
        self.journal = Journal(store, rank)
        self.broken: GroupError | None = None

    def check(self) -> None:
        """Raise if this group failed before: its connections are in an unknown state."""
        if self.broken is not None:
            raise type(self.broken)(
                f"this group failed before, and a group that failed stays failed; make a new one "
                f"(the first failure: {self.broken})"
            ) from self.broken

    @contextmanager
    def waiting(self, peer: int | None, doing: str) -> Iterator[None]:
        """Publish that this rank waits for a peer (None: for all); a RuntimeError of the backend is diagnosed."""
        start = time.monotonic()
        journal = self.journal
        journal.peer = peer
        journal.watch(start + self.timeout + GRACE, partial(self._expired, peer, doing, start))
        try:
            yield
        except FpipeError:
            raise
        except RuntimeError as error:
            journal.relax()
            raise self.diagnose(error, peer, doing, time.monotonic() - start) from error
        finally:
            journal.relax()
        journal.peer = None

    def _expired(self, peer: int | None, doing: str, start: float) -> None:
        """In the thread of the journal: the backend has not ended a wait at its time-out."""
        give_up(self.diagnose(RuntimeError("timed out"), peer, doing, time.monotonic() - start))

    def diagnose(self, error: BaseException, peer: int | None, doing: str, seconds: float = 0.0) -> GroupError:
        """The error to raise for a backend's error; the group raises it again from now on."""
        if self.broken is not None:
            return self.broken
        late = seconds >= self.timeout or any(word in str(error).lower() for word in _LATE)
        # Before anything else: the backend may have closed this rank's connections already.
        self.journal.failed("" if peer is not None else LOOKING, peer, lost=not late)
        trail = self._search(peer, lost=not late)
        mismatch = self._mismatch(trail.suspect)
        if mismatch:
            self.broken = MismatchError(mismatch)
            return self.broken
        if self.journal.lost and not trail.sure:
            trail = self._without_store(trail)
        first = f"{trail.text}. {self._advice(trail.suspect)}"
        whom = "all ranks" if peer is None else self._name(peer)
        me = f"{self._name(self.rank)}{_at(self.journal.text)}"
        if late:
            self.broken = StalledError(
                f"{me} waited {seconds:.1f} s {doing} {whom}, longer than timeout={self.timeout:g}. "
                f"{first}; raise timeout= if a step may take that long"
            )
        else:
            self.broken = PeerError(
                f"{me} waited {doing} {whom}, and the connection broke. "
                f"{first}; this group cannot be used again (the backend said: {_short(error)})"
            )
        self.journal.failed(type(self.broken).__name__, trail.suspect if peer is None else peer, lost=not late)
        return self.broken

    def end(self, error: GroupError) -> None:
        """Fail with an error that all ranks raise."""
        self.broken = error
        self.journal.failed(f"{type(error).__name__}: {error}")

    def failed(self, error: BaseException) -> None:
        """Publish that this rank raised; errors that a peer caused are published already."""
        if error is not self.broken:
            self.journal.failed(f"{type(error).__name__}: {_short(error)}")

    def _mismatch(self, rank: int | None) -> str:
        """What a rank raised, if that was a MismatchError: it is then true of every rank."""
        failure = None if rank is None else self.journal.failure(rank)
        kind, _, text = ("", "", "") if failure is None else failure.failure.partition(": ")
        return text if kind == MismatchError.__name__ else ""

    # ---- the search for the cause -------------------------------------------------------------------------------
    def _search(self, peer: int | None, lost: bool) -> _Trail:
        trail = self._trail_from(peer, lost, frozenset())
        if trail.sure:
            return trail
        silent = self._silent()  # no rank failed: one may not respond
        trail = self._trail_from(peer, lost, silent)
        if not trail.sure and silent and trail.suspect not in silent:  # a rank that waits for all names no peer
            suspect = min(silent)
            state = self._state(self.journal.last(suspect), gone=False, silent=True)
            return trail._replace(text=f"{trail.text}; {self._name(suspect)} {state}", suspect=suspect)
        return trail

    def _without_store(self, trail: _Trail) -> _Trail:
        """Where the store does not answer either, its host is the first suspect."""
        name, rank = host()
        parts = [part for part in (trail.text, f"the store of the job does not answer ({name} hosts it)") if part]
        if rank is None or rank not in self.names or rank == self.names[self.rank]:
            return _joined(parts, trail.suspect, sure=False)
        return _joined(parts, self.names.index(rank), sure=False)

    def _name(self, rank: int) -> str:
        return f"rank {self.names[rank]}"

    def _advice(self, suspect: int | None) -> str:
        """Which process to examine, with its host and number."""
        if suspect is None:
            return "Look at the output of every rank"
        entry = self.journal.failure(suspect) or self.journal.last(suspect)
        where = f" ({entry.where})" if entry is not None and entry.where else ""
        return f"Look at {self._name(suspect)}{where} first"

    def _trail_from(self, peer: int | None, lost: bool, silent: frozenset[int]) -> _Trail:
        """From a peer; where all ranks were waited for, the shortest one to the suspect of most of the others."""
        if peer is not None:
            return self._trail(peer, lost, silent)
        trails = [self._trail(rank, False, silent) for rank in range(self.size) if rank != self.rank]
        if not trails:
            return _Trail("", None, True)
        worst = Counter(trail.suspect for trail in trails).most_common(1)[0][0]
        return min((trail for trail in trails if trail.suspect == worst), key=lambda trail: len(trail.text))

    def _silent(self) -> frozenset[int]:
        """Ranks that reported no failure and do not respond: stopped, or gone with a connection still open."""
        before = {rank: self.journal.last(rank) for rank in range(self.size) if rank != self.rank}
        time.sleep(1.6 * BEAT)
        same = (rank for rank, last in before.items() if last is not None and self.journal.last(rank) == last)
        return frozenset(rank for rank in same if self.journal.failure(rank) is None)

    def _trail(self, peer: int, gone: bool, silent: frozenset[int]) -> _Trail:
        """From rank to rank, each stopped by the next, to the first cause."""
        parts: list[str] = []
        seen = {self.rank}
        rank = peer
        while True:
            failure, last = self._report(rank, gone), self.journal.last(rank)
            seen.add(rank)
            if failure is not None and failure.peer is None:
                parts.append(f"{self._name(rank)}{_at(failure.note)} raised {failure.failure}")
                return _joined(parts, rank, True)
            entry = failure or last
            if failure is None and (gone or rank in silent):
                entry = None
            if entry is None or entry.peer is None or (failure is None and entry.peer in seen):
                parts.append(f"{self._name(rank)} {self._state(last, gone, rank in silent)}")
                return _joined(parts, rank, gone)
            gone = failure is not None and failure.lost
            parts.append(
                f"{self._name(rank)}{_at(entry.note)} {'lost' if gone else 'waits for'} {self._name(entry.peer)}"
            )
            if entry.peer in seen:
                break
            rank = entry.peer
        if gone and entry.peer != self.rank and self._report(entry.peer, True) is None:  # lost without a report
            rank = entry.peer
            parts.append(f"{self._name(rank)} {self._state(self.journal.last(rank), gone=True, silent=False)}")
        # Of ranks that wait in a circle, each past its time-out, the last one is not the cause.
        return _joined(parts, rank, gone)

    def _state(self, last: Entry | None, gone: bool, silent: bool) -> str:
        if last is None:
            return "is gone, and left no journal entry" if gone else "has no journal entry yet"
        if gone:
            what = "is gone"
        elif silent:
            what = "does not answer"
        else:
            what = "waits for no rank" if last.peer is None else f"waits for {self._name(last.peer)}"
        return f"{what}, and its last known action was {last.note or '(none)'}, {last.ago}"

    def _report(self, rank: int, gone: bool) -> Entry | None:
        """How a rank failed. A backend may close a connection before the rank has reported, or while it searches for
        the cause itself; then this waits for the report."""
        end, longest = time.monotonic() + _SOON, time.monotonic() + _LONG
        while True:
            failure = self.journal.failure(rank)
            looking = failure is not None and failure.failure == LOOKING
            if not gone or time.monotonic() > (longest if looking else end) or (failure is not None and not looking):
                return None if looking else failure
            time.sleep(0.05)


def _joined(parts: list[str], suspect: int | None, sure: bool) -> _Trail:
    text = "; ".join(parts)
    return _Trail(text[0].upper() + text[1:], suspect, sure)


def _at(note: str) -> str:
    return f" ({note})" if note else ""


def _short(error: BaseException) -> str:
    """The first sentence of an error, without the source location that torch puts before it."""
    text = str(error).strip().splitlines()
    line = re.sub(r"^\[[^\]]*:\d+\] ", "", text[0]) if text else type(error).__name__
    return line.split(". ")[0][:500]
