"""Turning what a backend throws into an error that says who waited, for whom, and where the trail ends.

The rank that is waited for often waits itself, or failed because of a third: the journal tells whom to look at first.
Knows the words of backends for "too late"; knows no message.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FpipeError, GroupError, PeerError, StalledError
from ._store import Store
from .journal import Journal

_LATE = ("timed out", "timeout", "time out")


class Watch:
    """One rank's eye on the others: remembers a failure, and explains it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.journal = Journal(store, rank)
        self.broken: GroupError | None = None

    def check(self) -> None:
        """Raise where this group has failed before: its connections are not to be trusted again."""
        if self.broken is not None:
            raise type(self.broken)(
                f"this group failed before, and a group that failed stays failed; make a new one "
                f"(the first failure: {self.broken})"
            ) from self.broken

    @contextmanager
    def talking(self, peer: int | None, doing: str) -> Iterator[None]:
        """While talking to a peer (None: to all), an error of the backend becomes one of ours."""
        start = time.monotonic()
        self.journal.waits(peer)
        try:
            yield
        except FpipeError:
            raise
        except RuntimeError as error:
            raise self.explain(error, peer, doing, time.monotonic() - start) from error
        self.journal.waits(None)

    def explain(self, error: BaseException, peer: int | None, doing: str, seconds: float = 0.0) -> GroupError:
        """The error to raise, and to remember."""
        late = seconds >= self.timeout or any(word in str(error).lower() for word in _LATE)
        if self.broken is not None:
            return self.broken
        place = f" at {self.journal.here}" if self.journal.here else ""
        whom = f"rank {peer}" if peer is not None else "all ranks"
        trail, suspect = self._trail(peer, not late) if peer is not None else self._failures()
        first = f"Look at rank {suspect} first" if suspect is not None else "Look at every rank's own output"
        if late:
            found: GroupError = StalledError(
                f"rank {self.rank}{place} waited {seconds:.1f} s {doing} {whom}, longer than timeout={self.timeout:g}. "
                f"{trail}{first}; raise timeout= if a step may take that long"
            )
        else:
            found = PeerError(
                f"rank {self.rank}{place} waited {doing} {whom}, and the connection broke. "
                f"{trail}{first}; this group cannot be used again (the backend said: {_short(error)})"
            )
        self.broken = found
        self.journal.failed(type(found).__name__, peer, lost=not late)
        return found

    def failed(self, error: BaseException) -> None:
        """Leave word that this rank raised; what it raised because of a peer is told already."""
        if error is not self.broken:
            self.journal.failed(f"{type(error).__name__}: {_short(error)}")

    def close(self) -> None:
        """End the journal's thread."""
        self.journal.close()

    def _trail(self, peer: int, gone: bool) -> tuple[str, int]:
        """From rank to rank, each because of the next, to the one that waits for nobody; a sentence, and that rank."""
        told: list[str] = []
        seen = {self.rank}
        rank = peer
        while True:
            failure, last = self.journal.failure(rank), self.journal.last(rank)
            seen.add(rank)
            entry = failure or last
            if failure is not None and failure.peer is None:
                told.append(f"rank {rank} raised {failure.failure}{_at(failure.note)}")
            elif entry is None:
                told.append(f"nothing is known of rank {rank}")
            elif entry.peer is None or entry.peer in seen:
                state = (
                    "is gone" if gone else "waits for nobody" if entry.peer is None else f"waits for rank {entry.peer}"
                )
                told.append(f"rank {rank} {state}, and its last known action was {entry.note or '(none)'}, {entry.ago}")
            else:
                verb = "lost" if failure is not None and failure.lost else "waits for"
                told.append(f"rank {rank}{_at(entry.note)} {verb} rank {entry.peer}")
                rank, gone = entry.peer, failure is not None and failure.lost
                continue
            text = "; ".join(told)
            return f"{text[0].upper()}{text[1:]}. ", rank

    def _failures(self) -> tuple[str, int | None]:
        """Where all were waited for: the first that left word of a failure of its own."""
        found = [(entry, rank) for rank in range(self.size) if (entry := self.journal.failure(rank)) is not None]
        own = sorted((entry.when, rank, entry) for entry, rank in found if entry.peer is None)
        if not own:
            return "", None
        _, rank, entry = own[0]
        return f"Rank {rank} raised {entry.failure}{_at(entry.note)}. ", rank


def _at(note: str) -> str:
    return f" at {note}" if note else ""


def _short(error: BaseException) -> str:
    """The first sentence, without the address in the source that threw it."""
    text = str(error).strip().splitlines()
    line = re.sub(r"^\[[^\]]*:\d+\] ", "", text[0]) if text else type(error).__name__
    return line.split(". ")[0][:500]
