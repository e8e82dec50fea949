# SPDX-License-Identifier: Apache-2.0
"""List scheduling: ranks run, in the order of time, the pass that is first in a repeated block.

A block gives each pass of a microbatch its place in time; the next microbatch has the same places a
period later. A rank runs the passes in the order of these places. While the one whose turn it is
has not arrived, a later one may come early: an F only if the memory suffices for all passes between
now and its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from .problem import ALMOST, Orders, Problem


def dispatch(problem: Problem, places: Sequence[float]) -> Orders | None:
    """The orders of this block; None where they do not fit in memory.

    ``places`` are by pass, for microbatch 0. The period is the work of the busiest rank.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0))
    >>> dispatch(p, [0, 1, 3, 2])
    [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (3, 0), (1, 1), (3, 1)]]
    """
    run = _Run(problem, places)
    while run.events:
        time, rank, number = heappop(run.events)
        if number == run.number[rank]:
            run.decide(rank, time)
    return run.orders if min(run.count) == problem.microbatches else None


def block(problem: Problem, forward: float, backward: float) -> list[float]:
    """Places of a microbatch that takes so many times as long from pass to pass.

    >>> from fpipe import Costs
    >>> block(Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0)), 1.0, 2.0)
    [0.0, 1.0, 4.0, 2.0]
    """
    p, time = problem, 0.0
    places = [0.0] * (2 * p.stages)
    for s in range(p.stages):
        places[s] = time
        time += (p.F[s] + (p.link[s] if s + 1 < p.stages else 0.0)) * forward
    for s in reversed(range(p.stages)):
        places[p.stages + s] = time
        time += (p.I[s] + (p.link[s - 1] if s else 0.0)) * backward
    return places


class _Run:
    """The state of all ranks and passes."""

    def __init__(self, problem: Problem, places: Sequence[float]):
        ranks, stages = problem.ranks, problem.stages
        self.problem, self.period = problem, max(problem.work) / problem.microbatches
        self.place, self.count = list(places), [0] * (2 * stages)
        self.arrivals: list[list[float]] = [[] for _ in range(2 * stages)]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.passes = [
            [*(stages + s for s in reversed(held)), *reversed(held)] for held in problem.of_rank
        ]
        self.clock, self.idle, self.held, self.live = ([0.0] * ranks for _ in range(4))
        self.number = [0] * ranks  #: of a rank's last event; older ones are void
        self.events = [(0.0, rank, 0) for rank in range(ranks)]
        self.limit = [limit * ALMOST for limit in problem.limit]
        self.budget = [max(problem.work) - work for work in problem.work]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.filled = [0] * ranks

    def decide(self, rank: int, time: float) -> None:
        """Run a pass or a W now, or wait."""
        best, arrival, full = self._choose(rank, time)
        if best >= 0:
            self._run(rank, best, time)
            return
        queue, done = self.queues[rank], self.filled[rank]
        if done < len(queue):
            s, k = queue[done]
            length, gap = self.problem.W[s] * self.problem.load[k], arrival - time
            if full or length <= gap * ALMOST or self.idle[rank] + gap > self.budget[rank]:
                self.filled[rank] = done + 1
                self.held[rank] -= self.problem.kept[s] * self.problem.size[k]
                self.clock[rank] = time + length
                self._event(rank, time + length)
                return
        self.number[rank] += 1
        if arrival < inf:
            heappush(self.events, (arrival, rank, self.number[rank]))

    def _choose(self, rank: int, time: float) -> tuple[int, float, bool]:
        """The pass to run or -1, the next arrival, and whether Ws must make room first."""
        p, place, count = self.problem, self.place, self.count
        left = [one for one in self.passes[rank] if count[one] < p.microbatches]
        turn = min(left, key=place.__getitem__, default=-1)
        best, following, full = -1, inf, False
        for one in left:
            if (k := count[one]) >= len(self.arrivals[one]):
                continue
            arrival = self.arrivals[one][k]
            if one < p.stages:
                adds = p.saved[one] * p.size[k]
                if self.held[rank] + adds > self.limit[rank]:
                    full |= one == turn and arrival <= time
                    continue
                if one != turn and not self._fits(rank, one, adds):
                    continue
            if arrival > time:
                following = min(following, arrival)
            elif best < 0 or place[one] < place[best]:
                best = one
        if full and self.filled[rank] < len(self.queues[rank]):
            best = -1
        return best, following, full

    def _fits(self, rank: int, early: int, adds: float) -> bool:
        """Whether an F can run before its turn, and leave enough memory for all passes before
        that.
        """
        p, turn = self.problem, self.place[early]
        changes = []
        for one in self.passes[rank]:
            if one != early:
                place, k = self.place[one], self.count[one]
                while place < turn and k < p.microbatches:
                    adding = p.saved[one] if one < p.stages else -p.saved[one - p.stages]
                    changes.append((place, adding * p.size[k]))
                    place, k = place + self.period, k + 1
        held = self.live[rank] + adds
        for _, change in sorted(changes):
            if held > self.limit[rank]:
                return False
            held += change
        return held <= self.limit[rank]

    def _run(self, rank: int, one: int, time: float) -> None:
        p, k = self.problem, self.count[one]
        self.count[one] = k + 1
        self.place[one] += self.period
        if self.orders[rank]:
            self.idle[rank] += max(0.0, time - self.clock[rank])
        self.orders[rank].append((one, k))
        forward, s = one < p.stages, one % p.stages
        if not forward:
            self.queues[rank].append((s, k))
        self.held[rank] += p.adds[not forward][s] * p.size[k]
        self.live[rank] += (p.saved[s] if forward else -p.saved[s]) * p.size[k]
        end = self.clock[rank] = time + p.time(int(not forward), s, k)
        then, link = p.following[one]
        if then >= 0:
            self.arrivals[then].append(end + link)
            other = p.path[then % p.stages]
            if other != rank and self.clock[other] <= end + link:
                heappush(self.events, (end + link, other, self.number[other]))
        self._event(rank, end)

    def _event(self, rank: int, time: float) -> None:
        self.number[rank] += 1
        heappush(self.events, (time, rank, self.number[rank]))
