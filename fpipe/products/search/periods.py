# SPDX-License-Identifier: Apache-2.0
"""Starts from periods without idle time: each rank runs its passes and Ws of one microbatch back to
back, and again.

A rank's order of these is a cycle; where they stand in time follows from it. From rank to rank
cycles and shifts are chosen so that a microbatch waits as little as possible, by dynamic
programming over the ranks. Waits of whole periods then use the memory that is left: rank 0 of a V
at unit cost, small letters for the second stage, and its neighbour:

    rank 0   F f i w I W F f I i W w ...        F on rank 1 starts where that of rank 0 ends; f
    comes back from there rank 1     F I i W f w F I i W f w ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, permutations
from math import floor, inf
from random import Random
from typing import NamedTuple

from ...generators.dispatch import dispatch
from ...generators.problem import Orders, Problem

_WEIGHTS = (0.3, 3.0)
_STRETCHES = (1.0, 1.0, 1.0, 1.0, 1.02, 1.05)  #: of a period beyond the work of the busiest rank
_TARGETS = (1.0, 1.0, 1.02, 1.05)  #: spans that are aimed at, beside the bound
_APART = 3  #: actions between the Is of a rank and their Ws, at most
_LOST = 1e-9
#: One rank's cycle: when its actions begin; F, I and W of its first stage, then those of its
#: second.
Cycle = tuple[float, ...]


class Link(NamedTuple):
    """How long messages between two neighbours take for one pair of cycles, and the shift that
    gives this.
    """

    waits: tuple[float, ...]
    shift: float


class Choice(NamedTuple):
    """What a draw was made from."""

    places: tuple[float, ...]
    period: float
    waits: tuple[int, ...]  #: passes before which a microbatch waits for a whole period
    target: float
    early: bool | None  #: as in ``dispatch``; None runs all in the order of their places


class Periods:
    """Orders from such periods, by chance or near the best so far."""

    def __init__(self, problem: Problem, random: Random, bound: float):
        self.problem, self.random, self.bound = problem, random, bound
        self.base = lru_cache(partial(_Period, problem))

    @staticmethod
    def fit(problem: Problem) -> bool:
        """Whether a rank has one stage or two: else there are too many cycles."""
        return {len(stages) for stages in problem.of_rank} in ({1}, {2})

    def draw(self, known: Sequence[tuple[float, Choice]]) -> Choice:
        """What leads to orders: near one of the choices that are known with their spans, or new."""
        if not known or self.random.random() < 0.5:
            return self._new()
        return self._near(self.random.choice(known)[1])

    def orders(self, problem: Problem, choice: Choice) -> Orders | None:
        """The orders of this problem, which may have other microbatches; None where they do not fit
        in memory.
        """
        places = later(choice.places, choice.waits, choice.period)
        if choice.early is None:
            return static(problem, places, choice.period)
        return dispatch(problem, places, choice.period, choice.target, choice.early)

    def _new(self) -> Choice:
        random = self.random
        base = self.base(random.choice(_STRETCHES))
        places = min(
            (base.places(random) for _ in range(random.choice((1, 4)))),
            key=lambda one: one[self.problem.stages],
        )
        early, turns = random.choice((True, True, True, False, None)), random.random() < 0.6
        target = random.choice(_TARGETS) * self.bound
        spare = base.spare(places)
        waits = (
            self._pass(turns)
            for _ in range(spare if random.random() < 0.8 else random.randint(0, spare))
        )
        return Choice(tuple(places), base.period, tuple(waits), target, early)

    def _near(self, choice: Choice) -> Choice:
        random = self.random
        waits = list(choice.waits)
        if waits and random.random() < 0.7:
            waits[random.randrange(len(waits))] = self._pass()
        elif random.random() < 0.3:
            waits.append(self._pass())
        elif waits and random.random() < 0.3:
            waits.pop(random.randrange(len(waits)))
        target = choice.target * random.choice((1, 1, 0.99, 1.01))
        early = choice.early if random.random() < 0.8 else random.choice((True, False, None))
        return choice._replace(waits=tuple(waits), target=target, early=early)

    def _pass(self, turn: bool = False) -> int:
        """A pass to wait for, in the order of a microbatch's way: where that turns back, or mostly
        there.
        """
        p, random = self.problem, self.random
        way = range(1, 2 * p.stages)
        turns = [at for at in way if _rank(p, at) == _rank(p, at - 1)]
        return (
            random.choice(turns)
            if turns and (turn or random.random() < 0.6)
            else random.choice(way)
        )


def static(problem: Problem, places: Sequence[float], period: float) -> Orders:
    """Every rank's passes in the order of their places.

    >>> from fpipe.actions.costs import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (2.0, 2.0))
    >>> static(p, [0, 1, 3, 2], 3)[1]
    [(1, 0), (3, 0), (1, 1), (3, 1)]
    """
    stages, count = problem.stages, problem.microbatches
    return [
        [
            one
            for _, one in sorted(
                (places[one] + k * period, (one, k))
                for s in held
                for one in (s, stages + s)
                for k in range(count)
            )
        ]
        for held in problem.of_rank
    ]


def later(places: Sequence[float], waits: Sequence[int], period: float) -> list[float]:
    """The places where a microbatch waits for a period before each of these passes of its way.

    >>> later([0, 1, 3, 2], [2, 2], 10)  # passes F0, F1, I0, I1
    [0, 1, 23, 22]
    """
    count, stages = len(places), len(places) // 2
    moved = list(places)
    for at in waits:
        for following in range(at, count):
            moved[following if following < stages else count + stages - 1 - following] += period
    return moved


def _rank(problem: Problem, at: int) -> int:
    """Where a microbatch is at this step of its way."""
    stages = problem.stages
    return problem.path[at if at < stages else 2 * stages - 1 - at]


class _Hop(NamedTuple):
    """A step of the way between two actions of a period, and how long it takes at least."""

    start: int  #: the number of the action in its rank's cycle
    stop: int
    least: float


class _Period:
    """The cycles of all ranks, and how long each step takes for each pair of them."""

    def __init__(self, problem: Problem, stretch: float):
        self.problem = problem
        self.period = stretch * max(problem.work) / problem.microbatches
        load = sum(problem.load) / problem.microbatches
        self.F, self.I, self.W = (
            [t * load for t in times] for times in (problem.F, problem.I, problem.W)
        )
        known: dict[tuple[float, ...], list[Cycle]] = {}
        self.cycles = [
            known.setdefault(key, _cycles(key, self.period)) if key not in known else known[key]
            for key in map(self._times, range(problem.ranks))
        ]
        self.down, self.up = self._hops()
        tables: dict[object, list[list[Link]]] = {}
        self.links: list[list[list[Link]]] = []
        for rank in range(problem.ranks - 1):
            key = (
                id(self.cycles[rank]),
                id(self.cycles[rank + 1]),
                tuple(self.down[rank]),
                tuple(self.up[rank]),
            )
            if key not in tables:
                tables[key] = self._table(rank)
            self.links.append(tables[key])

    def _times(self, rank: int) -> tuple[float, ...]:
        return tuple(
            t for s in self.problem.of_rank[rank] for t in (self.F[s], self.I[s], self.W[s])
        )

    def _step(self, at: int) -> tuple[int, float]:
        """The number of an action in its rank's cycle, and how long it takes until the next one can
        run elsewhere.
        """
        p, stages = self.problem, self.problem.stages
        s, back = (at, 0) if at < stages else (2 * stages - 1 - at, 1)
        link = p.link[s] if not back and s + 1 < stages else p.link[s - 1] if back and s else 0.0
        return 3 * p.of_rank[p.path[s]].index(s) + back, (self.I if back else self.F)[s] + link

    def _hops(self) -> tuple[list[list[_Hop]], list[list[_Hop]]]:
        """Steps from each rank to the next one, and back."""
        p = self.problem
        down: list[list[_Hop]] = [[] for _ in range(p.ranks)]
        up: list[list[_Hop]] = [[] for _ in range(p.ranks)]
        for at in range(2 * p.stages - 1):
            a, b = _rank(p, at), _rank(p, at + 1)
            (start, least), (stop, _) = self._step(at), self._step(at + 1)
            if abs(a - b) == 1:
                (down if a < b else up)[min(a, b)].append(_Hop(start, stop, least))
        return down, up

    def _table(self, rank: int) -> list[list[Link]]:
        return [
            [self._link(a, b, self.down[rank], self.up[rank]) for b in self.cycles[rank + 1]]
            for a in self.cycles[rank]
        ]

    def _link(self, a: Cycle, b: Cycle, down: Sequence[_Hop], up: Sequence[_Hop]) -> Link:
        """The shift of the second cycle for which the steps take the least time in all."""
        period, best, least = self.period, None, inf
        there = [(b[hop.stop] - a[hop.start] - hop.least, hop.least) for hop in down]
        back = [(a[hop.stop] - b[hop.start] - hop.least, hop.least) for hop in up]
        for shift in [-early for early, _ in there] + [early for early, _ in back]:
            waits = tuple(
                [(early + shift + _LOST) % period + time for early, time in there]
                + [(early - shift + _LOST) % period + time for early, time in back]
            )
            if sum(waits) < least - _LOST:
                best, least = Link(waits, shift), sum(waits)
        assert best is not None
        return best

    def places(self, random: Random) -> list[float]:
        """Where the passes of a microbatch stand, for cycles and shifts with short waits."""
        cycles, shifts = self._shortest(random)
        p, stages, time = self.problem, self.problem.stages, 0.0
        places = [0.0] * (2 * stages)
        for at in range(1, 2 * stages):
            start, least = self._step(at - 1)
            stop, _ = self._step(at)
            a, b = _rank(p, at - 1), _rank(p, at)
            early = cycles[b][stop] + shifts[b] - cycles[a][start] - shifts[a] - least
            time += least + (early + _LOST) % self.period
            places[at if at < stages else 3 * stages - 1 - at] = time
        return places

    def _shortest(self, random: Random) -> tuple[list[Cycle], list[float]]:
        p = self.problem
        weights = [random.uniform(*_WEIGHTS) for _ in range(2 * p.stages)]
        noise, far = random.choice((0.0, 0.1, 0.3)), random.choice((0.1, 0.3, 1.0))

        def jitter():
            return 1 + noise * random.random()

        costs = [far * jitter() * self._far(0, cycle) for cycle in self.cycles[0]]
        steps: list[list[int]] = []
        for rank, table in enumerate(self.links):
            weighted = [
                [sum(map(float.__mul__, link.waits, weights)) for link in row] for row in table
            ]
            cycles, found, step = self.cycles[rank + 1], [], []
            for index, cycle in enumerate(cycles):
                cost, before = min(
                    (c + row[index], a)
                    for a, (c, row) in enumerate(zip(costs, weighted, strict=True))
                )
                found.append(cost + far * jitter() * self._far(rank + 1, cycle))
                step.append(before)
            costs = found
            steps.append(step)
        chosen = [min(range(len(costs)), key=costs.__getitem__)]
        for step in reversed(steps):
            chosen.append(step[chosen[-1]])
        chosen.reverse()
        shifts = accumulate(
            (self.links[r][chosen[r]][chosen[r + 1]].shift for r in range(p.ranks - 1)), initial=0.0
        )
        return [cycles[index] for cycles, index in zip(self.cycles, chosen, strict=True)], list(
            shifts
        )

    def _far(self, rank: int, cycle: Cycle) -> float:
        """How long Ws wait for their Is, and passes of this rank for each other."""
        return sum((cycle[at + 2] - cycle[at + 1]) % self.period for at in range(0, len(cycle), 3))

    def spare(self, places: Sequence[float]) -> int:
        """How many periods each microbatch can wait within the memory, about; not more than there
        are stages.
        """
        p, period = self.problem, self.period
        rooms = []
        for rank, stages in enumerate(p.of_rank):
            size = max(p.size) * max(max(p.saved[s] for s in stages), 1e-30)
            time = sum(places[p.stages + s] + self.I[s] + self.W[s] - places[s] for s in stages)
            rooms.append(
                min(p.limit[rank] / size, 4.0 * p.stages) - time / period - len(stages) / 2
            )
        return max(0, min(floor(min(rooms) + 0.5), p.stages))


def _cycles(times: tuple[float, ...], period: float) -> list[Cycle]:
    """All cycles of a rank's actions that have each W near its I. What is left of the period is
    spread over them.
    """
    count, stretch = len(times), period / sum(times)
    return [
        begins
        for order in permutations(range(1, count))
        if _between((0, *order)) <= _APART
        for begins in _begins((0, *order), times, stretch)
    ]


def _between(order: Sequence[int]) -> int:
    where = {one: at for at, one in enumerate(order)}
    return sum((where[at + 2] - where[at + 1]) % len(order) - 1 for at in range(0, len(order), 3))


def _begins(order: Sequence[int], times: Sequence[float], stretch: float) -> Iterator[Cycle]:
    begins, clock = [0.0] * len(times), 0.0
    for one in order:
        begins[one] = clock
        clock += times[one] * stretch
    yield tuple(begins)
