# SPDX-License-Identifier: Apache-2.0
"""From orders of F and I to rows: every pass as early as it can, and Ws where they cost least.

A W runs before a pass that does not fit in memory without it, in a wait that is long enough for it,
and in a shorter one where waiting would cost the rank more idle time than ``target`` leaves it. The
others come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .problem import ALMOST, Orders, Problem, Rows


class Filled(NamedTuple):
    """Rows, and how long each rank is busy or waits."""

    rows: Rows
    windows: list[float]

    @property
    def span(self) -> float:
        """The longest window."""
        return max(self.windows)


def fill(problem: Problem, orders: Orders, target: float) -> Filled | None:
    """The rows of these orders; None where they block each other or do not fit in memory.

    ``target`` is the span that is aimed at: a rank may idle as long as it leaves it.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (9.0, 9.0))
    >>> filled = fill(p, [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (3, 0), (1, 1), (3, 1)]], 0)
    >>> print(p.schedule(filled.rows), filled.windows)
    [0F0, 0F1, 0I0, 0W0, 0I1, 0W1]
    [1F0, 1I0, 1F1, 1I1, 1W0, 1W1] [7.0, 6.0]
    """
    run = _Run(problem, target)
    ready = list(range(problem.ranks))[::-1]
    waiting: dict[tuple[int, int], int] = {}
    while ready:
        rank = ready.pop()
        if not run.advance(rank, orders[rank], waiting, ready):
            return None
    if any(run.position[rank] < len(orders[rank]) for rank in range(problem.ranks)):
        return None
    for rank, (queue, done) in enumerate(zip(run.queues, run.filled, strict=True)):
        run.rows[rank].extend([(2, s, k) for s, k in queue[done:]])
        run.clock[rank] += sum([problem.W[s] * problem.load[k] for s, k in queue[done:]])
    return Filled(run.rows, [end - start for end, start in zip(run.clock, run.first, strict=True)])


class _Run:
    """The state of all ranks; ``advance`` runs one as far as it can."""

    def __init__(self, problem: Problem, target: float):
        ranks, stages, microbatches = problem.ranks, problem.stages, problem.microbatches
        self.problem = problem
        self.budget = [target - work for work in problem.work]
        self.arrivals = [[-1.0] * microbatches for _ in range(2 * stages)]
        self.arrivals[0] = [0.0] * microbatches
        self.clock, self.first, self.idle, self.held = ([0.0] * ranks for _ in range(4))
        self.position, self.filled = [0] * ranks, [0] * ranks
        self.rows: Rows = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.limit = [limit * ALMOST for limit in problem.limit]
        self.following = problem.following

    def advance(
        self,
        rank: int,
        order: Sequence[tuple[int, int]],
        waiting: dict[tuple[int, int], int],
        ready: list[int],
    ) -> bool:
        """Run this rank's passes until one waits for another rank; False where memory does not
        suffice.
        """
        p, stages, arrivals, rows = (
            self.problem,
            self.problem.stages,
            self.arrivals,
            self.rows[rank],
        )
        times, load, size, saved, kept = (p.F, p.I), p.load, p.size, p.saved, p.kept
        clock, held, position, limit = (
            self.clock[rank],
            self.held[rank],
            self.position[rank],
            self.limit[rank],
        )
        queue, following = self.queues[rank], self.following
        for at in range(position, len(order)):
            one, k = order[at]
            arrival = arrivals[one][k]
            if arrival < 0.0:
                waiting[one, k] = rank
                break
            forward = one < stages
            s = one if forward else one - stages
            adds = saved[s] * size[k] if forward else (kept[s] - saved[s]) * size[k]
            if arrival > clock or held + adds > limit:
                if not at:
                    clock = self.first[rank] = arrival
                clock, held = self._fill(rank, clock, held, arrival, adds)
                if held + adds > limit:
                    return False
            held += adds
            rows.append((0 if forward else 1, s, k))
            clock += times[not forward][s] * load[k]
            if not forward:
                queue.append((s, k))
            then, link = following[one]
            if then >= 0:
                arrivals[then][k] = clock + link
                if (waiter := waiting.pop((then, k), -1)) >= 0:
                    ready.append(waiter)
            position = at + 1
        self.clock[rank], self.held[rank], self.position[rank] = clock, held, position
        return True

    def _fill(
        self, rank: int, clock: float, held: float, arrival: float, adds: float
    ) -> tuple[float, float]:
        """Ws until the next pass fits and has arrived; the clock and the memory then."""
        p, queue, done, limit = self.problem, self.queues[rank], self.filled[rank], self.limit[rank]
        while done < len(queue):
            s, k = queue[done]
            time = p.W[s] * p.load[k]
            fits = held + adds <= limit
            late = arrival > clock and self.idle[rank] + arrival - clock > self.budget[rank]
            if fits and clock + time > arrival * ALMOST and not late:
                break
            self.rows[rank].append((2, s, k))
            clock, held, done = clock + time, held - p.kept[s] * p.size[k], done + 1
        self.filled[rank] = done
        if arrival > clock:
            self.idle[rank] += arrival - clock
            clock = arrival
        return clock, held
