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


def dispatch(
    problem: Problem, places: Sequence[float], period: float, target: float, early: bool
) -> Orders | None:
    """The orders of this block; None where they do not fit in memory.

    ``places`` are by pass, for microbatch 0. ``target`` is the span that is aimed at, as in
    ``fill``.

    >>> from fpipe.actions.costs import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0))
    >>> dispatch(p, [0, 1, 3, 2], 3, 9, True)
    [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (3, 0), (1, 1), (3, 1)]]
    """
    run = _Run(problem, places, period, target, early)
    while run.events:
        time, rank, number = heappop(run.events)
        if number == run.number[rank]:
            run.decide(rank, time)
    complete = min(run.count) == problem.microbatches
    return run.orders if complete else None


class _Run:
    """The state of all ranks and passes."""

    def __init__(
        self, problem: Problem, places: Sequence[float], period: float, target: float, early: bool
    ):
        ranks, stages = problem.ranks, problem.stages
        self.problem, self.period, self.early = problem, period, early
        self.key, self.count = list(places), [0] * (2 * stages)
        self.arrivals: list[list[float]] = [[] for _ in range(2 * stages)]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.passes = [
            [*(stages + s for s in reversed(held)), *reversed(held)] for held in problem.of_rank
        ]
        self.clock, self.idle, self.held, self.live = ([0.0] * ranks for _ in range(4))
        self.number = [0] * ranks  #: of a rank's last event; older ones are void
        self.events = [(0.0, rank, 0) for rank in range(ranks)]
        self.limit = [limit * ALMOST for limit in problem.limit]
        self.budget = [target - work for work in problem.work]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.filled = [0] * ranks

    def decide(self, rank: int, time: float) -> None:
        """Run a pass or a W now, or wait."""
        turn, best, arrival, full = self._choose(rank, time)
        if turn < 0:
            return
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

    def _choose(self, rank: int, time: float) -> tuple[int, int, float, bool]:
        """The pass whose turn it is, the one to run, the next arrival, and whether Ws must make
        room first.
        """
        p, stages, key, count, arrivals = (
            self.problem,
            self.problem.stages,
            self.key,
            self.count,
            self.arrivals,
        )
        held, live, limit, microbatches = (
            self.held[rank],
            self.live[rank],
            self.limit[rank],
            p.microbatches,
        )
        turn, best, following, full = -1, -1, inf, False
        first = last = inf
        for one in self.passes[rank]:
            if count[one] < microbatches and key[one] < first:
                turn, first = one, key[one]
        for one in self.passes[rank]:
            k = count[one]
            if k >= len(arrivals[one]):
                continue
            arrival = arrivals[one][k]
            if one < stages:
                adds = p.saved[one] * p.size[k]
                if held + adds > limit:
                    full |= one == turn and arrival <= time
                    continue
                if one != turn and not (
                    self.early and live + adds <= limit and self._fits(rank, one, adds)
                ):
                    continue
            if arrival > time:
                following = min(following, arrival)
            elif key[one] < last:
                best, last = one, key[one]
        if full and self.filled[rank] < len(self.queues[rank]):
            best = -1
        return turn, best, following, full

    def _fits(self, rank: int, early: int, adds: float) -> bool:
        """Whether an F can run before its turn, and leave enough memory for all passes before
        that.
        """
        p, stages, turn = self.problem, self.problem.stages, self.key[early]
        changes = []
        for one in self.passes[rank]:
            if one != early:
                place, k = self.key[one], self.count[one]
                while place < turn and k < p.microbatches:
                    adding = p.saved[one] if one < stages else -p.saved[one - stages]
                    changes.append((place, adding * p.size[k]))
                    place, k = place + self.period, k + 1
        changes.sort()
        held = self.live[rank] + adds
        for _, change in changes:
            held += change
            if held > self.limit[rank]:
                return False
        return True

    def _run(self, rank: int, one: int, time: float) -> None:
        p, stages, k = self.problem, self.problem.stages, self.count[one]
        self.count[one] = k + 1
        self.key[one] += self.period
        if self.orders[rank]:
            self.idle[rank] += max(0.0, time - self.clock[rank])
        self.orders[rank].append((one, k))
        if one < stages:
            adds, end = p.saved[one] * p.size[k], time + p.F[one] * p.load[k]
            self.held[rank] += adds
            self.live[rank] += adds
            then, link = (one + 1, p.link[one]) if one + 1 < stages else (stages + one, 0.0)
        else:
            s = one - stages
            self.held[rank] += (p.kept[s] - p.saved[s]) * p.size[k]
            self.live[rank] -= p.saved[s] * p.size[k]
            self.queues[rank].append((s, k))
            end = time + p.I[s] * p.load[k]
            then, link = (one - 1, p.link[s - 1]) if s else (-1, 0.0)
        self.clock[rank] = end
        if then >= 0:
            self.arrivals[then].append(end + link)
            other = p.path[then % stages]
            if other != rank and self.clock[other] <= end + link:
                heappush(self.events, (end + link, other, self.number[other]))
        self._event(rank, end)

    def _event(self, rank: int, time: float) -> None:
        self.number[rank] += 1
        heappush(self.events, (time, rank, self.number[rank]))
