"""Which schedule ``schedule="auto"`` takes: never a slower one than any named schedule that
fits.
"""

from __future__ import annotations

import random

import pytest

from fpipe import Costs, make_schedule, schedule_names
from fpipe.errors import ScheduleError
from fpipe.products.search.auto import choose


def test_never_slower_than_a_named_schedule_that_fits_on_random_profiles(long: bool) -> None:
    draw = random.Random(0)
    for _ in range(100 if long else 5):
        p, per_rank, m = draw.choice((2, 3, 4)), draw.choice((1, 2)), draw.choice((4, 8, 12))
        stages = p * per_rank
        numbers = lambda stages=stages: [draw.uniform(0.5, 2) for _ in range(stages)]
        whole = {"B": numbers()} if draw.random() < 0.3 else {}
        costs = Costs(
            numbers(), numbers(), numbers(), comm=draw.uniform(0, 0.3), saved=numbers(), **whole
        )
        limit = draw.uniform(2, 20) * stages / p
        try:
            choice = choose(costs, p, m, stages, limit, time_limit=0.05)
        except ScheduleError:
            assert limit < 2 * per_rank * 2  # a microbatch does not fit
            continue
        assert choice.best.fits and choice.best.schedule.check()
        assert max(choice.best.schedule.simulate(costs).peak_bytes) <= limit * (1 + 1e-9)
        for name in schedule_names():
            try:
                schedule = make_schedule(name, p, m, stages).check()
            except ScheduleError:
                continue
            if schedule.placement.replicated:
                assert all(each.name != name for each in choice.candidates), (
                    "it holds the parameters twice"
                )
                continue
            t = schedule.simulate(costs)
            assert max(t.peak_bytes) > limit or choice.best.span <= t.span * (1 + 1e-9), name


def test_what_was_chosen_and_why_as_text() -> None:
    text = str(choose(Costs(unit="ms"), 4, 8, 8, memory=9, time_limit=0.05))
    assert text.startswith(
        "ZBVZeroBubble: total 51 ms, bubble 0.00%, holds 8; the span is 48 ms, and no schedule has "
        "one below 48 ms (rank 0: its work)"
    )
    assert "GPipe" in text and text.count("does not fit") > 3


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="more than its limit"):
        choose(Costs(), 2, 4, 4, memory=1)
