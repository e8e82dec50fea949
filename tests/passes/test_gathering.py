"""Copies of a pipeline: when parameters are gathered and freed, and when gradients are reduced."""

from __future__ import annotations

import pytest

from fpipe import Schedule, make_schedule
from plans import Lowered, lower, lower_copy

KINDS = ("run", "UNSHARD", "RESHARD", "REDUCE")
#: Two stages on one rank, depth first.
TWO = Schedule.parse("[0F0, 1F0, 1B0, 0B0, 0F1, 1F1, 1B1, 0B1]")
VJP = {"mode": "vjp"}
TWO_PHASES = Schedule.parse("[0F0, 1F0, 1B0, 0B0]")
#: Three stages on one rank, used in turn.
THREE = Schedule.parse("[0F0, 1F0, 2F0, 0F1, 2B0, 1B0, 0B0, 1F1, 2F1, 2B1, 1B1, 0B1]")


def copies(plan: Lowered) -> list[str]:
    """Programs of stages, and all lines about parameters and gradients of stages."""
    return [
        line.short
        for line in plan.lines
        if line.stage >= 0 or (line.kind in "FBIW" and "loss" not in line.short)
    ]


def test_without_copies_nothing_is_gathered_or_reduced():
    assert all(line.stage < 0 for line in lower(TWO)[0].lines)


def test_plain_copies_reduce_a_stage_after_its_last_backward():
    assert copies(lower_copy(TWO, 0)[0]) == [
        "0F0",
        "1F0",
        "1B0",
        "0B0",
        "0F1",
        "1F1",
        "1B1",
        "REDUCE gradients 1",
        "0B1",
        "REDUCE gradients 0",
        "WAIT gradients 1",
        "WAIT gradients 0",
    ]


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_are_gathered_once_and_freed_after_their_last_use(zero: int):
    assert copies(lower_copy(TWO, zero)[0]) == [
        "UNSHARD stage 0",
        "WAIT stage 0",
        # Those of the next action are on their way meanwhile.
        "UNSHARD stage 1",
        "0F0",
        "WAIT stage 1",
        "1F0",
        "1B0",
        "0B0",
        "0F1",
        # The backward of stage 0 needs no parameters, since nobody wants the gradient of x.
        "RESHARD stage 0",
        "1F1",
        "1B1",
        "RESHARD stage 1",
        "REDUCE gradients 1",
        "0B1",
        "REDUCE gradients 0",
        "WAIT gradients 1",
        "WAIT gradients 0",
    ]


def test_zero_3_holds_two_stages_and_frees_the_one_that_is_needed_last():
    lines = copies(lower_copy(THREE, 3)[0])
    assert lines[: lines.index("2B0") + 1] == [
        "UNSHARD stage 0",
        "WAIT stage 0",
        "UNSHARD stage 1",
        "0F0",
        "WAIT stage 1",
        # Stages 1, now, and 2, next, are all that may be whole.
        "RESHARD stage 0",
        "UNSHARD stage 2",
        "1F0",
        "WAIT stage 2",
        # Stage 2 is needed now and 0 next.
        "RESHARD stage 1",
        "UNSHARD stage 0",
        "2F0",
        "WAIT stage 0",
        # Stage 2 comes next and is whole.
        "0F1",
        # That was the last use of stage 0.
        "RESHARD stage 0",
        "UNSHARD stage 1",
        "2B0",
    ]


def test_zero_3_frees_the_stage_whose_next_use_is_furthest():
    rows = "[0F0, 1F0, 2F0, 3F0, 0F1, 1F1, 2F1, 3F1, 3B1, 3B0, 2B1, 2B0, 1B1, 1B0, 0B1, 0B0]"
    lines = copies(lower_copy(Schedule.parse(rows), 3, unsharded=3)[0])
    before, after = lines.index("1F0"), lines.index("2F0")
    # Stages 0 and 1 are whole and 2 is needed. Of 0 and 1, 1 is needed again later.
    assert lines[before + 1 : after] == ["WAIT stage 2", "RESHARD stage 1", "UNSHARD stage 3"]


def test_zero_3_with_one_stage_gathers_nothing_ahead():
    assert copies(lower_copy(TWO, 3, unsharded=1)[0])[:8] == [
        "UNSHARD stage 0",
        "WAIT stage 0",
        "0F0",
        "RESHARD stage 0",
        "UNSHARD stage 1",
        "WAIT stage 1",
        "1F0",
        "1B0",
    ]


def test_zero_3_with_enough_stages_is_as_zero_1():
    assert copies(lower_copy(THREE, 3, unsharded=3)[0]) == copies(lower_copy(THREE, 1)[0])


@pytest.mark.parametrize(("zero", "unsharded"), [(3, 1), (3, 2), (3, 3)])
def test_no_more_stages_are_whole_than_the_limit(zero: int, unsharded: int):
    schedule = make_schedule("Interleaved1F1B", 2, 4, 8)
    for plan in lower_copy(schedule, zero, unsharded=unsharded).values():
        held: set[int] = set()
        for line in plan.lines:
            if line.kind == "UNSHARD":
                assert line.stage not in held
                held.add(line.stage)
            elif line.kind == "RESHARD":
                held.remove(line.stage)
            assert len(held) <= unsharded
        assert not held


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "DualPipeV", "Chimera"])
def test_an_action_runs_only_while_its_parameters_are_whole(name: str, zero: int):
    for plan in lower_copy(make_schedule(name, 2, 4), zero).values():
        whole: dict[int, tuple[int, ...]] = {}
        for line in plan.lines:
            if line.kind == "WAIT" and line.stage >= 0 and not line.gradients:
                whole[line.stage] = line.writes
            elif line.kind == "RESHARD":
                assert line.frees == whole.pop(line.stage)
            elif line.kind == "F" and "loss" not in line.action:
                assert {*whole[int(line.action.split("F")[0])]} & {*line.reads}


def test_a_pullback_frees_parameters_between_its_phases():
    lines = copies(lower_copy(Schedule.parse("[0F0, 0F1, 0B0, 0B1]"), 2, loss=None, call=VJP)[0])
    # The caller may change the parameters between the phases; here, B needs none of stage 0.
    assert lines == [
        "UNSHARD stage 0",
        "WAIT stage 0",
        "0F0",
        "0F1",
        "RESHARD stage 0",
        "0B0",
        "0B1",
        "REDUCE gradients 0",
        "WAIT gradients 0",
    ]
    lines = copies(lower_copy(TWO_PHASES, 2, loss=None, call=VJP)[0])
    assert lines.index("RESHARD stage 1") < lines.index("1B0")
    assert lines.count("UNSHARD stage 1") == 2 and lines.count("UNSHARD stage 0") == 1


def test_a_backward_that_reads_no_parameters_gathers_none():
    lines = copies(lower_copy(Schedule.parse("[0F0, 0B0]"), 3)[0])
    # The gradient of p needs x and the cotangent; that of x, which nobody wants, would need p.
    assert lines.index("RESHARD stage 0") == lines.index("0B0") - 1


def test_gradients_that_are_summed_first_are_reduced_at_the_end():
    tied = lower_copy(TWO, 0, tied=[("0", "1")])[0]
    assert tied.short[-5:] == [
        "SUM",
        "REDUCE gradients 0",
        "REDUCE gradients 1",
        "WAIT gradients 0",
        "WAIT gradients 1",
    ]
    for plan in lower_copy(make_schedule("Chimera", 2, 2), 0).values():
        assert plan.short[-5:] == tied.short[-5:]


def test_a_frozen_stage_is_gathered_and_not_reduced():
    plan = lower_copy(TWO, 1, frozen=["0"])[0]
    assert "UNSHARD stage 0" in plan.short and "REDUCE gradients 1" in plan.short
    assert "REDUCE gradients 0" not in plan.short


def test_leaves_that_each_copy_owns_are_neither_gathered_nor_reduced():
    assert all(line.stage != 0 for line in lower_copy(TWO, 1, own=["0"])[0].lines)


def test_gradients_are_freed_when_their_reduction_starts():
    plan = lower_copy(TWO, 2)[0]
    for line in plan.of("REDUCE"):
        assert line.frees == line.reads
    reduced = [line.writes for line in plan.of("WAIT") if line.gradients]
    assert {slot for writes in reduced for slot in writes} <= {*plan.results}


def test_forwards_alone_gather_and_do_not_reduce():
    lines = copies(lower_copy(TWO, 3, call={"mode": "forward"})[0])
    assert [line for line in lines if "gradients" in line] == []
    assert "UNSHARD stage 1" in lines and lines[-1] == "RESHARD stage 1"
