"""Forwards alone: the least time that a placement allows, and the order of microbatches of each
stage.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import fpipe
from fpipe import Costs, Schedule, make_schedule
from fpipe.generators.forward import forwards_alone
from schedule_table import TABLE, Case, cases


def _by_stage(schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """(rank, stage) -> its microbatches in order."""
    found = defaultdict(list)
    for rank, row in enumerate(schedule):
        for action in row:
            for part in action.parts:
                if part.op == "F":
                    found[rank, part.stage].append(part.microbatch)
    return found


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_forwards_alone_are_valid_keep_the_order_of_each_stage_and_take_no_longer(family) -> None:
    costs = Costs()
    for case in cases((1, 2, 4), (1, 3, 8), per_rank=(1, 2, 4), name=family.name):
        schedule = case.make()
        alone = forwards_alone(schedule).check(training=False)
        assert _by_stage(alone) == _by_stage(schedule), str(case)
        assert alone.simulate(costs).total <= schedule.only("F").simulate(costs).total, str(case)


@pytest.mark.parametrize("name", ["VMin", "VHalf", "ZBVZeroBubble", "DualPipeV", "Hanayo"])
def test_forwards_of_a_v_idle_only_for_the_way_down_and_up(name: str) -> None:
    """The last rank waits for p - 1 passes at first, and the first rank for p - 1 after that one's
    last.
    """
    for case in (Case(name, p, m, 2 * p) for p in (2, 3, 4, 8) for m in (p, 2 * p, 3 * p)):
        assert forwards_alone(case.make()).simulate(Costs()).total == 2 * case.microbatches + 2 * (
            case.ranks - 1
        )


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_forwards_of_a_loop_idle_for_one_crossing(name: str) -> None:
    for case in (Case(name, p, m, v * p) for p in (2, 4) for m in (p, 3 * p) for v in (2, 3)):
        per_rank = case.stages // case.ranks
        assert (
            forwards_alone(case.make()).simulate(Costs()).total
            == per_rank * case.microbatches + case.ranks - 1
        )


def test_values_do_not_wait_for_forwards_of_earlier_stages() -> None:
    last = forwards_alone(make_schedule("VMin", 4, 8))[3]
    assert [part.stage for action in last for part in action.parts] == [3, 4] * 8


def test_slices_stay_in_the_order_of_the_schedule() -> None:
    schedule = make_schedule("VMin", 4, 4, slices=2)
    assert forwards_alone(schedule) == schedule.only("F")


def test_a_schedule_that_the_caller_gave_keeps_its_order():
    given = fpipe.make_schedule("VMin", 3, 6)
    pipe = lambda schedule: fpipe.pipeline(
        [lambda p, x: x] * 6, schedule, microbatches=6, group=fpipe.local(3)
    )
    params, x = [None] * 6, torch.ones(6, 1)
    call = lambda schedule: pipe(schedule).call("forward", params, x, (), {})
    rows = lambda schedule: call(schedule).request(None).schedule.rows
    assert rows(given) == given.only("F").rows
    assert rows("VMin") != given.only("F").rows
