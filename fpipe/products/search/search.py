# SPDX-License-Identifier: Apache-2.0
"""The search: starts, local search and exact search under one deadline, for one or several
placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from random import Random
from time import monotonic

from ...actions.costs import Costs
from ...errors import ScheduleError
from ...generators.bounds import Bound
from ...generators.fill import Setting, fill
from ...generators.problem import ALMOST, Orders, Problem, passes_of
from ...schedule import Schedule
from . import exact, relaxation, starts
from .beam import beam
from .critical import anneal_rows
from .fused import merged
from .local import anneal
from .periods import Periods
from .task import Few, Source, Task

_LEAST = 3.0  #: seconds that the exact solver needs for few microbatches of a large problem
_BEAMS = 0.5  #: the share of the time that may be spent on beam search
_BEAM = (
    (30, 3),
    (100, 3),
    (100, 1),
    (300, 3),
    (300, 1),
    (1000, 3),
    (1000, 1),
)  #: its states, in all and alike
_SCAN = 0.15  #: the share of the time until which blocks that wait at the top are tried
#: From which share of the time on complete rows are annealed: with one task, and with several.
_ROWS_FROM = 0.3, 0.5
_CLOSE = 1.015  #: of its bound, within which it gets more of the time
_DRAWS = 0.5  #: the share of the time that may be spent on starts
#: Until which shares of the time orders are drawn and then annealed, round by round.
_ROUNDS = ((0.2, 0.35), (0.5, 0.65), (0.8, 1.0))


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
        tasks = [
            Task(v, bound)
            for p, bound in zip(problems, bounds, strict=True)
            for v in self._variants(p)
        ]
        try:
            for task in tasks:
                self._start(task)
            self._prove(problems, bounds)
            self._improve(tasks)
        except KeyboardInterrupt:
            if self.schedule is None:
                for task in tasks:
                    self._take(task)
            if self.schedule is None:
                raise

    def share(self) -> float:
        """How much of the time has passed; 1 where the best is known."""
        if self.span <= self.bound * ALMOST:
            return 1.0
        return (monotonic() - self.begin) / self.time_limit if self.time_limit > 0 else 1.0

    def note(self) -> str:
        """The state of the search in a line."""
        found = (
            f"span {self.span:.6g}, at most {self.span / self.bound - 1:.2%} above the best"
            if self.bound
            else ""
        )
        return f"solving: {found}" if self.schedule else "solving"

    # ---- steps ----
    def _variants(self, problem: Problem) -> Iterator[Problem]:
        """The problem with its microbatches in several orders, and without split backwards where
        these are cheaper.
        """
        yield problem
        times = self.costs.times(problem.stages)
        if any(b < i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)):
            yield Problem.of(
                self.costs,
                problem.path,
                problem.ranks,
                problem.microbatches,
                problem.limit,
                whole=True,
            )
        if not problem.even:
            up = sorted(
                range(problem.microbatches), key=lambda k: (problem.load[k], problem.size[k])
            )
            for order in (up, up[::-1], up[::2] + up[1::2][::-1], up[::2][::-1] + up[1::2]):
                yield problem.taking(order)

    def _start(self, task: Task) -> None:
        """The starts, until the best is known: those of the heuristics, named schedules, then the
        orders of these.
        """

        def best():
            return min(self.span, task.span) <= task.bound * ALMOST

        for orders in starts.lines(task.problem):
            if not best():
                task.offer_orders(orders)
        heuristics = False
        for filled in starts.filled(task.problem) if task.bound < self.span else ():
            task.offer(filled, Setting(task.bound - task.work, 0.0))
            heuristics = True
        if heuristics and task.filled is not None:
            self._delay(task, passes_of(task.filled.rows, task.problem.stages))
        self._take(task)
        if best() and self.schedule is not None:
            return
        small, before = task.whole.small, self.schedule
        for schedule in (
            starts.named(task.whole, () if small else starts.FEW) if small or not heuristics else ()
        ):
            self._offer(schedule, task.whole.limit)
            for other in starts.relieved(schedule):
                if self.share() < 1 and self.span > task.bound * ALMOST:
                    self._offer(other, task.whole.limit)
            if not small and self.schedule is not before:
                break  # of many actions the first that fits must do
        for schedule in starts.looped(task.whole, self.costs):
            self._offer(schedule, task.whole.limit)
        for orders in starts.orders(task.problem):
            if self.share() >= _DRAWS or best():
                break
            task.offer_orders(orders)
        if task.filled is None and self.schedule is None:
            task.offer_orders(starts.one_by_one(task.problem))
        self._take(task)

    def _delay(self, task: Task, orders: Orders) -> None:
        for tried in starts.delayed(task.problem, orders):
            if self.share() >= _DRAWS or task.span <= task.bound * ALMOST:
                break
            setting = Setting(task.bound - task.work, 0.0)
            task.offer(fill(task.problem, tried, *setting), setting)

    def _prove(self, problems: Sequence[Problem], bounds: Sequence[Bound]) -> None:
        """Solve small problems exactly: with a proof that no schedule is better, or with a better
        bound.
        """
        if self._takes(problems[0], relaxation.MOST) and 0 < self.bound < self.span:
            bounds = [
                self._relaxed(problem, bound)
                for problem, bound in zip(problems, bounds, strict=True)
            ]
            self.bound = min(bounds)
        if not self._takes(problems[0], exact.MOST):
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
            better = answer.bound > bound * ALMOST
            proved.append(
                Bound(min(answer.bound, self.span), "exact search: there is none")
                if better
                else bound
            )
            if answer.interrupted:
                raise KeyboardInterrupt
        self.bound = min(proved)

    def _relaxed(self, problem: Problem, bound: Bound) -> Bound:
        """The bound of the linear program, where it is larger and there is time for it."""
        if bound >= self.span or self.share() >= _DRAWS:
            return bound
        least = relaxation.relaxed(problem) * (1 - 1e-7)  # its solver is not exact
        return (
            Bound(min(least, self.span), "linear program of all starts")
            if least > bound * ALMOST
            else bound
        )

    def _takes(self, problem: Problem, most: int) -> bool:
        """Whether the exact solver takes a problem: one of at most so many actions, and of split
        backwards.
        """
        times = self.costs.times(problem.stages)
        split = all(b >= i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True))
        return (
            problem.actions <= most and split and self.costs.overlap is None and exact.available()
        )

    def _improve(self, tasks: Sequence[Task]) -> None:
        """Rounds of draws and of local search from the best that was drawn; the last one from the
        best of all.
        """
        self._beams([task for task in tasks if task.problem.actions <= exact.MOST])
        for task in tasks:
            blocks = starts.Blocks(task.problem, self.random)
            known = task.scan(
                blocks, lambda task=task: self.share() > _SCAN or task.span <= task.bound * ALMOST
            )
            for _, choice in known[:2]:
                task.offer_orders(blocks.orders(task.problem, choice))
            self._take(task)
            task.sources = [Source(blocks, known)]
            if Periods.fit(task.problem):
                task.sources.append(
                    Source(Periods(task.problem, self.random, task.bound - task.work), [])
                )
        for drawn, annealed in _ROUNDS:
            few = tasks[0].few if tasks else None
            if few and (
                drawn > _DRAWS or (drawn == _DRAWS and few.filled.span <= few.bound * _CLOSE)
            ):
                self.shorten(tasks[0], few)
            tasks = self._draw([task for task in tasks if task.bound < self.span], drawn)
            if tasks and tasks[0].problem.small:
                self._anneal(tasks[0], annealed)
                if annealed > _ROWS_FROM[len(tasks) > 1] and tasks[0].has_few_actions:
                    self._anneal_rows(tasks[0])
                    return

    def _beams(self, tasks: Sequence[Task]) -> None:
        """Beam search of small problems, with more states while that helps and fits in its share of
        the time.
        """
        late, each, known = lambda: self.share() >= _BEAMS, 0.0, self.span
        for width, alike in _BEAM:
            before = self.share()
            if before + 1.2 * each * width > _BEAMS:
                return
            for task in tasks:
                if (
                    task.span > task.bound * ALMOST
                    and (found := beam(task.problem, width, alike, late)) is not None
                ):
                    task.offer(found, task.setting)
                    self._take(task)
            each = (self.share() - before) / width
            if self.span >= known:
                return

    def _draw(self, tasks: Sequence[Task], until: float) -> Sequence[Task]:
        """Draw until this share of the time has passed; the tasks by what was drawn, the best one
        first.
        """
        for task in tasks:
            task.drawn = None
        while tasks and self.share() < until:
            for task in tasks:
                if self.share() < until:
                    task.draw(self.random)
            for task in sorted(tasks, key=lambda task: task.span)[:1]:
                self._take(task)
            tasks = [task for task in tasks if task.bound < self.span]
        for task in sorted(tasks, key=lambda task: task.span)[:3]:
            self._take(task)
        return sorted(tasks, key=lambda task: task.span)

    def _anneal(self, task: Task, until: float) -> None:
        """Local search from what was drawn: with few microbatches first, since most of the waits
        are at both ends.
        """
        filled, setting = task.filled, task.setting
        if until < 1 and task.drawn is not None:
            filled, setting, _ = task.drawn
        if filled is None:
            return
        begin, p = self.share(), task.problem
        orders = passes_of(filled.rows, p.stages)
        if (few := task.begin_few()) is not None:
            self._anneal_few(task, few, begin + 0.7 * (until - begin))
            if task.filled is not None and task.filled.span < filled.span:
                orders, setting = passes_of(task.filled.rows, p.stages), task.setting
        anneal(p, orders, setting, self.random, self._passed(task, self.share(), until), task.offer)
        self._take(task)

    def _anneal_rows(self, task: Task) -> None:
        """Local search on complete rows in what is left of the time."""
        if task.filled is not None:

            def found(filled):
                return task.offer(filled, task.setting)

            anneal_rows(
                task.problem,
                task.filled.rows,
                self.random,
                self._passed(task, self.share(), 1.0),
                found,
            )
        self._take(task)

    def _anneal_few(self, task: Task, few: Few, until: float) -> None:
        better: list[Few] = []
        passed, orders = (
            self._passed(task, self.share(), until),
            passes_of(few.filled.rows, few.problem.stages),
        )

        def found(filled, setting):
            return better.append(task.offer_few(few._replace(filled=filled, setting=setting)))

        anneal(few.problem, orders, few.setting, self.random, passed, found)
        for one in better[-1:-4:-1]:
            task.lengthen(one.filled.rows, few.more)

    def shorten(self, task: Task, few: Few) -> None:
        """Shorten the best of few microbatches by the exact solver, and repeat its middle."""
        seconds = (1 - self.share()) * self.time_limit
        if seconds < _LEAST or not self._takes(few.problem, exact.MOST_OF_FEW):
            return
        if not exact.few_integers(few.problem, few.filled.span):
            return
        p, rows = few.problem, few.filled.rows
        answer = exact.solve_exactly(p, few.filled.span, few.bound, seconds, known=rows)
        if answer.rows is not None:
            task.lengthen(answer.rows, few.more)
            self._take(task)
        if answer.interrupted:
            raise KeyboardInterrupt

    def _passed(self, task: Task, begin: float, until: float) -> Callable[[], float]:
        """How much of the time between has passed; all, where the task cannot become better."""

        def passed() -> float:
            if begin >= until or task.span <= task.bound * ALMOST:
                return 1.0
            return (self.share() - begin) / (until - begin)

        return passed

    # ---- results ----
    def _take(self, task: Task) -> None:
        """The solution of a task in full, if it may be the best."""
        if task.span < self.span and (schedule := task.schedule()) is not None:
            self._offer(schedule)
            if any(getattr(self.costs, name) is not None for name in ("B", "overlap")):
                for other in merged(schedule, self.costs):
                    self._offer(other, task.whole.limit)

    def _offer(self, schedule: Schedule, limit: Sequence[float] = ()) -> None:
        """Keep a schedule if it is the best so far and within its limits of memory."""
        try:
            timeline = schedule.simulate(self.costs)
        except ScheduleError:
            return
        held = timeline.peak_bytes if min(limit, default=inf) < inf else ()
        if timeline.span < self.span and all(
            h <= at * ALMOST for h, at in zip(held, limit, strict=False)
        ):
            self.schedule, self.span = (
                replace(schedule, name=schedule.name or "Solved"),
                timeline.span,
            )
