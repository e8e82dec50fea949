"""Local search on complete rows, on problems whose best rows no rule for W gives."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fpipe import Costs, Placement
from fpipe.products.search.annealing import anneal, ends, first_ends, moved
from fpipe.products.search.fill import Filled, fill
from fpipe.products.search.problem import Problem

COSTS = Costs(F=(15, 8, 6, 17, 6, 5), I=(15, 17, 5, 7, 16, 6), W=(14, 3, 5, 11, 10, 3), comm=2)
PROBLEM = Problem.of(COSTS, Placement.v(3).paths[0], 3, 5, (6.0,) * 3)


def start() -> Filled:
    """One microbatch after another."""
    passes = [
        [(s + 6 * op) * 5 + k for k in range(5) for op, s in ways]
        for ways in (
            ((0, 0), (0, 5), (1, 5), (1, 0)),
            ((0, 1), (0, 4), (1, 4), (1, 1)),
            ((0, 2), (0, 3), (1, 3), (1, 2)),
        )
    ]
    filled = fill(PROBLEM, passes, 0.0)
    assert filled is not None
    return filled


def steps(number: int) -> list[float]:
    """The shares of a time of so many moves."""
    return [passed / number for passed in range(number)]


def annealed(seed: int = 0, number: int = 4000) -> list[Filled]:
    return list(anneal(PROBLEM, start().rows, Random(seed), steps(number)))


def test_rows_become_shorter_and_keep_the_rules():
    found = annealed()
    assert [filled.span for filled in found] == sorted(
        (filled.span for filled in found), reverse=True
    )
    assert found[-1].span < 0.7 * start().span
    for filled in found:
        timeline = PROBLEM.schedule(filled.rows).check().simulate(COSTS)
        assert timeline.span == pytest.approx(filled.span)
        assert max(timeline.peak) <= 6


@pytest.mark.parametrize("inward", [COSTS.I, (0, 17, 5, 0, 16, 6)])
def test_times_after_a_change_are_those_of_all_actions_computed_anew(inward):
    """Before, actions without length kept a time from before the change, and annealing hung."""
    problem = Problem.of(replace(COSTS, I=inward), PROBLEM.path, 3, 5, PROBLEM.limit)
    draw, blocked = Random(5), 0
    rows = start().rows
    for _ in range(300):
        end = first_ends(problem, rows)
        assert end is not None
        rank = draw.randrange(3)
        first = draw.randrange(len(rows[rank]) - 1)
        last = draw.randrange(first + 1, len(rows[rank]))
        changed = list(rows)
        changed[rank] = moved(rows[rank], first, last, draw)
        since = end[rows[rank][first]] - problem.length[rows[rank][first]]
        again = ends(problem, changed, rows, end, since)
        assert again == first_ends(problem, changed)
        blocked += again is None
        rows = rows if again is None else changed
    assert 0 < blocked < 300


def test_the_same_seed_finds_the_same():
    assert [f.rows for f in annealed(1, 500)] == [f.rows for f in annealed(1, 500)]


def test_one_rank_has_nothing_to_gain():
    problem = Problem.of(Costs(), (0,), 1, 2, (9.0,))
    rows = [[0, 2, 4, 1, 3, 5]]
    assert list(anneal(problem, rows, Random(0), steps(200))) == []
