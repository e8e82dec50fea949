# SPDX-License-Identifier: Apache-2.0
"""Translating a backend's error into one that names who waited, for whom, and the most likely
cause.

The rank that is waited for often waits itself, or failed because of a third one. Each rank
publishes its state in the journal, and :mod:`trail` follows it to the rank to examine first.
Messages contain global ranks, as the output of torchrun does. This module knows how backends phrase
a time-out; it must not know messages.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ..errors import FpipeError, GroupError, MismatchError, PeerError, StalledError
from ._store import backends, members, name_of
from .bounded import BoundedStore, StoreLostError, host
from .journal import BEAT, GRACE, Entry, Journal
from .trail import GONE, RAISED, Trail, at, search

_LATE = ("timed out", "timeout", "time out")
_OF_STORE = StoreLostError, dist.DistNetworkError, dist.DistStoreError
_BUDGET = 4.0  #: seconds to find the cause of an error
_PROBE = 2**31 - 1  #: the tag of a receive that no rank sends to
#: The monitors of this process, by the name of their process group.
_MONITORS: WeakValueDictionary[str, FaultMonitor] = WeakValueDictionary()


class FaultMonitor:
    """One rank's view of the others' failures; remembers the first error of its group.

    ``names`` are the global ranks of the group's ranks, of which this process is ``rank``. Groups
    of one process share a ``journal``, so that the search goes from one group to another.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        names: Sequence[int],
        timeout: float,
        journal: Journal | None = None,
        pg: dist.ProcessGroup | None = None,
    ):
        self.rank = rank
        self.names = names
        self.timeout = timeout
        self.size = len(names)
        self.me = names[rank]
        self.others = tuple(name for name in names if name != self.me)
        self.journal = journal or Journal(store, self.me)
        self.broken: GroupError | None = None
        self._pg = pg
        _MONITORS["" if pg is None else name_of(pg)] = self
        if getattr(sys.excepthook, "func", None) is not uncaught:
            sys.excepthook = partial(uncaught, sys.excepthook)

    def check(self) -> None:
        """Raise if this group failed before: its connections are in an unknown state."""
        if self.broken is not None:
            raise type(self.broken)(
                f"this group failed before, and a group that failed stays failed; make a new one "
                f"(the first failure: {self.broken})"
            ) from self.broken

    def last(self, rank: int) -> Entry | None:
        """The newest journal entry of a rank of the group."""
        return self.journal.last(self.names[rank])

    def ask(self, rank: int) -> None:
        """Raise RuntimeError if a rank of the group will not come: it failed, or its process ended.

        gloo refuses a receive from a rank whose process has ended, on whichever host.
        """
        entry = self.last(rank)
        if entry is not None and entry.failure is not None:
            raise RuntimeError("it failed")
        if self._pg is not None and backends(self._pg).get("cpu") == "gloo":
            self._pg.recv([torch.empty(1, device="cpu")], rank, _PROBE)

    def _peers(self, peer: int | None) -> tuple[int, ...]:
        """The global ranks that are waited for: one, or all others."""
        if peer is None:
            return self.others
        return (self.names[peer],)

    @contextmanager
    def waiting(
        self,
        peer: int | None,
        doing: str,
        peers: Sequence[int] = (),
        start: float = 0.0,
    ) -> Iterator[None]:
        """Publish that this rank waits for a peer (None: for all); a RuntimeError of the backend is
        diagnosed. Its text is in the diagnosis, so its own traceback is not shown.

        With ``peers``, which are global ranks, these are waited for in code of the user: its errors
        pass unchanged. The wait began at ``start``, or begins now.
        """
        foreign = bool(peers)
        start = start or time.monotonic()
        journal = self.journal
        journal.peers = peers = tuple(peers) or self._peers(peer)
        journal.watch(start + self.timeout + GRACE, partial(self._expired, peers, doing, start))
        try:
            yield
        except FpipeError:
            raise
        except RuntimeError as error:
            journal.relax()
            if foreign and not _of_backend(error):
                journal.peers = ()
                raise
            broken = self._diagnosed(error, peers, doing, time.monotonic() - start)
            raise broken from (error if foreign else None)
        finally:
            journal.relax()
        journal.peers = ()

    def until(
        self,
        ready: Callable[[], bool],
        peer: int | None,
        doing: str,
        sleep: Callable[[], object],
        gone: Callable[[], str],
    ) -> None:
        """Sleep until ready; raise if ``gone()`` says why the peer is, or the time-out has
        passed.
        """
        start = time.monotonic()
        with self.waiting(peer, doing):
            while not ready():
                sleep()
                why = gone()  # it may have sent the last message, and then ended
                if ready():
                    return
                if why or time.monotonic() - start > self.timeout:
                    raise RuntimeError(why or "timed out")

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """:meth:`waiting` for all ranks, while a backend connects them; errors that no other rank
        caused pass.
        """
        with self.waiting(None, "to connect to", self.others) if self.others else nullcontext():
            try:
                yield
            except Exception as error:
                remedy = too_many_files(error)
                if remedy or not _of_backend(error):
                    self.failed(error)
                if remedy:
                    raise GroupError(
                        f"this process cannot connect to the others ({_short(error)}){remedy}"
                    ) from error
                raise

    def _expired(self, peers: tuple[int, ...], doing: str, start: float) -> None:
        """In the thread of the journal: the backend has not ended a wait at its time-out."""
        give_up(self._diagnosed(RuntimeError("timed out"), peers, doing, time.monotonic() - start))

    def diagnose(self, error: BaseException, peer: int | None, doing: str) -> GroupError:
        """The error to raise for a backend's error; the group raises it again from now on."""
        return self._diagnosed(error, self._peers(peer), doing, 0.0)

    def _diagnosed(
        self,
        error: BaseException,
        peers: tuple[int, ...],
        doing: str,
        seconds: float,
    ) -> GroupError:
        if self.broken is not None:
            return self.broken
        journal = self.journal
        late = seconds >= self.timeout or any(word in str(error).lower() for word in _LATE)
        end = journal.hurry(_BUDGET)
        # Before anything else: the backend may have closed this rank's connections already.
        journal.failed("", peers, lost=not late)
        trail = search(journal, self.me, peers, not late, self.others)
        first = journal.first() if trail.kind == GONE else None
        if first is not None and first.suspect != self.me:  # of a busy rank no report came yet
            trail = Trail(first.text, first.suspect)
        if journal.lost and trail.kind != RAISED:
            one = len(peers) == 1 and not isinstance(error, _OF_STORE)
            trail = self._without_store(trail, one)
        why = f"{trail.text[:1].upper()}{trail.text[1:]}. {self._advice(trail)}"
        waited = f"rank {self.me}{at(journal.text)} waited"
        whom = f"{doing} {f'rank {peers[0]}' if len(peers) == 1 else 'all ranks'}"
        broken: GroupError
        if late:
            broken = StalledError(
                f"{waited} {seconds:.1f} s {whom}, longer than timeout={self.timeout:g}. {why}; "
                "raise timeout= if a step may take that long"
            )
        else:
            broken = PeerError(
                f"{waited} {whom}, and the connection broke. {why}; this group cannot be used "
                f"again (the backend said: {_short(error)})"
            )
        self.broken = journal.cause = broken = self._mismatch(trail.suspect) or broken
        journal.conclude(trail.suspect, trail.text)
        journal.hurry()
        self._linger(end - time.monotonic())
        return broken

    def lost(self) -> int | None:
        """The rank that ended without a report, by the first conclusion, which is that of all
        ranks.
        """
        found = self.journal.first()
        if self.broken is None or found is None or found.suspect not in self.names:
            return None
        rank = self.names.index(found.suspect)
        entry = self.last(rank)
        return rank if entry is None or entry.failure is None else None

    def end(self, error: GroupError) -> None:
        """Fail with an error that all ranks raise."""
        self.broken = self.journal.cause = error
        self.journal.failed(f"{type(error).__name__}: {error}")

    def failed(self, error: BaseException) -> None:
        """Publish that this rank raised; errors that a peer caused are published already."""
        journal = self.journal
        if error is not self.broken and error is not journal.cause:
            journal.cause = error
            text = f"{type(error).__name__}: {_short(error)}"
            journal.failed(text)
            journal.conclude(self.me, f"rank {self.me}{at(journal.text)} raised {text}")
            self._linger(_BUDGET)

    def _linger(self, seconds: float) -> None:
        """The end of this process may end the store of the job; first the other ranks read what
        happened.

        Without the store they do not read it. Then they come to their own time-out before this
        process ends.
        """
        if host()[1] == self.me or self.journal.lost:
            time.sleep(max(0.0, min(seconds, 1.3 * BEAT)))

    def _mismatch(self, suspect: int | None) -> MismatchError | None:
        """What a rank raised, if that was a MismatchError: it is then true of every rank."""
        entry = None if suspect is None else self.journal.last(suspect)
        kind, _, text = ((entry and entry.failure) or "").partition(": ")
        return MismatchError(text) if kind == MismatchError.__name__ else None

    def _without_store(self, trail: Trail, one: bool) -> Trail:
        """Where the store does not answer: what another rank concluded before, else its host is the
        first suspect.

        If that is no rank, the ``one`` rank that this one waits for is a suspect too: the network
        may be cut. If the store was lost during the search, its host may have ended with an error:
        the rank that was found remains.
        """
        concluded = self.journal.concluded
        if concluded:
            return Trail(concluded.text, concluded.suspect)
        name, rank = host()
        lost = f"the store of the job does not answer ({name} hosts it)"
        trail = trail._replace(text="; ".join(filter(None, [trail.text, lost])))
        if rank is None:
            suspect = trail.suspect if one or trail.read else None
            return trail._replace(suspect=suspect, host=name)
        if rank == self.me or trail.read:
            return trail
        return trail._replace(suspect=rank)

    def _advice(self, trail: Trail) -> str:
        """Which process to examine, with its host and number."""
        processes = [trail.host] if trail.host else []
        if trail.suspect is not None:
            entry = self.journal.last(trail.suspect)
            where = f" ({entry.where})" if entry and entry.where else ""
            processes.insert(0, f"rank {trail.suspect}{where}")
        return (
            f"Look at {' and at '.join(processes)} first"
            if processes
            else "Look at the output of every rank"
        )


def uncaught(before: Callable[..., object], kind: object, error: object, trace: object) -> None:
    """``sys.excepthook``: let the other ranks know which error ends this program.

    One of a backend, in code of the user, has its cause on another rank, which is printed.
    """
    for monitor in sorted(_MONITORS.values(), key=lambda monitor: -monitor.size):
        if monitor.journal.cause or not isinstance(error, Exception):
            continue
        if _of_backend(error):
            lost = RuntimeError(type(error).__name__)
            print(monitor.diagnose(lost, None, "in another library for"), file=sys.stderr)
        else:
            monitor.failed(error)
    before(kind, error, trace)


def give_up(error: FpipeError) -> None:
    """Print an error and end the process, without the clean-up that would wait for other threads.

    A wait in another library cannot be interrupted from Python. The other ranks see that the
    process is gone, and its last line of output states the error.
    """
    line = (
        f"{type(error).__module__}.{type(error).__name__}: {error}. The wait cannot be "
        "interrupted; this process ends\n"
    )
    os.write(2, line.encode())
    os._exit(1)


def hang_up(*groups: dist.ProcessGroup) -> None:
    """Close the connections of this rank over gloo, so that a rank that waits for it learns at once
    that it failed.

    gloo closes them when a wait is late: here for a message that no rank sends.
    """
    for pg in groups:
        if backends(pg).get("cpu") != "gloo":
            continue
        for peer in range(pg.size()):
            with suppress(RuntimeError):
                never = torch.empty(1, device="cpu")
                pg.recv([never], peer, _PROBE).wait(timedelta(milliseconds=1))


def watched(name: str) -> Callable[[], AbstractContextManager[None]]:
    """``FaultMonitor.waiting`` for collectives in the code of a stage, over the process group of
    this name.
    """
    monitor = _MONITORS.get(name) or next(iter(_MONITORS.values()), None)
    others = () if monitor is None else tuple({*members(name)} - {monitor.me})
    if monitor is None or not others:
        return nullcontext
    return partial(monitor.waiting, None, "in a collective of a stage with", others)


def too_many_files(error: Exception) -> str:
    """What to do where a process may not open more files; empty for other errors."""
    return (
        "; raise the limit of open files, as with ulimit -n 4096"
        if "Too many open files" in str(error)
        else ""
    )


def _of_backend(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _short(error: BaseException) -> str:
    """The first sentence of an error, without the source location that torch puts before it."""
    text = str(error).strip().splitlines()
    line = re.sub(r"^\[[^\]]*:\d+\] ", "", text[0]) if text else type(error).__name__
    return line.split(". ")[0][:500]
