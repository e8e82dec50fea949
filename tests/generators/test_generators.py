"""Each schedule against published results: torch's orders, printed orders, totals and peaks, and
``check``.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from unittest import mock

import pytest

from effort import lines
from fpipe import Action, Costs, make_schedule, schedule_names
from fpipe.errors import ScheduleError
from fpipe.generators import dualpipe, zbv
from sample import covering
from schedule_table import TABLE, cases

NAMES = [family.name for family in TABLE]
BY_TORCH = {
    "LoopedBFS": (1, 2, 3, 4),
    "Interleaved1F1B": (1, 2, 3, 4),
    "InterleavedZeroBubble": (1, 2, 3, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}


def test_the_table_of_the_tests_has_every_schedule() -> None:
    assert sorted(NAMES) == sorted(schedule_names())


# ---- torch as an oracle ----
@pytest.fixture(scope="module")
def torch_order():
    """What torch.distributed.pipelining would run: (name, ranks, per_rank, microbatches) -> rows,
    or None where it refuses. Its schedule classes only want to read counts off their stages, so
    mocks of its own stage class do.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from torch.distributed.pipelining import PipelineStage

    ops = {
        schedules._ComputationType.FORWARD: "F",
        schedules._ComputationType.FULL_BACKWARD: "B",
        schedules._ComputationType.BACKWARD_INPUT: "I",
        schedules._ComputationType.BACKWARD_WEIGHT: "W",
    }
    mocks = [mock.create_autospec(PipelineStage, instance=True) for _ in range(4)]

    def plain(action):
        if action.sub_actions:
            return tuple(plain(part) for part in action.sub_actions)
        return (action.stage_index, ops[action.computation_type], action.microbatch_index)

    def order(name: str, ranks: int, per_rank: int, microbatches: int):
        for stage in mocks:
            stage.configure_mock(
                group_rank=0, group_size=ranks, num_stages=ranks * per_rank, submod=None
            )
        try:
            made = getattr(schedules, f"Schedule{name}")(mocks[:per_rank], microbatches)
        except ValueError:
            return None
        return [
            [plain(action) for action in made.pipeline_order[rank] if action]
            for rank in range(ranks)
        ]

    # the order is computed before communication is added, which is slow and not needed
    with mock.patch.object(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        yield order


@pytest.mark.parametrize("per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("name", BY_TORCH)
def test_same_order_as_torch_for_every_count_that_it_accepts(
    torch_order, name: str, per_rank: int
) -> None:
    if per_rank not in BY_TORCH[name]:
        pytest.skip(f"{name} has {BY_TORCH[name][0]} stages on each rank")
    compared = 0
    for ranks in range(1, 9):
        for microbatches in range(1, 33):
            theirs = torch_order(name, ranks, per_rank, microbatches)
            if theirs is None:
                continue
            ours = make_schedule(name, ranks, microbatches, stages=ranks * per_rank)
            rows = [[tuple(a.parts) if len(a.parts) > 1 else a for a in row] for row in ours]
            assert rows == theirs, (
                f"{name}, {ranks} ranks, {microbatches} microbatches, {per_rank} stages a rank"
            )
            compared += 1
    assert compared >= 150


# ---- orders in print ----
def test_dual_pipe_v_to_the_letter() -> None:
    printed = (Path(__file__).parents[1] / "data" / "dualpipev_4x10.txt").read_text()
    assert str(make_schedule("DualPipeV", 4, 10)).strip() == printed.strip()


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    for case in cases((1, 3, 8), (1, 5, 32), name="GPipe"):
        for rank, row in enumerate(case.make()):
            forward = [Action(rank, "F", m) for m in range(case.microbatches)]
            backward = [Action(rank, "B", m) for m in range(case.microbatches)]
            assert list(row) == forward + backward


def test_one_f_one_b_runs_a_backward_as_soon_as_it_holds_enough() -> None:
    """The paper's rule, in another form than in the generator: rank r never holds more than p - r
    activations, and runs a forward whenever this bound allows it.
    """
    for case in cases(range(1, 9), range(1, 33), name="1F1B"):
        for rank, row in enumerate(case.make()):
            done = {"F": 0, "B": 0}
            for action in row:
                full = done["F"] - done["B"] == case.ranks - rank
                op = "B" if full or done["F"] == case.microbatches else "F"
                assert action == (rank, op, done[op])
                done[op] += 1
            assert done == {"F": case.microbatches, "B": case.microbatches}


def test_one_f_one_b_as_the_paper_draws_it() -> None:
    assert str(make_schedule("1F1B", 4, 8)).splitlines()[0] == (
        "[0F0, 0F1, 0F2, 0F3, 0B0, 0F4, 0B1, 0F5, 0B2, 0F6, 0B3, 0F7, 0B4, 0B5, 0B6, 0B7]"
    )
    assert str(make_schedule("1F1B", 4, 3)).splitlines()[3] == "[3F0, 3B0, 3F1, 3B1, 3F2, 3B2]"


@pytest.mark.parametrize(("module", "drawn"), [(zbv, 6), (dualpipe, 7)])
def test_the_drawings_are_what_the_code_draws(module, drawn: int) -> None:
    picture = [
        "".join(line.split()[2:])
        for line in inspect.getdoc(module).splitlines()
        if line.strip().startswith("rank ")
    ]
    assert picture == [module._pattern(3, rank, drawn) for rank in range(3)]


# ---- what check proves ----
@pytest.mark.parametrize("name", NAMES)
def test_valid_for_every_count(name: str, long: bool) -> None:
    every = cases(range(1, 9), range(1, 33), per_rank=(1, 2, 3, 4), name=name)
    for case in (
        every if long else covering(every, lambda case: (*case[1:3], case.stages // case.ranks))
    ):
        schedule = case.make().check()
        assert (schedule.ranks, schedule.microbatches, schedule.stages) == case[1:], str(case)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_and_one_microbatch_run_straight_through(name: str) -> None:
    (row,) = make_schedule(name, 1, 1)
    ops = "".join(part.op for action in row for part in action.parts)
    stages = make_schedule(name, 1, 1).stages
    assert ops.startswith("F" * stages)
    assert set(ops[stages:]) <= set("BIW")


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_the_table_tells_the_truth_about_fused_and_split(family) -> None:
    actions = [action for row in make_schedule(family.name, 4, 16) for action in row]
    assert family.fused == any(len(action.parts) > 1 for action in actions)
    assert family.split == any(part.op == "I" for action in actions for part in action.parts)
    assert family.replicas == make_schedule(family.name, 4, 16).placement.replicated
    if family.even:
        with pytest.raises(ScheduleError, match="take 2 or 4"):
            make_schedule(family.name, 3, 16)


def test_stages_beyond_one_a_rank_are_neighbours() -> None:
    schedule = make_schedule("1F1B", 2, 2, stages=4)
    assert str(schedule).splitlines()[0] == "[0F0, 1F0, 0F1, 1F1, 1B0, 0B0, 1B1, 0B1]"
    assert schedule.placement.stages_of(1) == (2, 3)


# ---- time and memory ----
#: name -> total, span, peak activations of a rank: 8 ranks, 24 microbatches, F = I = W = 1 for a
#: rank's whole share
UNIT_COST = {
    "GPipe": (93, None, 24),
    "1F1B": (93, None, 8),
    "Interleaved1F1B": (82.5, None, 11.5),
    "InterleavedZeroBubble": (75.5, None, None),
    "ZBVZeroBubble": (75.5, 72, 8),
    "DualPipeV": (79, None, 8.5),
    "Eager1F1B": (93, None, 15),
    "ZBH1": (79, None, 8),
    "ZBH2": (79, 72, 15),
    "DualPipe": (78, None, 9),
    "ZB1P": (79, 79, 8),
    "ZB2P": (None, 72, None),
}


def unit_cost(name: str, ranks: int = 8, microbatches: int = 24):
    schedule = make_schedule(name, ranks, microbatches)
    share = len(schedule.placement.stages_of(0)) if not schedule.placement.replicated else 1
    timeline = schedule.simulate(Costs(F=1 / share, I=1 / share, W=1 / share, overlap=3 / share))
    return timeline.total, timeline.span, max(timeline.peak) / share


@pytest.mark.parametrize("name", UNIT_COST)
def test_unit_cost(name: str) -> None:
    for got, wanted in zip(unit_cost(name), UNIT_COST[name], strict=True):
        assert wanted is None or got == pytest.approx(wanted, abs=1e-9)


def test_chimera_idles_for_p_minus_2_passes() -> None:
    for ranks in (2, 4, 6, 8):
        for microbatches in range(ranks, 5 * ranks, 2):
            timeline = make_schedule("Chimera", ranks, microbatches).simulate(Costs(F=1, B=1))
            assert timeline.bubble == pytest.approx((ranks - 2) / (2 * microbatches + ranks - 2))
            if microbatches % ranks == 0:
                assert timeline.peak[: ranks // 2] == tuple(range(ranks // 2 + 1, ranks + 1))


def test_hanayo_idles_for_one_crossing_a_wave() -> None:
    for ranks in (1, 2, 3, 4, 8):
        for waves in (1, 2, 3):
            for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 2):
                share = 1 / (2 * waves)
                schedule = make_schedule("Hanayo", ranks, microbatches, stages=2 * waves * ranks)
                timeline = schedule.simulate(Costs(F=share, B=share))
                assert timeline.total == pytest.approx(2 * microbatches + (ranks - 1) * 2 * share)
                assert max(timeline.peak) * share <= ranks or microbatches % ranks


@pytest.mark.parametrize("name", ["VMin", "VHalf"])
def test_v_family_lies_on_the_frontier_of_time_and_memory(name: str) -> None:
    for p in range(1, 14):
        k = 2 * ((p + 4) // 3 if name == "VMin" else (p + 2) // 2)
        wanted = 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + math.ceil(k / 2)))
        for microbatches in (2 * p, 4 * p, 7 * p):
            timeline = make_schedule(name, p, microbatches).simulate()
            assert timeline.span - 6 * microbatches == wanted, (
                f"{p} ranks, {microbatches} microbatches"
            )
            assert max(timeline.peak) == k
    assert unit_cost(name, 8, 32)[1] == 96 + {"VMin": 23, "VHalf": 17}[name] / 2


#: ranks, microbatches; ms of F, I, W and of the link; hidden size, heads
#: -> bubble of 1F1B, ZB-H1, ZB-H2 (zero bubble paper, tables 5 and 6)
PAPER = {
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24): (0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24): (0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24): (0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32): (0.2347, 0.1323, 0.0698),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40): (0.2552, 0.1397, 0.0672),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48): (0.2646, 0.1421, 0.0641),
}


@pytest.mark.parametrize("row", PAPER)
def test_bubbles_of_the_zero_bubble_paper(row) -> None:
    ranks, microbatches, f, i, w, link, hidden, heads = row
    saved, kept = 34 * hidden + 5 * heads * 1024, 32 * hidden
    costs = Costs(F=f, I=i, W=w, comm=link, saved=saved, kept=kept)
    made = [make_schedule(name, ranks, microbatches) for name in ("1F1B", "ZBH1", "ZBH2")]
    assert [round(schedule.simulate(costs).bubble, 4) for schedule in made] == list(PAPER[row])


def test_the_automatic_ones_never_lose_to_those_made_by_hand() -> None:
    for ranks in range(1, 9):
        for microbatches in (1, 2, ranks, 2 * ranks, 3 * ranks + 1, 32):
            for name, by_hand, held in (("ZB1P", "ZBH1", ranks), ("ZB2P", "ZBH2", 2 * ranks)):
                timeline = make_schedule(name, ranks, microbatches).simulate()
                assert timeline.span <= make_schedule(by_hand, ranks, microbatches).simulate().span
                assert max(timeline.peak) <= held


def test_a_w_runs_where_its_rank_would_wait_or_where_memory_would_not_do() -> None:
    schedule = make_schedule("ZB1P", 2, 3)
    assert str(schedule).splitlines() == [
        "[0F0, 0F1, 0I0, 0W0, 0F2, 0I1, 0W1, 0I2, 0W2]",
        "[1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2]",
    ]
    assert schedule.simulate().span == 10


@pytest.mark.parametrize(
    "name", ["1F1B", "ZBVZeroBubble", "DualPipeV", "DualPipe", "Chimera", "Hanayo"]
)
def test_fewer_microbatches_never_take_longer(name: str) -> None:
    """Schedules that are drawn for more microbatches than there are must not pay for those that are
    left out.
    """
    totals = [unit_cost(name, 4, m)[0] for m in range(1, 12)]
    assert totals == sorted(totals)


def test_dual_pipe_v_with_few_microbatches_is_as_fast_as_zbv() -> None:
    """Of the drawing for 2p microbatches the first ones are left out; without the last ones it
    would be slower.
    """
    for ranks in (2, 3, 4, 8):
        for microbatches in range(1, ranks + 1):
            assert (
                unit_cost("DualPipeV", ranks, microbatches)[:2]
                == unit_cost("ZBV", ranks, microbatches)[:2]
            )


@pytest.mark.parametrize("name", NAMES)
def test_an_action_is_made_with_a_few_lines_whatever_the_size(name: str) -> None:
    """A microsecond or two; ``make bench`` measures it."""

    def effort(ranks: int) -> float:
        actions = sum(
            len(action.parts) for row in make_schedule(name, ranks, 8 * ranks) for action in row
        )
        return lines(lambda: make_schedule(name, ranks, 8 * ranks)) / actions

    assert effort(16) < min(40, 1.1 * effort(8))
