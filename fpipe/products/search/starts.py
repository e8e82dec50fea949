# SPDX-License-Identifier: Apache-2.0
"""Orders from which a search starts: those of named schedules, of the zero-bubble heuristic, and of
repeated blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from typing import TypeAlias

from ...actions.action import Action, Row, joined
from ...actions.costs import Costs
from ...errors import ScheduleError
from ...generators.automatic import rounds
from ...generators.automatic_loop import automatic_loop
from ...generators.catalogue import make_schedule, schedule_names
from ...generators.dispatch import dispatch
from ...generators.fill import Filled
from ...generators.problem import ALMOST, Orders, Problem, orders_of
from ...generators.v_lines import line_orders
from ...schedule import Schedule

_STEPS = (0.5, 1.0, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0)
#: Steps that are the best for a V under some limit of memory, at unit cost.
_OF_V = (
    (1, 1, 1, 1),
    (1, 1, 2, 2),
    (1, 2, 2, 2),
    (1, 2, 4, 1),
    (1, 3, 3, 1),
    (1, 2, 4, 2),
    (1, 4, 2, 1),
    (1, 3, 3, 3),
)
_TARGETS = (1.0, 1.02, 1.05, 1.1, 1.2, 9.0)


#: Names that are tried where there are many actions.
FEW = ("ZBH2", "ZBH1", "ZBVZeroBubble", "VHalf", "VMin", "InterleavedZeroBubble", "Interleaved1F1B")


def named(problem: Problem, names: Sequence[str] = ()) -> Iterator[Schedule]:
    """The named schedules, or only these, that place stages as the problem does."""
    for name in names or schedule_names():
        with suppress(ScheduleError):  # it needs other counts
            few, many = min(2, problem.microbatches), problem.microbatches
            if all(
                (
                    schedule := make_schedule(name, problem.ranks, count, problem.stages)
                ).placement.paths
                == (problem.path,)
                for count in (few, many)
            ):
                yield renumbered(schedule) if problem.even else schedule


def looped(problem: Problem, costs: Costs) -> Iterator[Schedule]:
    """What the heuristic for several chunks a rank gives, where stages go round and microbatches
    cost alike.
    """
    p = problem
    loop = tuple(s % p.ranks for s in range(p.stages))
    if p.path == loop and p.ranks < p.stages and p.small and p.even and not p.whole:
        most = p.microbatches * max(sum(p.saved[s] for s in held) for held in p.of_rank)
        with suppress(ScheduleError):  # less memory than it can do with
            yield automatic_loop(
                p.ranks, p.microbatches, p.stages, costs, limit=min(*p.limit, most)
            )


def renumbered(schedule: Schedule) -> Schedule:
    """The same schedule with the microbatches of each stage in ascending order, for microbatches
    that cost the same.

    The first F of a stage, its first I and its first W belong to microbatch 0, and so on. Each
    action then needs what ends no later than what it needed before, so that times and memory stay.
    Gradients are added in ascending order.

    >>> print(renumbered(Schedule.parse("[0F0, 0F1, 0B1, 0B0]")))
    [0F0, 0F1, 0B0, 0B1]
    """
    rows = []
    for row in schedule.rows:
        counts: Counter[tuple[int, str]] = Counter()
        parts: list[list[Action]] = [[] for _ in row]
        for action, numbered in zip(row, parts, strict=True):
            for stage, op, _ in action.parts:
                numbered.append(Action(stage, op, counts[stage, op]))
                counts[stage, op] += 1
        rows.append(tuple(map(joined, parts)))
    return replace(schedule, rows=tuple(rows))


def relieved(schedule: Schedule) -> Iterator[Schedule]:
    """The first ranks run the W that holds up the last I of their last stage behind it.

    That I is on the way of the last microbatch, for which all earlier stages wait.

    >>> zbv = make_schedule("ZBV", 2, 4)
    >>> print(zbv[0][-9:], next(relieved(zbv))[0][-9:], sep="\\n")
    (0I1, 0W1, 3F3, 3I3, 3W3, 0I2, 0W2, 0I3, 0W3)
    (0I1, 3F3, 3I3, 0W1, 3W3, 0I2, 0W2, 0I3, 0W3)
    """
    if schedule.stages == schedule.ranks:
        return
    for ranks in dict.fromkeys((schedule.ranks * 7 // 8, schedule.ranks // 2)):
        rows = tuple(
            _relieved(row) if rank < ranks else row for rank, row in enumerate(schedule.rows)
        )
        if rows != schedule.rows:
            yield replace(schedule, rows=rows, name="")


def _relieved(row: Row) -> Row:
    stage = max(part.stage for action in row for part in action.parts)
    last = max(
        (at for at, one in enumerate(row) if isinstance(one, Action) and one[:2] == (stage, "I")),
        default=0,
    )
    before = max(
        (at for at, one in enumerate(row[:last]) if isinstance(one, Action) and one.op == "W"),
        default=last,
    )
    return (
        (*row[:before], *row[before + 1 : last + 1], row[before], *row[last + 1 :])
        if before < last
        else row
    )


def one_by_one(problem: Problem) -> Orders:
    """One microbatch after another: what needs the least memory.

    >>> from fpipe.actions.costs import Costs
    >>> one_by_one(Problem.of(Costs(), (0, 1), 2, 1, (1, 1)))
    [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]
    """
    p, count = problem, problem.stages
    way = [*range(count), *range(2 * count - 1, count - 1, -1)]
    return [
        [(one, k) for k in range(p.microbatches) for one in way if p.path[one % count] == rank]
        for rank in range(p.ranks)
    ]


def filled(problem: Problem) -> Iterator[Filled]:
    """What the heuristic for zero bubble gives, where a rank has one stage and backwards are
    split.
    """
    p = problem
    if p.stages != p.ranks or p.whole or not p.even:
        return
    costs = Costs(F=p.F, I=p.I, W=p.W, comm=p.link, saved=p.saved, kept=p.kept)
    most = 2 * p.microbatches * max(*p.saved, *p.kept, 1.0)
    with suppress(ScheduleError):  # less memory than it can do with
        for run in rounds(
            p.ranks, p.microbatches, costs, [min(limit / max(p.size), most) for limit in p.limit]
        ):
            rows = [_counted(pattern, rank) for rank, pattern in enumerate(run.patterns)]
            yield Filled(
                rows, [work + rank.idle for work, rank in zip(p.work, run.ranks, strict=True)]
            )


def delayed(problem: Problem, orders: Orders) -> Iterator[Orders]:
    """Orders in which the first ranks run their forwards a backward later, from some time after the
    warm-up on.

    Then they hold Ws in place of an activation, and have work at the end, when backwards come less
    often than they can run them. Only for one stage a rank.

    >>> from fpipe.actions.costs import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 3, (2.0, 2.0))
    >>> second = [(1, 0), (3, 0), (1, 1), (3, 1), (1, 2), (3, 2)]
    >>> next(delayed(p, [[(0, 0), (0, 1), (2, 0), (0, 2), (2, 1), (2, 2)], second]))[0]
    [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (2, 2)]
    """
    if problem.stages != problem.ranks:
        return
    for ranks in (max(1, problem.ranks // 4), problem.ranks // 8, problem.ranks // 2):
        for start in (problem.ranks // 3, 8, 3):
            yield [
                _delayed(order, problem.stages, start) if rank < ranks else order
                for rank, order in enumerate(orders)
            ]


def _delayed(order: list[tuple[int, int]], stages: int, start: int) -> list[tuple[int, int]]:
    order = list(order)
    warm_up = next(at for at, (one, _) in enumerate(order) if one >= stages)
    for at in reversed(range(len(order) - 1)):
        one, k = order[at]
        if one < stages <= order[at + 1][0] and k >= warm_up + start:
            order[at : at + 2] = order[at + 1], order[at]
    return order


def _counted(pattern: str, stage: int) -> list[tuple[int, int, int]]:
    counts = [0, 0, 0]
    row = []
    for op in map("FIW".index, pattern):
        row.append((op, stage, counts[op]))
        counts[op] += 1
    return row


def lines(problem: Problem) -> Iterator[Orders]:
    """For a V of two stages a rank: those of the least idle time where all passes cost alike.

    >>> from fpipe.actions.costs import Costs
    >>> len(list(lines(Problem.of(Costs(), (0, 1, 2, 2, 1, 0), 3, 4, (5.0,) * 3))))
    2
    """
    p = problem
    if p.path != (*range(p.ranks), *reversed(range(p.ranks))) or not p.even:
        return
    room = min(
        limit / max(p.saved[s] * p.size[0] for s in held) if limit < inf else inf
        for limit, held in zip(p.limit, p.of_rank, strict=True)
    )
    most, least = int(min(room * ALMOST, p.stages)), 2 * ((p.ranks + 4) // 3)
    if most == p.stages and not p.small:
        return  # ZBV is as good and takes less time
    for chunks in range(most, max(least, most - (2 if p.small else 0)) - 1, -1):
        yield line_orders(p.ranks, p.microbatches, chunks)


def orders(problem: Problem) -> Iterator[Orders]:
    """Those of named schedules."""
    for schedule in named(problem, () if problem.small else FEW):
        yield orders_of(schedule)


#: Passes by which a wait at the top is shorter than the memory allows, the best ones first.
_LESS = (4, 3, 2, 7, 5, 6, 1, 0, 8, 9)
#: Steps of each way, waits before passes of the whole way, the span that is aimed at in units of
#: the work, and whether passes come early.
BlockChoice: TypeAlias = tuple[list[float], dict[int, float], float, bool]


class Blocks:
    """Starts by chance: the steps from rank to rank on each way through the ranks, and the waits at
    its ends.
    """

    def __init__(self, problem: Problem, random: Random):
        self.problem, self.random = problem, random
        self.ways = 2 * max(1, problem.stages // problem.ranks)
        self.period, self.passes = max(problem.work) / problem.microbatches, 1.5 * self.ways
        self.turns = range(
            problem.ranks, 2 * problem.stages, problem.ranks
        )  #: passes of the way before which it turns
        tops = (
            product(_LESS, (0, 2, 1, 3), (0, 2, 1, 3), (0, 1))
            if problem.stages == 2 * problem.ranks
            else ()
        )
        self.tops = sorted(tops, key=lambda top: sum(top[1:]))  #: choices of ``top``

    def draw(self, known: Sequence[tuple[float, BlockChoice]]) -> BlockChoice:
        """What leads to orders: near one of the choices that are known with their spans, or new."""
        random, ways = self.random, self.ways
        if not known or random.random() < 0.3:
            steps = [random.choice(_STEPS) for _ in range(ways)]
            if ways == 4 and random.random() < 0.5:
                steps = [float(step) for step in random.choice(_OF_V)]
            waits = {at: random.random() * self.period / 2 for at in self.turns}
            target, early = random.choice(_TARGETS), random.random() < 0.8
        else:
            steps, waits, target, early = random.choice(known)[1]
            waits = self._other_waits(waits)
            if random.random() < 0.5:
                steps = [
                    max(0.1, step * random.choice((1, 1, 0.95, 1.05, 0.8, 1.2))) for step in steps
                ]
            target, early = (
                target * random.choice((1, 1, 0.98, 1.02)),
                early ^ (random.random() < 0.1),
            )
        return steps, waits, target, early

    def _other_waits(self, waits: dict[int, float]) -> dict[int, float]:
        """Each turn's wait a little longer or shorter, or a pass more or less before one or two
        passes.
        """
        random, one = self.random, self.period / self.passes
        if random.random() < 0.5:
            return {
                at: max(0.0, wait + random.choice((0, 0, 0.1, -0.1, 0.3, -0.3)) * self.period)
                for at, wait in waits.items()
            }
        waits = dict(waits)
        for _ in range(random.choice((1, 1, 2))):
            at = random.choice((*self.turns, random.randrange(1, 2 * self.problem.stages)))
            waits[at] = max(0.0, waits.get(at, 0.0) + random.choice((-2, -1, 1, 2)) * one)
        return waits

    def top(self, less: int, forward: int, backward: int, after: int) -> BlockChoice:
        """A V that goes from rank to rank without waits, but waits where it turns at the first
        rank: for as long as the memory suffices, less so many passes. The others are waits at both
            turns at the last rank, and after the first.

        The passes down and up then meet on every other rank only, so that they rarely clash, and a
        wait at the top makes all ranks hold the same. At unit cost it is of 3k - 2p passes for k
        chunks.
        """
        p, one = self.problem, self.period / self.passes
        rooms = (
            limit / max(max(p.saved[s] for s in held), 1e-30)
            for limit, held in zip(p.limit, p.of_rank, strict=True)
        )
        spare = min(*rooms, 1.0 * p.stages) * self.period - sum(p.F) - sum(p.I) - 2 * sum(p.link)
        wait = max(0.0, round(spare / 2 / one) * one - less * one)
        waits = {
            p.ranks: forward * one,
            p.stages: wait,
            p.stages + 1: after * one,
            3 * p.ranks: backward * one,
        }
        return [1.0] * self.ways, waits, 1.0, True

    def orders(self, problem: Problem, choice: BlockChoice) -> Orders | None:
        """The orders of this problem, which may have other microbatches; None where they do not fit
        in memory.
        """
        steps, waits, target, early = choice
        return dispatch(
            problem, self._places(steps, waits), self.period, target * max(problem.work), early
        )

    def _places(self, steps: Sequence[float], waits: dict[int, float]) -> list[float]:
        p, time, ways = self.problem, 0.0, self.ways
        places, way = [0.0] * (2 * p.stages), lambda s: min(s // p.ranks, ways // 2 - 1)
        for s in range(p.stages):
            places[s] = time = time + waits.get(s, 0.0)
            time += (p.F[s] + (p.link[s] if s + 1 < p.stages else 0.0)) * steps[way(s)]
        for s in reversed(range(p.stages)):
            places[p.stages + s] = time = time + waits.get(2 * p.stages - 1 - s, 0.0)
            time += (p.I[s] + (p.link[s - 1] if s else 0.0)) * steps[ways - 1 - way(s)]
        return places
