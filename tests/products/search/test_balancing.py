"""``balance``: cuts that the simulator likes, against all cuts tried by brute force."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, strategies as st

import fpipe
from fpipe.products.search.balancing import estimate, spread

COSTS = st.lists(st.integers(0, 6), min_size=4, max_size=9).filter(any)


def ways(count: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in combinations(range(1, count), parts - 1)]


def dearest(costs: list[int], starts: tuple[int, ...]) -> list[int]:
    return sorted(
        (sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True)),
        reverse=True,
    )


@given(costs=COSTS, parts=st.integers(1, 4))
def test_spread_is_the_best_of_all(costs: list[int], parts: int):
    best = min(
        ways(len(costs), parts),
        key=lambda w: (dearest(costs, w)[0], sum(c * c for c in dearest(costs, w))),
    )
    made = spread(costs, parts)
    assert made in ways(len(costs), parts)
    key = lambda w: (dearest(costs, w)[0], sum(c * c for c in dearest(costs, w)))
    assert key(made) == key(best)


def total(plan: fpipe.Schedule, costs: list[int], starts: tuple[int, ...]) -> float:
    sums = [float(sum(costs[a:b])) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True)]
    return plan.simulate(fpipe.Costs(F=sums, I=sums, W=sums)).total


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1F1B", 3), ("ZBV", 2), ("GPipe", 4), ("Interleaved1F1B", 2)]
)
@pytest.mark.parametrize(
    "costs", [[0, 1, 1, 1, 1, 1, 1, 3], [2, 1, 1, 5, 1, 1, 1, 1], [1, 2, 3, 4, 3, 2, 1, 4]]
)
def test_the_proposal_is_as_good_as_any(schedule: str, ranks: int, costs: list[int]):
    made = fpipe.balance(costs, ranks, schedule)
    best = min(total(made.schedule, costs, w) for w in ways(len(costs), made.schedule.stages))
    assert made.timeline.total == total(made.schedule, costs, made.starts)
    assert made.timeline.total <= best * 1.02
    assert made.gain == pytest.approx(total(made.schedule, costs, made.even) / made.timeline.total)
    assert made.gain >= 1
    assert sum(made.sizes) == len(costs)
    assert sum(made.costs) == sum(costs)


def test_cuts_move_together():
    """Where one cut alone made no step shorter, the step took 4.6% longer than it need."""
    costs = [164, 220, 230, *[50] * 8, 110]
    made = fpipe.balance(costs, 4)
    best = min(total(made.schedule, costs, w) for w in ways(len(costs), 4))
    assert made.timeline.total == best


def test_a_heavy_head_moves_layers_forward():
    even = fpipe.balance([1] * 8, ranks=4)
    assert even.sizes == (2, 2, 2, 2)
    assert even.gain == 1
    heavy = fpipe.balance([*[1] * 8, 3], ranks=4)
    assert heavy.sizes[-1] < max(heavy.sizes)
    assert heavy.gain > 1.2


def test_names_and_modules_give_cuts_for_from_module():
    nn = pytest.importorskip("torch").nn
    model = nn.Sequential(
        nn.Embedding(7, 4), *(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 40)
    )
    assert estimate(model) == 4 * 16 + 160
    made = fpipe.balance(model, ranks=2)
    assert made.cuts == ("5",)
    assert made.items == (0, 16, 16, 16, 16, 160)
    stages, _ = fpipe.from_module(model, made.cuts)
    assert len(stages) == 2
    assert fpipe.balance({"first": 1, "second": 2, "third": 1}, ranks=2).cuts in (
        ("second",),
        ("third",),
    )
    tied = nn.Linear(4, 4)
    assert estimate(nn.Sequential(tied, tied)) == 16


def test_a_schedule_itself():
    schedule = fpipe.make_schedule("Interleaved1F1B", 2, 6)
    assert fpipe.balance([1, 1, 1, 1, 1, 2], 2, schedule).schedule is schedule


def test_it_shows_what_it_gains():
    text = str(fpipe.balance([0, 1, 1, 1, 1, 1, 1, 3], ranks=4))
    assert "balanced: total" in text
    assert "gain: 1.278x (1F1B, 4 ranks)" in text
    assert len(text.splitlines()) == 1 + 4 + 4
    assert "cost: as given; of a module, " in text, "6.554e+04 of what"


def test_many_items_do_not_take_long():
    made = fpipe.balance([*[1.0] * 96, 7.0], ranks=16, schedule="Interleaved1F1B", microbatches=64)
    assert made.gain > 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fpipe.balance([1, 2], 4), "2 items cannot fill 4 stages"),
        (lambda: fpipe.balance([0, 0], 2), "all costs are 0"),
        (lambda: fpipe.balance([1, -1], 2), "the cost of 1 is -1"),
        (lambda: fpipe.balance([1, float("nan")], 2), "the cost of 1 is nan"),
        (lambda: fpipe.balance({"a": "b"}, 1), "the cost of 'a' is 'b'"),
        (lambda: fpipe.balance(5, 1), "costs=5; give a list"),
        (lambda: fpipe.balance([1, 1], 2, "1G1B"), "1G1B"),
        (lambda: fpipe.balance([1, 1], 2, 7), "schedule=7; give a name"),
        (
            lambda: fpipe.balance([1, 1], 2, fpipe.make_schedule("1F1B", 3, 3)),
            "the schedule is for 3 ranks, not 2",
        ),
        (lambda: spread([1, 2], 3), "2 items cannot be cut into 3 parts"),
    ],
)
def test_mistakes(call: Any, message: str):
    with pytest.raises(fpipe.FpipeError, match=message):
        call()
