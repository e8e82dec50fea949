# SPDX-License-Identifier: Apache-2.0
"""Rows from which a search starts: those of named schedules, those that warm up as long as a
microbatch is away, and those of repeated blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from math import floor, inf

from ... import Schedule, make_schedule, schedule_names
from ...errors import ScheduleError
from .dispatch import block, dispatch
from .fill import Filled, fill
from .graph import Graph
from .problem import ALMOST, Orders, Problem, Rows, rows_of

#: Names that are tried for large problems.
_FEW_NAMES = ("ZBVZeroBubble", "ZBH1", "InterleavedZeroBubble", "VHalf", "VMin", "Interleaved1F1B")
#: How many times as long a microbatch of a repeated block takes from pass to pass, forwards and
#: backwards.
_STEPS = ((1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (1.0, 2.0), (1.5, 1.5), (3.0, 1.0))
#: Microbatches of a group, in multiples of the ranks.
_GROUPS = (1.0, 1.125, 1.25)


def starts(problem: Problem, bound: float, late: Callable[[], bool]) -> Iterator[Filled]:
    """Solutions of a problem, those first that are often the best and take the least time.

    ``late`` ends those of many actions.
    """
    for filled in _tried(problem, bound):
        if filled is not None:
            yield filled
        if problem.large and late():
            return


def _tried(problem: Problem, bound: float) -> Iterator[Filled | None]:
    yield fill(problem, one_by_one(problem), bound)
    for orders in _warm_ups(problem):
        yield fill(problem, orders, bound)
        for other in _delayed(problem, orders):
            yield fill(problem, other, bound)
    graph = Graph.of(problem)
    for schedule in _named(problem):
        rows = rows_of(schedule)
        if problem.even:
            rows = [_ascending(row) for row in rows]
        yield graph.filled(rows)
        yield from map(graph.filled, _relieved(rows, problem))
    for steps in _STEPS:
        orders = dispatch(problem, block(problem, *steps))
        if orders is not None:
            yield fill(problem, orders, bound)


def _named(problem: Problem) -> Iterator[Schedule]:
    """The named schedules that place stages as the problem does; of many actions only few."""
    for name in _FEW_NAMES if problem.large else schedule_names():
        with suppress(ScheduleError):  # it needs other counts
            few = make_schedule(name, problem.ranks, min(2, problem.microbatches), problem.stages)
            if few.placement.paths == (problem.path,):
                yield make_schedule(name, problem.ranks, problem.microbatches, problem.stages)


def _ascending(row: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """A row whose stages run microbatches that cost the same in ascending order."""
    counts: Counter[tuple[int, int]] = Counter()
    numbered = []
    for op, stage, _ in row:
        numbered.append((op, stage, counts[op, stage]))
        counts[op, stage] += 1
    return numbered


def _warm_ups(problem: Problem) -> Iterator[Orders]:
    """1F1B, plain or interleaved, whose ranks warm up with the forwards that fit in the time until
    a microbatch is back, and in the memory.

    Forwards and backwards take turns then, so that zero bubble results where memory suffices.
    """
    p = problem
    if p.path != tuple(s % p.ranks for s in range(p.stages)):
        return
    chunks = p.stages // p.ranks
    way = [sum(p.F[s:]) + sum(p.I[s + 1 :]) + 2 * sum(p.link[s:]) for s in range(p.stages)]
    for size, share in product(_GROUPS if chunks > 1 else (1.0,), (1.0, 0.75, 0.5)):
        group = min(p.microbatches, round(size * p.ranks))
        counts, most = [], inf
        for rank, held in enumerate(p.of_rank):
            saved = max(p.saved[s] for s in held) * max(p.size)
            last = p.stages - p.ranks + rank
            away = floor(share * way[last] / p.F[last]) if p.F[last] else p.microbatches
            room = p.limit[rank] * ALMOST / saved if saved else inf
            most = min(most - 1, room, max(1, away) + (chunks - 1) * group)
            counts.append(int(max(1, min(most, chunks * p.microbatches))))
        yield [_interleaved(p, rank, group, count) for rank, count in enumerate(counts)]


def _interleaved(problem: Problem, rank: int, group: int, warm_up: int) -> list[tuple[int, int]]:
    """The passes of a rank: microbatches in groups, each through all stages of the rank."""
    held, count = problem.of_rank[rank], problem.microbatches
    groups = [range(start, min(start + group, count)) for start in range(0, count, group)]
    forwards = [(s, k) for part in groups for s in held for k in part]
    backwards = [(problem.stages + s, k) for part in groups for s in held[::-1] for k in part]
    order = forwards[:warm_up]
    for at, backward in enumerate(backwards):
        order += [backward, *forwards[warm_up + at : warm_up + at + 1]]
    return order


def _delayed(problem: Problem, orders: Orders) -> Iterator[Orders]:
    """Orders in which the first ranks run their forwards a backward later, from some time after the
    warm-up on.

    Then they hold Ws in place of an activation, and have work at the end, when backwards come less
    often than they can run them. Only for one stage a rank.
    """
    if problem.stages == problem.ranks:
        ranks = max(1, problem.ranks // 4)
        yield [
            _delayed_row(order, problem.stages, problem.ranks // 3) if rank < ranks else order
            for rank, order in enumerate(orders)
        ]


def _delayed_row(order: list[tuple[int, int]], stages: int, start: int) -> list[tuple[int, int]]:
    order = list(order)
    warm_up = next(at for at, (one, _) in enumerate(order) if one >= stages)
    for at in reversed(range(len(order) - 1)):
        one, k = order[at]
        if one < stages <= order[at + 1][0] and k >= warm_up + start:
            order[at : at + 2] = order[at + 1], order[at]
    return order


def _relieved(rows: Rows, problem: Problem) -> Iterator[Rows]:
    """The first ranks run the W that holds up the last I of their last stage behind it.

    That I is on the way of the last microbatch, for which all earlier stages wait.
    """
    if problem.stages > problem.ranks:
        for ranks in dict.fromkeys((problem.ranks * 7 // 8, problem.ranks // 2)):
            yield [
                _relieved_row(row, problem.of_rank[rank][-1]) if rank < ranks else row
                for rank, row in enumerate(rows)
            ]


def _relieved_row(row: list[tuple[int, int, int]], stage: int) -> list[tuple[int, int, int]]:
    last = max(at for at, action in enumerate(row) if action[:2] == (1, stage))
    before = max((at for at, action in enumerate(row[:last]) if action[0] == 2), default=last)
    return [*row[:before], *row[before + 1 : last + 1], *row[before : before + 1], *row[last + 1 :]]


def one_by_one(problem: Problem) -> Orders:
    """One microbatch after another: what needs the least memory.

    >>> from fpipe import Costs
    >>> one_by_one(Problem.of(Costs(), (0, 1), 2, 1, (1, 1)))
    [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]
    """
    p, count = problem, problem.stages
    way = [*range(count), *range(2 * count - 1, count - 1, -1)]
    return [
        [(one, k) for k in range(p.microbatches) for one in way if p.path[one % count] == rank]
        for rank in range(p.ranks)
    ]
