"""A world of ranks that take turns: one thread each, one baton, a clock of its own, and a seeded choice of who is next.

Whoever would block hands the baton on. When nobody can run, the clock jumps to the next thing that will happen; when
nothing will, everybody is told that all wait. Nothing sleeps, so a time-out of a minute passes at once. Knows no
messages: those are in ``fake``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import DeadlockError, GroupError

_TICK = 1e-6


class Killed(BaseException):
    """Ends the thread of a rank that was ordered to die; nothing but the world catches it."""


@dataclass
class Waiting:
    """Why a rank does not run: what would let it go on, until when it waits, and in words for whom."""

    ready: Callable[[], bool]
    what: str
    deadline: float


@dataclass
class Seat:
    """One rank: its turn, why it waits, and how it ended."""

    rank: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: Waiting | None = None
    ended: bool = False
    error: BaseException | None = None
    calls: int = 0
    note: str = ""


class World:
    """Seats, clock and baton. Every method but ``play`` is called by the rank that holds the baton."""

    def __init__(self, ranks: int, seed: int, timeout: float):
        self.seats = [Seat(rank) for rank in range(ranks)]
        self.random = random.Random(seed)
        self.clock = 0.0
        self.timeout = timeout
        self.arrivals: list[float] = []
        self.lost = 0
        self.stuck: str | None = None
        self.failures: list[int] = []
        self._over = threading.Event()

    # ---- turns --------------------------------------------------------------------------------------------------
    def play(self, parts: list[Callable[[], None]]) -> None:
        """Run one part per seat to its end."""
        threads = [
            threading.Thread(target=self._act, args=(seat, part), name=f"fpipe-fake-{seat.rank}", daemon=True)
            for seat, part in zip(self.seats, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.wait()
        for thread in threads:
            thread.join()

    def _act(self, seat: Seat, part: Callable[[], None]) -> None:
        seat.turn.acquire()
        try:
            part()
        except BaseException as error:
            seat.error = error
            self.failures.append(seat.rank)
        seat.ended = True
        self._pass_on()

    def pause(self, rank: int, ready: Callable[[], bool], what: str) -> bool:
        """Hand the baton on until ``ready``; False where the time-out passed first. All waiting: DeadlockError."""
        seat = self.seats[rank]
        seat.waiting = Waiting(ready, what, self.clock + self.timeout)
        self._pass_on()
        seat.turn.acquire()
        waiting, seat.waiting = seat.waiting, None
        if ready():
            return True
        if self.stuck is not None:
            raise DeadlockError(self.stuck)
        assert self.clock >= waiting.deadline
        return False

    def _pass_on(self) -> None:
        seat = self._next()
        if seat is None:
            self._over.set()
        else:
            seat.turn.release()

    def _next(self) -> Seat | None:
        self.clock += _TICK
        while True:
            alive = [seat for seat in self.seats if not seat.ended]
            able = [seat for seat in alive if self.stuck or self._able(seat)]
            if able or not alive:
                return self.random.choice(able) if able else None
            self._jump(alive)

    def _able(self, seat: Seat) -> bool:
        return seat.waiting is None or seat.waiting.ready() or self.clock >= seat.waiting.deadline

    def _jump(self, alive: list[Seat]) -> None:
        """To the next arrival or time-out; to a standstill where no message is under way or lost."""
        self.arrivals = [when for when in self.arrivals if when > self.clock]
        if not self.arrivals and not self.lost:
            told = "; ".join(f"rank {seat.rank} waits {seat.waiting.what}" for seat in alive if seat.waiting)
            self.stuck = f"every rank waits and nothing is under way: {told}. One of them must send before it waits"
            return
        ends = [seat.waiting.deadline for seat in alive if seat.waiting]
        self.clock = min(self.arrivals + ends)

    # ---- what a rank asks ---------------------------------------------------------------------------------------
    def gone(self, rank: int) -> bool:
        """Whether a rank died or raised."""
        return self.seats[rank].ended and self.seats[rank].error is not None

    def left(self, rank: int) -> bool:
        """Whether a rank has returned, and so will do nothing more."""
        return self.seats[rank].ended

    def last(self, rank: int) -> str:
        """What is known of a rank, as a sentence."""
        seat = self.seats[rank]
        known = f"Rank {rank}'s last known action was {seat.note}" if seat.note else f"Nothing is known of rank {rank}"
        if isinstance(seat.error, GroupError) or seat.error is None or isinstance(seat.error, Killed):
            return known
        return f"{known}; it raised {type(seat.error).__name__}: {seat.error}"
