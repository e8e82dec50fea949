# SPDX-License-Identifier: Apache-2.0
"""The search for one or several placements: starts, a proof of small problems, and annealing of the
best rows for the rest of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from random import Random
from time import monotonic
from typing import NamedTuple

from ... import Costs, Schedule
from ...errors import ScheduleError
from . import exact
from .annealing import anneal
from .bounds import Bound
from .fill import Filled
from .fused import merged
from .problem import ALMOST, Problem
from .starts import starts

_STARTS = 0.5  #: the share of the time until which starts are made
_DESCENT = 300_000  #: moves of the descent times actions: less than a tenth of a second
_COLD = 0.99  #: the share of the time at which annealing is a descent


class Solution(NamedTuple):
    """A problem, the bound on its span, and rows."""

    problem: Problem
    bound: float
    filled: Filled

    @property
    def is_best(self) -> bool:
        """Whether no rows can be shorter."""
        return self.filled.span <= self.bound * ALMOST


class Search:
    """The state of a search: ``schedule`` is the best of all, and ``span`` its span."""

    def __init__(self, costs: Costs, time_limit: float, seed: int):
        self.costs, self.random = costs, Random(seed)
        self.begin, self.time_limit = monotonic(), time_limit
        self.schedule: Schedule | None = None
        self.span, self.bound = inf, Bound(0.0)

    def run(self, problems: Sequence[Problem], bounds: Sequence[Bound]) -> None:
        """Search until the time has passed, the best is known, or Ctrl-C."""
        self.bound = min(bounds)
        solutions: list[Solution] = []
        try:
            for problem, bound in zip(problems, bounds, strict=True):
                for variant in self._variants(problem):
                    if bound < self.span:
                        solutions.append(self._start(variant, bound))
            self._prove(problems, bounds)
            best = min(solutions, key=lambda one: one.filled.span)
            if self.span > self.bound * ALMOST and not best.problem.large:
                self._anneal(best)
        except KeyboardInterrupt:
            if self.schedule is None:
                raise

    def share(self) -> float:
        """How much of the time has passed; 1 where the best is known."""
        if self.span <= self.bound * ALMOST:
            return 1.0
        return (monotonic() - self.begin) / self.time_limit if self.time_limit > 0 else 1.0

    def note(self) -> str:
        """The state of the search in a line."""
        if not self.schedule or not self.bound:
            return "solving"
        above = self.span / self.bound - 1
        return f"solving: span {self.span:.6g}, at most {above:.2%} above the best"

    # ---- steps ----
    def _variants(self, problem: Problem) -> Iterator[Problem]:
        """The problem with its microbatches in several orders, and without split backwards where
        these are cheaper.
        """
        yield problem
        p = problem
        if not self._split(p):
            yield Problem.of(self.costs, p.path, p.ranks, p.microbatches, p.limit, whole=True)
        if not p.even:
            up = sorted(range(p.microbatches), key=lambda k: (p.load[k], p.size[k]))
            for order in (up, up[::-1], up[::2] + up[1::2][::-1], up[::2][::-1] + up[1::2]):
                yield p.reordered(order)

    def _split(self, problem: Problem) -> bool:
        """Whether whole backwards take as long as split ones."""
        times = self.costs.times(problem.stages)
        return all(b >= i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True))

    def _start(self, problem: Problem, bound: float) -> Solution:
        """The best start of a problem."""
        best: Solution | None = None
        for filled in starts(problem, bound, lambda: self.share() >= _STARTS):
            solution = Solution(problem, bound, filled)
            if self.costs.B is not None or self.costs.overlap is not None:
                self._merge(solution)
            if best is None or filled.span < best.filled.span:
                best = solution
            if self.schedule is None:
                self._take(best)  # what Ctrl-C returns
            if best.is_best:
                break
        assert best is not None, "one microbatch after another fits"
        self._take(best)
        return best

    def _prove(self, problems: Sequence[Problem], bounds: Sequence[Bound]) -> None:
        """Solve small problems exactly: with a proof that no schedule is better, or with a better
        bound.
        """
        if problems[0].actions > exact.MOST or not self._split(problems[0]):
            return
        if self.costs.overlap is not None or not exact.available():
            return
        proved = []
        for problem, bound in sorted(zip(problems, bounds, strict=True), key=lambda pair: pair[1]):
            seconds = (1 - self.share()) * self.time_limit
            if bound >= self.span or seconds <= 0 or self.schedule is None:
                proved.append(bound)
                continue
            answer = exact.solve_exactly(problem, self.span, bound, seconds)
            if answer.rows is not None:
                self._offer(problem.schedule(answer.rows))
            if answer.bound > bound * ALMOST:
                bound = Bound(min(answer.bound, self.span), "exact search: there is none")
            proved.append(bound)
            if answer.interrupted:
                raise KeyboardInterrupt
        self.bound = min(proved)

    def _anneal(self, solution: Solution) -> None:
        """Shorten a solution: a descent of a few moves whatever the time, and then annealing in the
        time that is left.
        """
        begin, best = min(self.share(), 1.0), [solution]
        moves = count()
        descent = _DESCENT / solution.problem.actions

        def passed() -> float:
            if next(moves) < descent and not best[-1].is_best:
                return _COLD
            over = begin == 1.0 or best[-1].is_best
            return 1.0 if over else (self.share() - begin) / (1 - begin)

        def keep(filled: Filled) -> None:
            best.append(solution._replace(filled=filled))

        anneal(solution.problem, solution.filled.rows, self.random, passed, keep)
        self._take(best[-1])

    # ---- results ----
    def _take(self, solution: Solution) -> None:
        """Offer the schedule of a solution."""
        if solution.filled.span < self.span:
            self._offer(solution.problem.schedule(solution.filled.rows))
        if self.costs.B is not None or self.costs.overlap is not None:
            self._merge(solution)

    def _merge(self, solution: Solution) -> None:
        """Offer forms of a solution with whole and fused backwards."""
        for other in merged(solution.problem.schedule(solution.filled.rows), self.costs):
            self._offer(other, solution.problem.limit)

    def _offer(self, schedule: Schedule, limit: Sequence[float] = ()) -> None:
        """Keep a schedule if it is the best so far and within its limits of memory."""
        try:
            timeline = schedule.simulate(self.costs)
        except ScheduleError:
            return
        fits = min(limit, default=inf) == inf or all(
            held <= at * ALMOST for held, at in zip(timeline.peak_bytes, limit, strict=True)
        )
        if fits and timeline.span < self.span:
            self.schedule, self.span = replace(schedule, name="Solved"), timeline.span
