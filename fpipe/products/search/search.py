# SPDX-License-Identifier: Apache-2.0
"""The search for one or several placements: starts, and annealing of the best rows for the rest of
the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from random import Random
from time import monotonic

from ... import Costs, Schedule
from ...errors import ScheduleError
from .annealing import anneal
from .bounds import Bound
from .fill import Filled
from .fused import variants
from .problem import ALMOST, Problem
from .starts import starts

_STARTS = 0.5  #: the share of the time until which starts are made
_DESCENT = 300_000  #: moves of the descent times actions: less than a tenth of a second
_COLD = 0.99  #: the share of the time at which annealing is a descent


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
        found: list[tuple[Problem, Filled]] = []
        try:
            for problem, bound in zip(problems, bounds, strict=True):
                for variant in self._variants(problem):
                    if bound < self.span:
                        found.append((variant, self._best_start(variant, bound)))
            problem, filled = min(found, key=lambda one: one[1].span)
            if self.span > self.bound * ALMOST and not problem.large:
                self._anneal(problem, filled)
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

    def _best_start(self, problem: Problem, bound: float) -> Filled:
        """The best start of a problem; all are offered, since Ctrl-C returns the best so far."""
        best: Filled | None = None
        for filled in starts(problem, bound, lambda: self.share() >= _STARTS):
            self._offer(problem, filled)
            if best is None or filled.span < best.span:
                best = filled
            if best.span <= bound * ALMOST:
                break
        assert best is not None, "one microbatch after another fits"
        return best

    def _anneal(self, problem: Problem, filled: Filled) -> None:
        """Shorten a solution: a descent of a few moves whatever the time, and then annealing in the
        time that is left.
        """
        begin, best = min(self.share(), 1.0), [filled]
        moves = count()
        descent = _DESCENT / problem.actions

        def passed() -> float:
            if best[-1].span <= self.bound * ALMOST:
                return 1.0
            if next(moves) < descent:
                return _COLD
            return 1.0 if begin == 1.0 else (self.share() - begin) / (1 - begin)

        anneal(problem, filled.rows, self.random, passed, best.append)
        self._offer(problem, best[-1])

    # ---- results ----
    def _offer(self, problem: Problem, filled: Filled) -> None:
        """Keep a solution if it is the best so far, as it is or with whole and fused backwards."""
        schedule = problem.schedule(filled.rows)
        if filled.span < self.span:
            self._keep(schedule, problem.limit)
        if self.costs.B is not None or self.costs.overlap is not None:
            for other in variants(schedule, self.costs):
                self._keep(other, problem.limit)

    def _keep(self, schedule: Schedule, limit: Sequence[float]) -> None:
        try:
            timeline = schedule.simulate(self.costs)
        except ScheduleError:
            return
        fits = all(h <= most * ALMOST for h, most in zip(timeline.peak_bytes, limit, strict=True))
        if fits and timeline.span < self.span:
            self.schedule, self.span = replace(schedule, name="Solved"), timeline.span
