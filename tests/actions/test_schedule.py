"""Schedules and placements as values: sources, refusals, and printed forms."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import fields
from typing import get_args

import pytest

import fpipe
from fpipe import Action, Costs, FpipeError, Fused, Placement, Schedule, make_schedule
from fpipe.actions.action_kinds import KINDS, Op
from fpipe.actions.routes import placement_of
from fpipe.actions.rule import needs, provides
from fpipe.errors import ScheduleError
from schedule_table import cases

GOOD = "[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]"


# ---- actions ----
def test_actions_are_small_values() -> None:
    action = Action(3, "F", 1)
    fused = Fused((action, Action(0, "B", 0)))
    assert (str(action), repr(action), action.parts) == ("3F1", "3F1", (action,))
    assert str(fused) == "(3F1;0B0)OVERLAP_F_B"
    assert {action: 1}[Action(3, "F", 1)] == 1
    assert (action.stage, action.op, action.microbatch) == (3, "F", 1)


def test_the_rule_says_what_the_textbook_says() -> None:
    def names(op: str, stage: int) -> tuple[set[str], set[str]]:
        action = Action(stage, op, 5)  # type: ignore[arg-type]
        assert all(fact.microbatch == 5 for fact in (*needs(action, 3), *provides(action)))
        return {f"{f.kind}{f.stage}" for f in needs(action, 3)}, {
            f"{f.kind}{f.stage}" for f in provides(action)
        }

    assert set(KINDS) == {"F", "B", "I", "W"} == set(get_args(Op))
    assert names("F", 0) == (set(), {"F0"})
    assert names("F", 2) == ({"F1"}, {"F2"})
    assert names("I", 0) == ({"F0", "I1"}, {"I0"})
    assert names("I", 2) == ({"F2"}, {"I2"})
    assert names("B", 1) == ({"F1", "I2"}, {"I1", "W1"})
    assert names("W", 1) == ({"I1"}, {"W1"})


def test_a_whole_backward_is_its_two_parts() -> None:
    """Of each kind there is a cost, and what B does to facts and memory is what I and W do."""
    assert set(KINDS) <= {field.name for field in fields(Costs)}
    whole, parts = KINDS["B"], (KINDS["I"], KINDS["W"])
    assert whole.provides == tuple(fact for part in parts for fact in part.provides)
    assert whole.needs == parts[0].needs
    assert (whole.saved, whole.kept) == (
        sum(part.saved for part in parts),
        sum(part.kept for part in parts),
    )
    assert sum(kind.activations for op, kind in KINDS.items() if op != "B") == 0


# ---- placements ----
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("per_rank", [1, 2, 3])
def test_loop_and_v(ranks: int, per_rank: int) -> None:
    loop, v = Placement.loop(ranks, per_rank), Placement.v(ranks, per_rank)
    assert [loop.rank_of(s) for s in range(loop.stages)] == [
        s % ranks for s in range(ranks * per_rank)
    ]
    for stage in range(v.stages):
        chunk, step = divmod(stage, ranks)
        assert v.rank_of(stage) == (step if chunk % 2 == 0 else ranks - 1 - step)
    for placement in (loop, v):
        assert (placement.stages, placement.replicated) == (ranks * per_rank, False)
        for rank in range(ranks):
            assert placement.stages_of(rank) == tuple(
                s for s in range(placement.stages) if placement.rank_of(s) == rank
            )


def test_uneven() -> None:
    placement = Placement(((0, 0, 1, 1, 0),), 3)
    assert (placement.ranks, placement.stages, placement.stages_of(2)) == (3, 5, ())
    assert [placement.rank_of(stage) for stage in range(5)] == [0, 0, 1, 1, 0]
    schedule = Schedule.parse("[0F0, 1F0, 4F0, 4B0, 1B0, 0B0]\n[2F0, 3F0, 3B0, 2B0]")
    assert schedule.check().placement == Placement(((0, 0, 1, 1, 0),), 2)
    assert schedule.simulate().messages == 4


def test_replicas_and_routes() -> None:
    both = Placement.bidirectional(4, 6, up=[3, 4, 5])
    assert both.replicated
    assert both.ranks_of(0) == (0, 3)
    assert both.path(2) == (0, 1, 2, 3)
    assert both.path(4) == (3, 2, 1, 0)
    assert both.stages_of(1) == (1, 2)
    assert repr(both) == "Placement(0: [0, 3], 1: [1, 2], 2: [1, 2], 3: [0, 3])"


def test_replicas_of_several_stages_a_rank() -> None:
    both = Placement(((0, 1, 1, 0, 0, 1), (1, 0, 0, 1, 1, 0)), 2, (0, 1))
    assert both.stages_of(0) == both.stages_of(1) == (0, 1, 2, 3, 4, 5)


def test_equal_placements_compare_equal() -> None:
    down, up = (0, 1), (1, 0)
    assert Placement((down, up), 2, (1, 0)) == Placement((up, down), 2, (0, 1))
    assert (
        Placement((down, up), 2, (0, 0)) == Placement((down, down), 2, (0, 1)) == Placement.loop(2)
    )
    assert Placement(([0, 1],), 2) == Placement.loop(2)  # type: ignore[arg-type]
    assert Placement((down, up), 2, (0, 1)) != Placement((down, up), 2, (0, 0))


@pytest.mark.parametrize("case", list(cases(ranks=(1, 2, 4), microbatches=(1, 6))), ids=str)
def test_read_off_the_rows(case) -> None:
    schedule = case.make()
    assert placement_of(schedule.rows) == schedule.placement


def test_a_stray_action_does_not_make_a_replica() -> None:
    rows = [list(row) for row in Schedule.parse(GOOD)]
    rows[0].append(rows[1].pop())  # 1B1
    schedule = Schedule(rows)  # type: ignore[arg-type]
    assert schedule.placement == Placement.loop(2)
    with pytest.raises(
        ScheduleError, match="stage 1 is on rank 1 for microbatch 1; move 1B1 there"
    ):
        schedule.check()


def test_a_stray_action_among_replicas_goes_by_its_own_microbatch() -> None:
    schedule = Schedule.parse("[0F0, 0I0, 0W0, 0W1]\n[0F1, 0I1]")
    assert schedule.placement == Placement(((0,), (1,)), 2, (0, 1))
    with pytest.raises(
        ScheduleError, match="stage 0 is on rank 1 for microbatch 1; move 0W1 there"
    ):
        schedule.check()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Placement((), 2), "at least one stage"),
        (lambda: Placement(((),), 2), "at least one stage"),
        (lambda: Placement(((0, 2),), 2), "names rank 2, but there are ranks 0 to 1"),
        (lambda: Placement(((0, -1),), 2), "names rank -1"),
        (lambda: Placement(((0, 1), (1,)), 2, (0, 1)), "a rank for each stage"),
        (lambda: Placement(((0, 1), (1, 0)), 2), "need a route"),
        (lambda: Placement(((0, 1), (1, 0)), 2, (0, 2)), "does not have"),
        (lambda: Placement.loop(0), "at least one stage"),
        (lambda: Placement.loop(-2), "at least one stage"),
        (lambda: Schedule.parse("[0F0]\n[2F0]"), "no rank holds stage 1, but stage 2 occurs"),
        (lambda: Schedule.parse("[0F0]\n[0F900000, 1F0]\n[1F1]"), "without gaps"),
    ],
)
def test_placements_that_cannot_be(make, says: str) -> None:
    with pytest.raises(ScheduleError, match=says) as caught:
        make()
    assert caught.value.rule == "placement"


# ---- schedules ----
def test_a_schedule_is_a_value() -> None:
    one, other = Schedule.parse(GOOD, name="mine"), Schedule.parse(GOOD)
    assert one == other == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(other)
    assert one.digest == other.digest != one.only("F").digest
    assert (len(one), list(one), one[1]) == (2, list(one.rows), one.rows[1])
    assert repr(one) == "Schedule(mine, ranks=2, microbatches=2, stages=2)"
    assert one != Schedule(one.rows, one.placement, 3)
    assert Schedule([list(row) for row in one.rows]) == one  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        one.name = "yours"  # type: ignore[misc]


def test_only_some_ops() -> None:
    schedule = make_schedule("DualPipeV", 2, 6)
    forwards = schedule.only("F").check(training=False)
    assert str(forwards[1][0]) == "1F0"
    assert {a.op for row in forwards for a in row} == {"F"}  # type: ignore[union-attr]
    assert (forwards.placement, forwards.microbatches, forwards.name) == (
        schedule.placement,
        6,
        schedule.name,
    )
    assert any(isinstance(action, Fused) for row in schedule.only("FB") for action in row)
    assert schedule.only("FIWB") == schedule
    assert str(Schedule.parse("[(0F1;0B0;0F2)OVERLAP_F_B]").only("F")) == "[(0F1;0F2)OVERLAP_F_B]"


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([], "ranks"),
        ([[]], "placement"),
        ([["0F0"]], "action"),
        ([[None]], "action"),
        ([[(0, "F", 0)]], "action"),
        ([[Action("a", "F", 0)]], "action"),
        ([[Action(0, "F", None)]], "action"),
        ([[Action(0, "F", 0.5)]], "range"),
        ([[Fused(7)]], "action"),
        ([[Fused(("0F0", "0B0"))]], "action"),
        ([["x" * 10_000]], "action"),
    ],
)
def test_rows_that_are_none(rows, rule: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(rows)
    assert caught.value.rule == rule
    assert len(str(caught.value)) < 200
    if rows and rows[0] and not isinstance(rows[0][0], (Action, Fused)):  # whatever else is given
        with pytest.raises(ScheduleError, match="is not an action"):
            Schedule(rows, Placement.loop(1), 1)


@pytest.mark.parametrize("microbatches", [-2, 1.5, "2", None])
def test_counts_that_are_none(microbatches) -> None:
    with pytest.raises(ScheduleError, match="must be a count of 0 or more"):
        Schedule(Schedule.parse(GOOD).rows, Placement.loop(2), microbatches)


def test_where_a_csv_cannot_be_written(tmp_path) -> None:
    with pytest.raises(ScheduleError, match="cannot write"):
        Schedule.parse(GOOD).to_csv(tmp_path / "nowhere" / "plan.csv")


def test_where_a_picture_cannot_be_written(tmp_path) -> None:
    with pytest.raises(FpipeError, match=r"cannot write '.*nowhere/a\.svg': No such file"):
        Schedule.parse(GOOD).simulate().save(tmp_path / "nowhere" / "a.svg")


# ---- without torch ----
def test_all_of_it_works_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import fpipe\n"
        "s = fpipe.make_schedule('ZBV', 4, 8).check()\n"
        "assert fpipe.Schedule.parse(str(s)) == s\n"
        "print(s.simulate(fpipe.Costs(comm=0.5)).draw(width=80, color=False))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank 3" in done.stdout


def test_the_public_face_has_these_names() -> None:
    assert fpipe.Schedule is Schedule
    assert fpipe.Costs(F=2).F == 2
    assert fpipe.Timeline.measured.__doc__
