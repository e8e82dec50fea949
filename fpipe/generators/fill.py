# SPDX-License-Identifier: Apache-2.0
"""From orders of F and I to rows: every pass as early as it can, and Ws where they cost least.

A W runs before a pass that does not fit in memory without it, in a wait that is long enough for it,
and in a shorter one where waiting would cost the rank more idle time than ``target`` leaves it; the
others come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
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


def fill(problem: Problem, orders: Orders, target: float, tolerance: float = 0.0) -> Filled | None:
    """The rows of these orders; None where they block each other or do not fit in memory.

    ``target`` is the span that is aimed at: a rank may idle as long as it leaves it. A W may exceed
    that by ``tolerance`` times its length before it is put into a wait that is too short for it.

    >>> from fpipe.actions.costs import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (9.0, 9.0))
    >>> filled = fill(p, [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (3, 0), (1, 1), (3, 1)]], 0)
    >>> print(p.schedule(filled.rows), filled.windows)
    [0F0, 0F1, 0I0, 0W0, 0I1, 0W1]
    [1F0, 1I0, 1F1, 1I1, 1W0, 1W1] [7.0, 6.0]
    """
    run = _Run(problem, target, tolerance)
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

    def __init__(self, problem: Problem, target: float, tolerance: float):
        ranks, stages, microbatches = problem.ranks, problem.stages, problem.microbatches
        self.problem, self.tolerance = problem, tolerance
        self.budget = [target - work for work in problem.work]
        self.arrivals = [[-1.0] * microbatches for _ in range(2 * stages)]
        self.arrivals[0] = [0.0] * microbatches
        self.clock, self.first, self.idle, self.held = ([0.0] * ranks for _ in range(4))
        self.position, self.filled = [0] * ranks, [0] * ranks
        self.rows: Rows = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.limit = [limit * ALMOST for limit in problem.limit]
        self.next = _next(problem)

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
        queue, following = self.queues[rank], self.next
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
            late = (
                arrival > clock
                and self.idle[rank] + arrival - clock > self.budget[rank] + self.tolerance * time
            )
            if fits and clock + time > arrival * ALMOST and not late:
                break
            self.rows[rank].append((2, s, k))
            clock, held, done = clock + time, held - p.kept[s] * p.size[k], done + 1
        self.filled[rank] = done
        if arrival > clock:
            self.idle[rank] += arrival - clock
            clock = arrival
        return clock, held


def _next(problem: Problem) -> list[tuple[int, float]]:
    """For each pass the one that waits for it, or -1, and how long its message takes."""
    stages, link = problem.stages, problem.link
    forwards = [(s + 1, link[s]) if s + 1 < stages else (stages + s, 0.0) for s in range(stages)]
    return forwards + [(stages + s - 1, link[s - 1]) if s else (-1, 0.0) for s in range(stages)]


_NEAR = 1.02  #: of the best span, within which more settings are tried


class Setting(NamedTuple):
    """The choices of ``fill``."""

    target: float
    tolerance: float


#: By how much a target exceeds the bound, and the tolerance.
_FEW = ((1.0, 0.0), (1.05, 0.0), (inf, 0.0))
_MANY = tuple(
    (stretch, tolerance)
    for stretch in (1.0, 1.01, 1.03, 1.06, 1.1, 1.2, inf)
    for tolerance in (0.0, 1.0)
)


def best_fill(
    problem: Problem, orders: Orders, bound: float, known: float = inf
) -> tuple[Filled | None, Setting]:
    """The shortest span of these orders under several settings, and the setting.

    Many are tried of small problems, where few come near the span that is ``known``.
    """
    found, best = None, Setting(inf, 0.0)
    for tries in (_FEW, _MANY) if problem.small else (_FEW,):
        for stretch, tolerance in tries:
            setting = Setting(bound * stretch, tolerance)
            tried = fill(problem, orders, *setting)
            if tried is None:
                return None, best
            if found is None or tried.span < found.span:
                found, best = tried, setting
            if found.span <= bound * ALMOST:
                return found, best
        if found is not None and found.span > known * _NEAR:
            break
    return found, best
