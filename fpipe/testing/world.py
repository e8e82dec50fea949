# SPDX-License-Identifier: Apache-2.0
"""A world of ranks that run in turn: one thread per rank, a simulated clock, and a seeded choice of
the next rank.

A rank that would block yields its turn. When no rank can run, the clock advances to the next event;
without one, all ranks raise DeadlockError. Nothing sleeps, so a time-out of a minute passes at
once. This module must not know messages: those are in ``fake``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from ..errors import DeadlockError, GroupError

_TICK = 1e-6
#: Seconds, of the clock of this machine, for which a rank may run without a call of the group:
#: longer than any first trace of a stage, which imports the compiler of torch.
LIMIT = 600.0
_END = 10.0  #: seconds for a thread to end after its rank has


class Killed(BaseException):
    """Ends the thread of a rank with a Kill fault; only the world catches it."""


class Waiting(NamedTuple):
    """Why a rank does not run: the condition it waits for, as text as well, and its time-out."""

    ready: Callable[[], bool]
    what: str
    deadline: float


class Outcome(NamedTuple):
    """How a rank ended: its ``value``, its ``error`` (it was the ``nth`` to fail), or ``killed`` by
    a fault.

    >>> from fpipe.testing import outcomes
    >>> outcomes(lambda group: group.rank, ranks=2)[1].value
    1
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    killed: bool = False
    nth: int = -1


@dataclass
class RankState:
    """One rank: its turn, why it waits, how it ended, its calls of the group so far, and its last
    journal entry.
    """

    rank: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: Waiting | None = None
    outcome: Outcome | None = None
    calls: int = 0
    note: str = ""


class World:
    """Ranks, clock and turns. Every method except ``play`` is called by the rank whose turn it
    is.
    """

    def __init__(self, ranks: int, seed: int, timeout: float):
        self.ranks = [RankState(rank) for rank in range(ranks)]
        self.random = random.Random(seed)
        self.clock = 0.0
        self.timeout = timeout
        self.arrivals: list[float] = []
        self.lost = 0
        self.stuck: str | None = None
        self._failures = count()
        self._over = threading.Event()
        self._turns = 0
        self._running = -1
        self._given_up = False

    # ---- turns ----
    def play(self, parts: list[Callable[[], object]]) -> None:
        """Run one function per rank to its end."""
        threads = [
            threading.Thread(
                target=copy_context().run,
                args=(self._run, state, part),
                name=f"fpipe-fake-{state.rank}",
                daemon=True,
            )
            for state, part in zip(self.ranks, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._end_turn()
        before = -1
        while not self._over.wait(LIMIT):
            if before == self._turns:
                self._given_up = True
                for state in self.ranks:
                    state.turn.release()
                raise DeadlockError(
                    f"rank {self._running} has run for {LIMIT:g} s without a call of its group; it "
                    "computes without an end, or waits for something else than the group"
                )
            before = self._turns
        for thread in threads:
            thread.join(_END)

    def _take_turn(self, state: RankState) -> None:
        state.turn.acquire()
        if self._given_up:
            raise Killed(f"rank {state.rank} never got its turn again")

    def _run(self, state: RankState, part: Callable[[], object]) -> None:
        try:
            self._take_turn(state)
            state.outcome = Outcome(state.rank, part())
        except Killed:
            state.outcome = Outcome(state.rank, killed=True, nth=next(self._failures))
        except BaseException as error:
            state.outcome = Outcome(state.rank, error=error, nth=next(self._failures))
        self._end_turn()

    def pause(self, rank: int, ready: Callable[[], bool], what: str) -> bool:
        """Let others run until ``ready``; False if the time-out passed first. DeadlockError if all
        ranks wait.
        """
        if self._over.is_set():
            raise GroupError(
                "this group belongs to a fpipe.testing.run that has ended; use it in its function"
            )
        state = self.ranks[rank]
        state.waiting = Waiting(ready, what, self.clock + self.timeout)
        self._end_turn()
        self._take_turn(state)
        state.waiting = None
        if not ready() and self.stuck is not None:
            raise DeadlockError(self.stuck)
        return ready()

    def _end_turn(self) -> None:
        self.clock += _TICK
        if self._given_up:
            return
        while alive := [state for state in self.ranks if state.outcome is None]:
            able = [
                state
                for state in alive
                if self.stuck
                or state.waiting is None
                or state.waiting.ready()
                or self.clock >= state.waiting.deadline
            ]
            if able:
                state = self.random.choice(able)
                self._turns += 1
                self._running = state.rank
                state.turn.release()
                return
            self._jump(alive)
        self._over.set()

    def _jump(self, alive: list[RankState]) -> None:
        """Advance the clock to the next arrival or time-out; all are stuck if no message is under
        way or lost.
        """
        self.arrivals = [when for when in self.arrivals if when > self.clock]
        if not self.arrivals and not self.lost:
            waits = "; ".join(
                f"rank {state.rank} waits {state.waiting.what}" for state in alive if state.waiting
            )
            remedy = "One of them must send before it waits"
            if ended := [str(state.rank) for state in self.ranks if state.outcome is not None]:
                remedy = (
                    f"The function has ended on rank {', '.join(ended)}: every rank must make the "
                    "same calls"
                )
            self.stuck = f"every rank waits and nothing is under way: {waits}. {remedy}"
            return
        ends = [state.waiting.deadline for state in alive if state.waiting]
        self.clock = min(self.arrivals + ends)

    # ---- state of ranks ----
    def gone(self, rank: int) -> bool:
        """Whether a rank was killed or raised."""
        outcome = self.ranks[rank].outcome
        return outcome is not None and outcome.nth >= 0

    def describe(self, rank: int) -> str:
        """The last action and the error of a rank, as a sentence."""
        state = self.ranks[rank]
        error = state.outcome and state.outcome.error
        action = f"Nothing is known of rank {rank}"
        if state.note:
            action = f"Rank {rank}'s last known action was {state.note}"
        if error is None or isinstance(error, GroupError):
            return action
        return f"{action}; it raised {type(error).__name__}: {error}"
