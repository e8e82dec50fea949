"""PipeDream's partition: the best of all, by brute force; ``solve`` and ``auto`` with it."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import ceil
from typing import Any

import pytest
import torch

import fpipe
from common import layer, squared
from fpipe import Costs, Schedule, solve
from fpipe.errors import ScheduleError, StageError
from fpipe.products.search.replicate import partition


def by_brute_force(work: list[float], ranks: int, microbatches: int) -> float:
    """The least load of the busiest rank, over all cuts and all numbers of copies."""
    best = float("inf")
    count = len(work)
    for groups in range(1, min(count, ranks) + 1):
        for cuts in combinations(range(1, count), groups - 1):
            sums = [sum(work[i:j]) for i, j in pairwise((0, *cuts, count))]
            for ends in combinations(range(1, ranks), groups - 1):
                copies = [j - i for i, j in pairwise((0, *ends, ranks))]
                loads = (ceil(microbatches / k) * w for k, w in zip(copies, sums, strict=True))
                best = min(best, max(loads))
    return best


def cases() -> list[tuple[list[float], int, int]]:
    draw = random.Random(39)
    found = []
    for _ in range(100):
        count = draw.randint(1, 7)
        ranks = draw.randint(1, 8)
        work = [draw.choice((1.0, 2.0, 0.3, draw.random() * 5)) for _ in range(count)]
        found.append((work, ranks, draw.randint(ranks, 20)))
    return found


def test_the_partition_is_the_best_of_all_in_100_cases() -> None:
    for work, ranks, microbatches in cases():
        found = partition(work, ranks, microbatches)
        assert found.load == pytest.approx(by_brute_force(work, ranks, microbatches))
        assert sum(found.copies) == ranks
        assert [s for group in found.groups for s in group] == list(range(len(work)))


def test_solve_in_100_cases() -> None:
    """The bound is the best load, and the rows are valid and never below it."""
    gaps = []
    for work, ranks, microbatches in cases():
        costs = Costs(F=work, I=work, W=work)
        s = solve(costs, ranks, microbatches, "replicated", stages=len(work))
        s.check()
        assert Schedule.parse(str(s)) == s
        assert s.bound == pytest.approx(3 * by_brute_force(work, ranks, microbatches))
        assert s.timeline.span >= s.bound * (1 - 1e-9)
        gaps.append(s.gap)
    assert sum(gaps) / len(gaps) < 0.09


def test_a_large_case() -> None:
    draw = random.Random(1)
    found = partition([draw.random() for _ in range(48)], 64, 256)
    assert sum(found.copies) == 64


def test_the_memory_limits_the_schedule() -> None:
    costs = Costs(F=[3, 1], I=[3, 1], W=[3, 1])
    assert max(solve(costs, 4, 12, "replicated", memory=2).timeline.peak) <= 2
    with pytest.raises(ScheduleError, match=r"fits memory=0\.5; give more memory"):
        solve(costs, 4, 12, "replicated", memory=0.5)


def test_more_ranks_than_microbatches() -> None:
    with pytest.raises(ScheduleError, match=r"4 ranks for 3 microbatches.*microbatches=4"):
        solve(Costs(), 4, 3, "replicated", stages=2)


def test_auto_replicates() -> None:
    """Gradients of a pipeline whose schedule was chosen have the bits of one process."""
    costs = Costs(F=[3, 1], I=[3, 1], W=[3, 1])
    group = fpipe.local(4)
    options: dict[str, Any] = {"loss": squared, "microbatches": 12}
    pipe = fpipe.pipeline(
        [layer] * 2, fpipe.auto(costs=costs, replicate=True), group=group, **options
    )
    assert repr(pipe.placement) == "Placement(0: [0], 1: [0], 2: [0], 3: [1])"
    assert "Replicated" in pipe.why
    params, x = [torch.randn(4, 4)] * 2, torch.randn(24, 4)
    value, grads = fpipe.value_and_grad(pipe)(params, x, x)
    plain = fpipe.pipeline([layer] * 2, "GPipe", group=fpipe.local(1), **options)
    want, want_grads = fpipe.value_and_grad(plain)(params, x, x)
    assert torch.equal(value, want)
    assert all(map(torch.equal, grads, want_grads))


def test_auto_replicates_only_where_it_is_shorter() -> None:
    pipe = fpipe.pipeline(
        [layer] * 4,
        fpipe.auto(costs=Costs(comm=5.0, saved=1.0), replicate=True),
        loss=squared,
        microbatches=8,
        group=fpipe.local(2),
    )
    assert "Replicated" in pipe.why


def test_auto_needs_costs_to_replicate() -> None:
    with pytest.raises(StageError, match=r"give costs=, as from fpipe\.measure_costs"):
        fpipe.auto(replicate=True)
