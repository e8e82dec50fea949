"""Beam search: its rows keep the rules, and of problems in which local search ends too early they
are near the best.
"""

from __future__ import annotations

from itertools import count, permutations, product
from math import inf
from unittest.mock import patch

import pytest

from fpipe import Costs, solve
from fpipe.actions.placement import Placement
from fpipe.errors import ScheduleError
from fpipe.generators.problem import Problem
from fpipe.products.search import exact, search
from fpipe.products.search.beam import beam

V4 = Placement.v(4).paths[0]
COSTS = Costs(
    (14, 18, 19, 11, 8, 5, 10, 12),
    (15, 11, 9, 20, 7, 14, 13, 14),
    (6, 12, 3, 13, 12, 11, 6, 12),
    comm=2,
)
#: Costs, ranks, microbatches, memory and the least span, which CP-SAT proves in less than a minute.
PROVED = (
    (COSTS, 4, 5, 6.0, 438.0),
    (
        Costs((15, 8, 6, 17, 6, 5), (15, 17, 5, 7, 16, 6), (14, 3, 5, 11, 10, 3), comm=2),
        3,
        5,
        6.0,
        333.0,
    ),
)


@pytest.mark.parametrize(("costs", "ranks", "microbatches", "memory", "least"), PROVED)
def test_rows_are_within_two_percent_of_the_best(costs, ranks, microbatches, memory, least):
    problem = Problem.of(costs, Placement.v(ranks).paths[0], ranks, microbatches, (memory,) * ranks)
    spans = [filled.span for width in (100, 300) if (filled := beam(problem, width)) is not None]
    assert least <= min(spans) <= 1.02 * least


@pytest.mark.parametrize("memory", [2.0, 3.0, 8.0])
@pytest.mark.parametrize("load", [1.0, (1.0, 3.0, 2.0)])
def test_rows_keep_the_rules_and_their_windows_are_those_of_the_simulator(memory, load):
    costs = Costs(
        (3, 1, 2, 2, 4, 1, 1, 2),
        (2, 3, 1, 1, 1, 5, 2, 2),
        (1, 1, 2, 3, 1, 1, 2, 1),
        comm=0.5,
        load=load,
    )
    filled = beam(problem := Problem.of(costs, V4, 4, 3, (memory,) * 4), 20)
    assert filled is not None
    timeline = problem.schedule(filled.rows).check().simulate(costs)
    assert timeline.windows == pytest.approx(filled.windows)
    assert max(timeline.peak_bytes) <= memory


def brute_force(problem: Problem, costs: Costs) -> float:
    """The least span of all rows of one stage a rank, with microbatches in any order."""
    names = [
        [(op, s, k) for op in range(3) for k in range(problem.microbatches)]
        for s in range(problem.ranks)
    ]
    rows = [
        [
            row
            for row in permutations(each)
            if all(row.index((op, s, k)) < row.index((op + 1, s, k)) for op, s, k in each if op < 2)
        ]
        for each in names
    ]
    least = inf
    for choice in product(*rows):
        try:
            timeline = problem.schedule([list(row) for row in choice]).simulate(costs)
        except ScheduleError:  # the rows block each other
            continue
        if all(
            peak <= limit for peak, limit in zip(timeline.peak_bytes, problem.limit, strict=True)
        ):
            least = min(least, timeline.span)
    return least


@pytest.mark.parametrize("memory", [1.0, 2.0])
def test_with_all_states_it_is_the_best_of_all_rows(memory):
    costs = Costs((3, 1), (1, 4), (2, 2), comm=1)
    problem = Problem.of(costs, (0, 1), 2, 2, (memory,) * 2)
    filled = beam(problem, 10_000, 10_000)
    assert filled is not None
    assert filled.span == pytest.approx(brute_force(problem, costs))


def test_none_when_time_has_passed():
    calls = count()
    assert (
        beam(Problem.of(COSTS, V4, 4, 5, (6.0,) * 4), 30, passed=lambda: next(calls) > 10) is None
    )
    assert next(calls) == 12


def test_solve_offers_its_rows_where_there_is_no_exact_solver():
    found = beam(Problem.of(COSTS, V4, 4, 5, (6.0,) * 4), 100)
    with (
        patch.object(exact, "available", lambda: False),
        patch.object(search, "beam", lambda *_: found),
    ):
        solved = solve(COSTS, 4, 5, "V", memory=6, time_limit=0.2, progress=False)
    assert found is not None
    assert solved.timeline.span <= found.span
