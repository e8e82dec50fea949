# SPDX-License-Identifier: Apache-2.0
"""ZB-1p and ZB-2p: zero bubble from costs, by a heuristic under a memory limit of p or 2p
microbatches a rank.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), section 3. ZB-2p on 4 ranks
at unit cost:

    rank 0   F F F F F F F I F I W F I W F I W F I W ...    1. F while it ends before I0 is there
    and fits in memory, rank 1   . F F F F F I F I F I F I W F I W F I W ...       strictly fewer on
    later ranks; then I0, up the ranks rank 2   . . F F F I F I F I F I F I F I W F I W ...    2.
    rounds of one F down the ranks and one I up rank 3   . . . F I F I F I F I F I F I F I F I W ...
    3. the Ws that are left

Before an F or an I of a round a rank runs the Ws without which memory would not do, those that fit
whole into the time it has to wait, and one that does not fit where waiting would make this rank the
one that idles most.

Two choices are tried both ways, and the shortest span wins: in step 1, one F more where a rank
would wait for I0; in step 2, leaving out the F of a rank that is two ahead of the next one, if it
can afford to wait for its I instead. The exact optimum is the solution of a mixed integer program;
a span that no program could shorten ends the search at once.

The schedules by name are for unit costs without communication. With measured ones::

    from fpipe.generators.automatic import automatic_zero_bubble
    automatic_zero_bubble(8, 24, Costs(F=18.5, I=18.1, W=9.3, comm=0.6), limit=16)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from operator import attrgetter

from ..actions.costs import Costs
from ..errors import ScheduleError
from ..schedule import Schedule
from .patterns import one_a_rank

_ALMOST = 1 + 1e-9  #: times that are sums of the same costs in another order differ by less


def make_zb_1p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-1p: the memory of 1F1B.

    >>> make_zb_1p(4, 8, 4).simulate().span
    27.0
    """
    return one_a_rank(
        "ZB1P", _best(ranks, microbatches, Costs(), limit=ranks), microbatches, stages
    )


def make_zb_2p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-2p: twice that, and no idle time within a rank's span if there are enough microbatches.

    >>> make_zb_2p(4, 8, 4).simulate().span
    24.0
    """
    return one_a_rank(
        "ZB2P", _best(ranks, microbatches, Costs(), limit=2 * ranks), microbatches, stages
    )


def automatic_zero_bubble(
    ranks: int, microbatches: int, costs: Costs, *, limit: float, name: str = ""
) -> Schedule:
    """The heuristic's schedule for these costs, one stage a rank.

    ``limit`` is what a rank may hold, in the bytes of ``costs.saved`` and ``costs.kept``; as these
    are 1 by default, it then counts microbatches. Rank r needs memory for ``ranks - r`` of them.

    >>> costs = Costs(F=2, comm=0.5)
    >>> automatic_zero_bubble(2, 8, costs, limit=4).simulate(costs).span
    33.0
    """
    return one_a_rank(
        name or "AutomaticZeroBubble", _best(ranks, microbatches, costs, limit), microbatches, ranks
    )


def rounds(
    ranks: int, microbatches: int, costs: Costs, limits: Sequence[float]
) -> Iterator[Rounds]:
    """The heuristic under each setting of its two choices; ``limits`` are by rank.

    >>> next(rounds(2, 2, Costs(), (2, 1))).patterns
    ['FFIWIW', 'FIWFIW']
    """
    for choices in product((False, True), repeat=2):
        yield Rounds(ranks, microbatches, costs, limits, *choices)


def _best(ranks: int, microbatches: int, costs: Costs, limit: float) -> list[str]:
    tries: list[Rounds] = []
    for each in rounds(ranks, microbatches, costs, (limit,) * ranks):
        tries.append(each)
        if tries[-1].span <= tries[-1].least_span * _ALMOST:
            break
    return min(tries, key=attrgetter("span")).patterns


@dataclass(slots=True)
class _Rank:
    """The costs and the state of a rank."""

    times: dict[str, float]
    adds: dict[str, float]  #: by op, to the memory held
    pattern: list[str] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)  #: when each F ended
    inwards: list[float] = field(default_factory=list)  #: when each I ended
    clock: float = 0.0
    idle: float = 0.0  #: since its first action
    held: float = 0.0
    waiting: int = 0  #: Ws that could run

    def run(self, op: str) -> None:
        """Run an action now."""
        self.clock += self.times[op]
        self.held += self.adds[op]
        self.waiting += (op == "I") - (op == "W")
        self.pattern.append(op)


class Rounds:
    """One run of the heuristic, for one setting of its two choices. Its methods extend the rows of
    the ranks.
    """

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        one_more: bool,
        leave_out: bool,
    ) -> None:
        times, memory = costs.times(ranks), costs.memory(ranks)
        self.F, self.I, self.saved = times["F"], times["I"], memory["F"]
        self.work = [
            microbatches * (f + i + w) for f, i, w in zip(self.F, self.I, times["W"], strict=True)
        ]
        self.links = (*costs.links(ranks), 0.0)  #: from each rank to the next
        self.microbatches, self.limits = microbatches, [limit * _ALMOST for limit in limits]

        def of_rank(rank, table):
            return {op: table[op][rank] for op in "FIW"}

        self.ranks = [_Rank(of_rank(rank, times), of_rank(rank, memory)) for rank in range(ranks)]
        self.most_idle = 0.0
        self._warm_up(self._room(limits), one_more)
        while len(self.ranks[0].inwards) < microbatches:
            self._round(leave_out)
        self.patterns = ["".join(rank.pattern) + "W" * rank.waiting for rank in self.ranks]

    @property
    def span(self) -> float:
        """The longest of a rank: its work and its idle time."""
        return max(work + rank.idle for work, rank in zip(self.work, self.ranks, strict=True))

    @property
    def least_span(self) -> float:
        """No schedule under this limit has a shorter one: until I0 can be there a rank has only Fs
        to run, and only as many as fit in memory.
        """
        start, back = 0.0, sum(self.F) + sum(self.links) + sum(self.I) + sum(self.links)
        spans = []
        rows = zip(self.work, self.F, self.I, self.links, self.saved, self.limits, strict=True)
        for work, f, i, link, saved, limit in rows:
            back -= i  # I0 of this rank can start here
            room = min(self.microbatches, limit // saved if saved > 0 else inf)
            spans.append(work + max(0.0, back - start - room * f))
            start, back = start + f + link, back - link
        return max(spans)

    # ---- steps ----
    def _room(self, limits: Sequence[float]) -> list[int]:
        """How many Fs each rank may run before its first I: what fits in memory, and fewer than the
        rank before.
        """
        room, most = [], inf
        for saved, limit in zip(self.saved, self.limits, strict=True):
            most = min(most - 1, limit // saved if saved > 0 else inf)
            room.append(int(min(most, self.microbatches)))
        if room[-1] < 1:
            ranks = len(room)
            what = (
                f"rank r of {ranks} starts {ranks} - r microbatches before the first backward "
                "reaches it"
            )
            remedy = f"give at least {ranks} times what a microbatch saves"
            raise ScheduleError(f"limit={limits[0]} is too little: {what}; {remedy}", rule="limit")
        return room

    def _warm_up(self, room: list[int], one_more: bool) -> None:
        ends = self._forwards_alone(room)
        count, counts = 0, []
        arrives = ends[-1][0]  # I0, at the last rank
        for rank in reversed(range(len(room))):
            count = min(count + 1, room[rank])
            while count < room[rank] and ends[rank][count] <= arrives * _ALMOST:
                count += 1
            if one_more and count < room[rank] and ends[rank][count - 1] * _ALMOST < arrives:
                count += 1
            arrives = max(arrives, ends[rank][count - 1]) + self.I[rank] + self.links[rank - 1]
            counts.append(count)
        for rank, count in enumerate(reversed(counts)):
            for _ in range(count):
                self._forward(rank)
        for rank in reversed(range(len(room))):
            self._inward(rank)

    def _forwards_alone(self, room: list[int]) -> list[list[float]]:
        """When Fs end on ranks that run nothing else."""
        ends: list[list[float]] = []
        arrivals = [0.0] * self.microbatches
        for rank, most in enumerate(room):
            clock, here = 0.0, []
            for arrival in arrivals[:most]:
                clock = max(clock, arrival) + self.F[rank]
                here.append(clock)
            arrivals = [end + self.links[rank] for end in here]
            ends.append(here)
        return ends

    def _round(self, leave_out: bool) -> None:
        for rank in range(len(self.ranks)):
            if self._can_forward(rank) and not (leave_out and self._can_wait(rank)):
                self._forward(rank)
        for rank in reversed(range(len(self.ranks))):
            self._inward(rank)

    # ---- questions ----
    def _can_forward(self, rank: int) -> bool:
        me = self.ranks[rank]
        available = len(self.ranks[rank - 1].forwards) if rank else self.microbatches
        return (
            len(me.forwards) < available
            and me.held + me.adds["F"] + me.waiting * me.adds["W"] <= self.limits[rank]
        )

    def _can_wait(self, rank: int) -> bool:
        """Whether the next rank does without this one's F for now, and this one would not idle most
        for it.
        """
        if (
            rank == len(self.ranks) - 1
            or len(self.ranks[rank].forwards) < len(self.ranks[rank + 1].forwards) + 2
        ):
            return False
        last = self.ranks[-1]
        arrives = last.clock
        if len(last.forwards) < self.microbatches:
            before = self.ranks[-2].forwards
            if len(before) > len(last.forwards):
                arrives = max(arrives, before[len(last.forwards)] + self.links[-2])
            arrives += self.F[-1]
        arrives += sum(self.I[rank + 1 :]) + sum(self.links[rank:])
        me = self.ranks[rank]
        return me.idle + max(0.0, arrives - me.clock) <= self.most_idle * _ALMOST

    # ---- actions ----
    def _forward(self, rank: int) -> None:
        me = self.ranks[rank]
        ready = (
            self.ranks[rank - 1].forwards[len(me.forwards)] + self.links[rank - 1] if rank else 0.0
        )
        while me.waiting and me.held + me.adds["F"] > self.limits[rank]:
            me.run("W")
        self._wait(me, ready)
        me.run("F")
        me.forwards.append(me.clock)

    def _inward(self, rank: int) -> None:
        """The next I, if what it needs is there."""
        me = self.ranks[rank]
        needed = me.forwards if rank == len(self.ranks) - 1 else self.ranks[rank + 1].inwards
        if len(me.inwards) < len(needed):
            self._wait(me, needed[len(me.inwards)] + self.links[rank])
            me.run("I")
            me.inwards.append(me.clock)

    def _wait(self, me: _Rank, ready: float) -> None:
        """Until ``ready``, filling the time with Ws."""
        if me.pattern:
            while me.waiting and me.clock + me.times["W"] <= ready * _ALMOST:
                me.run("W")
            if (
                me.waiting
                and ready - me.clock > (self.most_idle - me.idle) * _ALMOST
                and ready > me.clock * _ALMOST
            ):
                me.run("W")
            me.idle += max(0.0, ready - me.clock)
            self.most_idle = max(self.most_idle, me.idle)
        me.clock = max(me.clock, ready)
