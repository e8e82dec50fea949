# SPDX-License-Identifier: Apache-2.0
"""A problem with one order of microbatches, and the best of its solutions; also of its first few
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any, NamedTuple

from ...generators.fill import Filled, Setting, best_fill, fill
from ...generators.problem import Orders, Problem, Rows, most_held, passes_of
from ...schedule import Schedule
from .periodic import extended
from .starts import Blocks

_ACTIONS = 2000  #: up to which complete rows are annealed


class Source(NamedTuple):
    """What draws choices for orders, and its best ones, with their spans."""

    starts: Any
    known: list[tuple[float, Any]]


class Drawn(NamedTuple):
    """Rows, how they were filled, and what gives such orders for another count of microbatches."""

    filled: Filled
    setting: Setting
    orders: Callable[[Problem], Orders | None]


class Few(NamedTuple):
    """A solution for few microbatches, and what it takes to make one for all of them of it."""

    problem: Problem
    filled: Filled
    setting: Setting
    more: int
    bound: float  #: what few would take if all took no longer than their bound

    def better(self, filled: Filled | None, setting: Setting) -> Few:
        """This, or another solution if it is shorter."""
        shorter = filled is not None and filled.span < self.filled.span * (1 - 1e-12)
        return self._replace(filled=filled, setting=setting) if shorter and filled else self


class Task:
    """A problem with one order of microbatches, shortened if there are many, and its best solution
    so far.
    """

    def __init__(self, problem: Problem, bound: float):
        self.whole, self.bound = problem, bound
        kept = 3 * problem.ranks + 8
        short = problem.even and problem.microbatches > 1.25 * kept and not problem.small
        self.problem = problem.taking(range(kept)) if short else problem
        self.more = problem.microbatches - self.problem.microbatches
        self.work = (
            self.more * max(self.problem.work) / self.problem.microbatches
        )  #: of what was left out
        self.filled: Filled | None = None
        self.setting = Setting(inf, 0.0)
        self.sources: list[Source] = []
        self.drawn: Drawn | None = None  #: the best of a round of draws
        self.few: Few | None = None  #: the best of few microbatches

    @property
    def span(self) -> float:
        """What the best solution would take in full."""
        return inf if self.filled is None else self.filled.span + self.work

    @property
    def has_few_actions(self) -> bool:
        """Whether complete rows can be annealed: a change of those of few microbatches does not
        repeat.
        """
        return not self.more and self.problem.actions <= _ACTIONS

    def offer(self, filled: Filled | None, setting: Setting) -> None:
        """Keep a solution that is better."""
        if filled is not None and (
            self.filled is None or filled.span < self.filled.span * (1 - 1e-12)
        ):
            self.filled, self.setting = filled, setting

    def offer_orders(self, orders: Orders | None) -> tuple[Filled | None, Setting]:
        """Fill orders, and return what that gives."""
        if orders is None:
            return None, self.setting
        known = inf if self.filled is None else self.filled.span
        filled, setting = best_fill(self.problem, orders, self.bound - self.work, known)
        self.offer(filled, setting)
        return filled, setting

    def draw(self, random: Random) -> None:
        """Try one of the orders that are drawn by chance."""
        best = min(self.sources, key=lambda source: source.known[0][0] if source.known else 0.0)
        source = best if random.random() < 0.5 else random.choice(self.sources)
        choice = source.starts.draw(source.known)
        filled, setting = self.offer_orders(source.starts.orders(self.problem, choice))
        if filled is not None:
            source.known[:] = sorted(
                [*source.known, (filled.span, choice)], key=lambda entry: entry[0]
            )[:8]
            if self.drawn is None or filled.span < self.drawn.filled.span:
                self.drawn = Drawn(
                    filled, setting, lambda problem: source.starts.orders(problem, choice)
                )

    def begin_few(self) -> Few | None:
        """What the best draw gives for few microbatches: most of the waits are at both ends."""
        few = self._fewer()
        if self.drawn is None or few is None or (orders := self.drawn.orders(few)) is None:
            return None
        more = self.problem.microbatches - few.microbatches
        bound = self._bound_of_few(more)
        filled, setting = best_fill(few, orders, bound)
        return None if filled is None else self.offer_few(Few(few, filled, setting, more, bound))

    def scan(self, blocks: Blocks, passed: Callable[[], bool]) -> list[tuple[float, Any]]:
        """The best of the blocks that wait at the top, of few microbatches, with their spans in
        full.
        """
        few, found = self._fewer(), []
        for top in () if few is None else blocks.tops:
            if passed():
                break
            assert few is not None
            choice, more = blocks.top(*top), self.problem.microbatches - few.microbatches
            setting = Setting(self._bound_of_few(more), 0.0)
            orders = blocks.orders(few, choice)
            if orders is not None and (filled := fill(few, orders, *setting)) is not None:
                self.offer_few(Few(few, filled, setting, more, setting.target))
                found.append((filled.span + self._work(more), choice))
        return sorted(found, key=lambda entry: entry[0])[:8]

    def _fewer(self) -> Problem | None:
        p = self.problem
        kept = p.ranks + min(2 * p.ranks, most_held(p)) + 2
        return p.taking(range(kept)) if p.even and p.microbatches > 1.25 * kept else None

    def _work(self, more: int) -> float:
        return more * max(self.problem.work) / self.problem.microbatches

    def _bound_of_few(self, more: int) -> float:
        return self.bound - self.work - self._work(more)

    def offer_few(self, few: Few) -> Few:
        """Keep a solution for few microbatches that is better."""
        self.few = few if self.few is None else self.few.better(few.filled, few.setting)
        return few

    def lengthen(self, rows: Rows, more: int) -> None:
        """Try rows of few microbatches with the period in their middle repeated."""
        for longer in extended(_without_w(rows), more):
            self.offer_orders(passes_of(longer, self.problem.stages))

    def schedule(self) -> Schedule | None:
        """The best solution in full; None where its middle has no period."""
        if self.filled is None:
            return None
        if not self.more:
            return self.whole.schedule(self.filled.rows)
        rows = next(extended(self.filled.rows, self.more), None) or self._extended_passes()
        return None if rows is None else self.whole.schedule(rows)

    def _extended_passes(self) -> Rows | None:
        """In full, where the Ws have no period but the passes may have one."""
        assert self.filled is not None
        setting = self.setting._replace(target=self.setting.target + self.work)
        for passes in extended(_without_w(self.filled.rows), self.more):
            filled = fill(self.whole, passes_of(passes, self.whole.stages), *setting)
            if filled is not None:
                return filled.rows
        return None


def _without_w(rows: Rows) -> Rows:
    return [[one for one in row if one[0] < 2] for row in rows]
