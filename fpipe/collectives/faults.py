"""Turning what a backend throws into an error that says who waited, for whom, and where the trail ends.

The rank that is waited for often waits itself, or failed because of a third: the journal tells whom to look at first.
Knows the words of backends for "too late"; knows no message.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FpipeError, GroupError, PeerError, StalledError
from ._store import Store
from .journal import BEAT, Entry, Journal

_LATE = ("timed out", "timeout", "time out")
#: The word of a rank that waited for all and does not know yet for whom in vain.
LOOKING = "looking"
#: Seconds to wait for the word of a rank whose connection broke: for any, and for that of one that is looking.
_SOON, _LONG = 0.5, 4.0


class Watch:
    """One rank's eye on the others: remembers a failure, and explains it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.journal = Journal(store, rank)
        self.broken: GroupError | None = None
        self._silent: frozenset[int] = frozenset()

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
        if self.broken is not None:
            return self.broken
        late = seconds >= self.timeout or any(word in str(error).lower() for word in _LATE)
        # Before anything else: the backend may have closed this rank's connections already.
        self.journal.failed("" if peer is not None else LOOKING, peer, lost=not late)
        trail, suspect, sure = self._everyone() if peer is None else self._trail(peer, not late)
        if not sure:  # nobody failed: look for one that does not answer
            self._silent = self._listen()
            trail, suspect, sure = self._everyone() if peer is None else self._trail(peer, not late)
            if not sure and self._silent and suspect not in self._silent:  # who waits for all says not for whom
                suspect = min(self._silent)
                trail += f"; rank {suspect} {_state(self.journal.last(suspect), gone=False, silent=True)}"
        first = f"{trail}. Look at rank {suspect} first" if suspect is not None else "Look at every rank's own output"
        whom = "all ranks" if peer is None else f"rank {peer}"
        me = f"rank {self.rank}{_at(self.journal.here)}"
        if late:
            found: GroupError = StalledError(
                f"{me} waited {seconds:.1f} s {doing} {whom}, longer than timeout={self.timeout:g}. "
                f"{first}; raise timeout= if a step may take that long"
            )
        else:
            found = PeerError(
                f"{me} waited {doing} {whom}, and the connection broke. "
                f"{first}; this group cannot be used again (the backend said: {_short(error)})"
            )
        self.broken = found
        self.journal.failed(type(found).__name__, suspect if peer is None else peer, lost=not late)
        return found

    def failed(self, error: BaseException) -> None:
        """Leave word that this rank raised; what it raised because of a peer is told already."""
        if error is not self.broken:
            self.journal.failed(f"{type(error).__name__}: {_short(error)}")

    def close(self) -> None:
        """End the journal's thread."""
        self.journal.close()

    def _listen(self) -> frozenset[int]:
        """Ranks that left no word and do not show that they live: stopped, or gone with a connection still open."""
        before = {rank: self.journal.last(rank) for rank in range(self.size) if rank != self.rank}
        time.sleep(1.6 * BEAT)
        return frozenset(
            rank
            for rank, last in before.items()
            if last is not None and self.journal.failure(rank) is None and self.journal.last(rank) == last
        )

    def _trail(self, peer: int, gone: bool) -> tuple[str, int, bool]:
        """From rank to rank, each because of the next, to the first cause: words, that rank, whether it is sure."""
        told: list[str] = []
        seen = {self.rank}
        rank = peer
        while True:
            failure, last = self._word(rank, gone), self.journal.last(rank)
            seen.add(rank)
            if failure is not None and failure.peer is None:
                told.append(f"rank {rank}{_at(failure.note)} raised {failure.failure}")
            elif failure is None and (
                gone or rank in self._silent or last is None or last.peer is None or last.peer in seen
            ):
                told.append(f"rank {rank} {_state(last, gone, rank in self._silent)}")
            else:
                entry = failure or last
                assert entry is not None
                assert entry.peer is not None
                gone = failure is not None and failure.lost
                told.append(f"rank {rank}{_at(entry.note)} {'lost' if gone else 'waits for'} rank {entry.peer}")
                if entry.peer not in seen:
                    rank = entry.peer
                    continue
                if gone and entry.peer != self.rank and self._word(entry.peer, True) is None:  # lost without a word
                    rank = entry.peer
                    told.append(f"rank {rank} {_state(self.journal.last(rank), gone=True, silent=False)}")
            text = "; ".join(told)
            # Of ranks that wait in a circle, each past its time, the last on the trail is no cause.
            return f"{text[0].upper()}{text[1:]}", rank, gone or (failure is not None and failure.peer is None)

    def _word(self, rank: int, gone: bool) -> Entry | None:
        """How a rank failed. A backend may close a connection before the rank can leave word, or while it looks for
        the cause itself; then it is waited for."""
        end, longest = time.monotonic() + _SOON, time.monotonic() + _LONG
        while True:
            failure = self.journal.failure(rank)
            looking = failure is not None and failure.failure == LOOKING
            if not gone or time.monotonic() > (longest if looking else end) or (failure is not None and not looking):
                return None if looking else failure
            time.sleep(0.05)

    def _everyone(self) -> tuple[str, int | None, bool]:
        """Where all were waited for: the end to which most of the others' trails lead."""
        trails = [self._trail(rank, False) for rank in range(self.size) if rank != self.rank]
        if not trails:
            return "", None, True
        worst = Counter(suspect for _, suspect, _ in trails).most_common(1)[0][0]
        text, _, sure = min((trail for trail in trails if trail[1] == worst), key=lambda trail: len(trail[0]))
        return text, worst, sure


def _state(last: Entry | None, gone: bool, silent: bool) -> str:
    if last is None:
        return "is gone, and left no word" if gone else "has left no word yet"
    what = (
        "is gone"
        if gone
        else "does not answer"
        if silent
        else "waits for nobody"
        if last.peer is None
        else f"waits for rank {last.peer}"
    )
    return f"{what}, and its last known action was {last.note or '(none)'}, {last.ago}"


def _at(note: str) -> str:
    return f" ({note})" if note else ""


def _short(error: BaseException) -> str:
    """The first sentence, without the address in the source that threw it."""
    text = str(error).strip().splitlines()
    line = re.sub(r"^\[[^\]]*:\d+\] ", "", text[0]) if text else type(error).__name__
    return line.split(". ")[0][:500]
