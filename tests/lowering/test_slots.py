"""Slots of a plan: written once for each value, freed after its last use, and used again."""

from __future__ import annotations

import pytest
import torch

from fpipe import Schedule, make_schedule
from plans import Lowered, lower, lower_copy


def contents(plan: Lowered) -> list[set[int]]:
    """The slots that are full after each line; raises where a line reads an empty slot, writes a
    full one that it does not add to, or frees an empty one.
    """
    full, history = {*plan.feeds}, []
    for number, line in enumerate(plan.lines):
        text = f"{number} {line.short}"
        assert {*line.reads} <= full, f"{text} reads an empty slot"
        # ADD writes a sum into the slot of the first gradient, and SUM into that of each addend.
        overwrites = line.kind in ("ADD", "SUM")
        assert overwrites or not {*line.writes} & full, f"{text} writes a slot that is in use"
        assert len({*line.writes}) == len(line.writes)
        assert {*line.frees} <= full, f"{text} frees an empty slot"
        full = (full - {*line.frees}) | ({*line.writes} - {*line.frees})
        history.append(full)
    return history


def test_the_plan_of_the_docs():
    plan = lower(make_schedule("1F1B", 2, 2))[0]
    assert plan.slots == 7 and len(plan.lines) == 11
    assert plan.peak == 40  # of 8 bytes: 2 activations, 1 gradient of them; of 16: a gradient of p


def test_a_value_is_freed_by_its_last_reader():
    plan = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"))[0]
    forward, send, wait, backward, add = (
        next(line for line in plan.lines if line.short == text)
        for text in ("0F0", "SEND 1", "WAIT 1 #0", "0B0", "ADD take")
    )
    assert send.reads == forward.writes and send.frees == ()
    assert {*backward.frees} == {*forward.writes, *wait.writes}
    assert add.frees == add.reads == backward.writes


def test_an_output_that_no_backward_needs_is_freed_by_its_send():
    plan = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"), stages=[lambda p, x: x @ p] * 2)[0]
    (send,) = plan.of("SEND")
    assert send.frees == send.reads


def test_what_the_caller_passes_and_gets_is_never_freed():
    plan = lower(make_schedule("1F1B", 2, 4))[1]
    freed = {slot for line in plan.lines for slot in line.frees}
    assert not freed & {*plan.feeds}
    assert {*plan.results} <= contents(plan)[-1]


def test_nothing_is_left_but_arguments_and_results():
    for plan in lower(make_schedule("ZBVZeroBubble", 2, 4)).values():
        assert contents(plan)[-1] == {*plan.feeds, *plan.results}


def test_slots_are_used_again():
    few, many = (lower(make_schedule("1F1B", 2, number))[0] for number in (4, 12))
    # A slot for each row of the batch, and the same number for everything else.
    assert many.slots - few.slots == 8 == len(many.feeds) - len(few.feeds)


def test_a_schedule_that_holds_all_activations_needs_a_slot_for_each():
    few, many = (lower(make_schedule("GPipe", 2, number))[0] for number in (4, 12))
    assert many.slots - few.slots == 16


def test_the_slot_of_an_unused_result_is_not_given():
    # With the gradient of x unwanted, the backward of stage 0 writes the gradient of p alone.
    plan = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"))[0]
    (backward,) = (line for line in plan.lines if line.kind == "B")
    assert len(backward.writes) == 1


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_peak_is_what_is_full_at_most(number: int):
    plan = lower(make_schedule("GPipe", 2, number))[0]
    # A backward holds an activation for itself and each later one, its cotangent and the gradient
    # of tanh, 8 bytes each. From the second on there is also the sum of gradients, 16 bytes.
    assert plan.peak == (3 * 8 if number == 1 else 8 * (number - 1) + 8 + 8 + 16)


def test_a_gradient_is_added_into_one_slot():
    plan = lower(Schedule.parse("[0F0, 0B0, 0F1, 0B1]"))[0]
    place = next(number for number, line in enumerate(plan.lines) if line.kind == "ADD")
    (total,) = plan.lines[place].writes
    assert total in plan.results
    assert all(total not in line.writes for line in plan.lines[place + 1 :])


def test_parameters_that_are_gathered_again_get_a_slot_again():
    plan = lower_copy(make_schedule("GPipe", 1, 2, 3), 3)[0]
    gathered = [line.short for line in plan.of("WAIT") if not line.gradients]
    assert gathered.count("WAIT stage 0") == 2
    assert contents(plan)[-1] == {*plan.feeds, *plan.results}


def test_a_stage_of_several_leaves():
    def stage(p, x):
        return torch.tanh(x @ p["w"] + p["b"]), x

    def last(p, x):
        return x[0] @ p["w"] + x[1] + p["b"]

    params = [{"w": torch.eye(2), "b": torch.ones(2)}] * 2
    plans = lower(make_schedule("ZBH1", 2, 3), stages=[stage, last], params=params)
    for plan in plans.values():
        assert contents(plan)[-1] == {*plan.feeds, *plan.results}
