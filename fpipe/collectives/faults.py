"""Turning what a backend throws into an error that says who waited, for whom, and what the other did last.

Knows the journal and the words of backends for "too late"; knows no message.
"""

from __future__ import annotations

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
        self._broken: GroupError | None = None

    def check(self) -> None:
        """Raise where this group has failed before: its connections are not to be trusted again."""
        if self._broken is not None:
            raise type(self._broken)(
                f"this group failed before, and a group that failed stays failed; make a new one "
                f"(the first failure: {self._broken})"
            ) from self._broken

    @contextmanager
    def talking(self, peer: int | None, doing: str) -> Iterator[None]:
        """While talking to a peer (None: to all), an error of the backend becomes one of ours."""
        start = time.monotonic()
        try:
            yield
        except FpipeError:
            raise
        except RuntimeError as error:
            raise self.explain(error, peer, doing, time.monotonic() - start) from error

    def explain(self, error: BaseException, peer: int | None, doing: str, seconds: float = 0.0) -> GroupError:
        """The error to raise, and to remember."""
        late = seconds >= self.timeout or any(word in str(error).lower() for word in _LATE)
        others = [self._said(peer)] if peer is not None else []
        first = [f"rank {rank} failed first: {text}" for rank, text in self._others()[:1]]
        told = ". ".join(text for text in (*others, *first) if text)
        whom = f"rank {peer}" if peer is not None else "all ranks"
        place = f" at {self.journal.here}" if self.journal.here else ""
        if late:
            found: GroupError = StalledError(
                f"rank {self.rank}{place} waited {seconds:.1f} s {doing} {whom}, longer than timeout={self.timeout:g}. "
                f"{told or 'Nothing is known of it'}. Look there first; raise timeout= if a step may take that long"
            )
        else:
            found = PeerError(
                f"rank {self.rank}{place} waited {doing} {whom}, and the connection broke. "
                f"{told or 'Nothing is known of it'}. Look there first; this group cannot be used again "
                f"(the backend said: {_short(error)})"
            )
        self._broken = found
        self.journal.failed(_short(found))
        return found

    def failed(self, error: BaseException) -> None:
        """Leave word that this rank raised."""
        place = f" at {self.journal.here}" if self.journal.here else ""
        self.journal.failed(f"{type(error).__name__}{place}: {_short(error)}")

    def close(self) -> None:
        """End the journal's thread."""
        self.journal.close()

    def _said(self, rank: int) -> str:
        last = self.journal.last(rank)
        return f"Rank {rank}'s last known action was {last}" if last else f"Nothing is known of rank {rank}"

    def _others(self) -> list[tuple[int, str]]:
        return [(rank, text) for rank, text in self.journal.failures(self.size) if rank != self.rank]


def _short(error: BaseException) -> str:
    """The first line, without an address of the source that threw it."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return (line.split("] ", 1)[-1] if line.startswith("[") else line)[:500]
