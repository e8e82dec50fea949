"""Instructions of actions: which programs run, what they read, and how gradients are added and
summed.
"""

from __future__ import annotations

import torch

import fpipe
from common import layer
from fpipe import Schedule
from plans import Line, Lowered, lower

ONE = Schedule.parse("[0F0, 0B0]")


def line(plan: Lowered, action: str) -> Line:
    """The one line of an action's program."""
    (found,) = [line for line in plan.lines if line.action == action and line.kind in "FBIW"]
    return found


def written_by(plan: Lowered, before: str, slot: int) -> str:
    """The latest line before an action that writes a slot; ``caller`` where there is none."""
    place = next(i for i, line in enumerate(plan.lines) if line.action == before)
    writers = [line.short for line in plan.lines[:place] if slot in line.writes]
    return writers[-1] if writers else "caller"


def sources(plan: Lowered, action: str) -> list[str]:
    """What an action's program reads, by the lines that wrote it."""
    return [written_by(plan, action, slot) for slot in line(plan, action).reads]


# ---- programs ----
def test_a_forward_reads_parameters_and_the_batch():
    plan = lower(ONE)[0]
    assert plan.short == ["0F0", "loss F0", "loss B0", "0B0", "ADD take"]
    assert sources(plan, "0F0") == ["caller", "caller"]


def test_a_backward_reads_its_cotangent_and_what_the_forward_saved():
    plan = lower(Schedule.parse("[0F0, 1F0, 1B0, 0B0]"))[0]
    assert "1B0" in sources(plan, "0B0") and "0F0" in sources(plan, "0B0")
    assert {"loss B0", "0F0", "1F0"} <= {*sources(plan, "1B0")}


def test_the_loss_runs_after_the_last_forward_and_before_the_last_backward():
    plan = lower(Schedule.parse("[0F0, 0F1, 0B1, 0B0]"))[0]
    assert plan.only("run") == [
        "0F0",
        "loss F0",
        "0F1",
        "loss F1",
        "loss B1",
        "0B1",
        "loss B0",
        "0B0",
    ]


def test_the_split_backward_passes_values_from_I_to_W():
    plan = lower(Schedule.parse("[0F0, 1F0, 1I0, 0I0, 1W0, 0W0]"))[0]
    assert plan.only("run") == ["0F0", "1F0", "loss F0", "loss B0", "1I0", "1W0", "0W0"]
    assert "1I0" in sources(plan, "1W0")
    # The first stage has no gradient of its input, so 0I0 has nothing to do.
    assert "1I0" in sources(plan, "0W0")


def test_I_of_the_first_stage_runs_where_the_gradient_of_x_is_wanted():
    rows = Schedule.parse("[0F0, 0I0, 0W0]")
    plan = lower(rows, call={"wanted": (0, 1)})[0]
    assert plan.only("run") == ["0F0", "loss F0", "loss B0", "0I0", "0W0"]
    assert {*line(plan, "0I0").writes} & {*plan.results}


def test_a_forward_pass_runs_no_backward():
    plan = lower(ONE, call={"mode": "forward"})[0]
    assert plan.short == ["0F0", "loss F0"]


def test_without_a_loss_the_caller_passes_the_cotangents():
    plan = lower(ONE, loss=None, call={"mode": "vjp"})[0]
    assert plan.short == ["0F0", "0B0", "ADD take"]
    assert "caller" in sources(plan, "0B0")


# ---- gradients ----
def test_the_first_gradient_is_stored_and_programs_add_the_others():
    plan = lower(Schedule.parse("[0F0, 0B0, 0F1, 0B1, 0F2, 0B2]"))[0]
    assert plan.only("B", "ADD") == [
        "loss B0",
        "0B0",
        "ADD take",
        "loss B1",
        "0B1",
        "loss B2",
        "0B2",
    ]
    (total,) = plan.of("ADD")[0].writes
    assert total in line(plan, "0B1").reads and total in line(plan, "0B2").reads
    assert total in plan.results


def test_W_adds_where_the_backward_is_split():
    plan = lower(Schedule.parse("[0F0, 0F1, 0I0, 0I1, 0W1, 0W0]"))[0]
    assert plan.only("W", "ADD") == ["0W1", "ADD take", "0W0"]
    assert plan.of("ADD")[0].writes[0] in line(plan, "0W0").reads


def test_a_gradient_that_another_value_may_share_is_copied_first():
    # The gradient of p is the cotangent itself, which the caller or another stage may also read.
    plan = lower(
        Schedule.parse("[0F0, 1F0, 1B0, 0B0]"),
        stages=[layer, lambda p, x: x + p],
        params=[torch.eye(2), torch.ones(1, 2)],
    )[0]
    assert plan.only("ADD") == ["ADD copy", "ADD take"]


def test_gradients_in_another_dtype_are_copied():
    plan = lower(Schedule.parse("[0F0, 0B0, 0F1, 0B1]"), accumulate=torch.float64)[0]
    (add, *_) = plan.of("ADD")
    assert add.how == ("copy",) and add.nbytes == (32,)


def test_a_stage_that_is_frozen_gets_no_gradient():
    plans = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"), frozen=["0"])
    assert plans[0].short == ["0F0", "SEND 1"] and plans[0].results == ()
    assert plans[1].only("SEND") == []


def test_a_frozen_stage_behind_a_trained_one_passes_gradients_on():
    plans = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"), frozen=["1"])
    assert plans[1].only("run", "SEND", "ADD") == [
        "1F0",
        "loss F0",
        "loss B0",
        "1B0",
        "SEND 0",
    ]
    assert plans[0].only("ADD") == ["ADD take"]


def test_a_frozen_leaf_of_a_stage_gets_no_gradient():
    def affine(p, x):
        return x @ p["w"] + p["b"]

    params = [{"w": torch.eye(2), "b": torch.ones(2)}]
    assert len(lower(ONE, stages=[affine], params=params)[0].of("ADD")[0].writes) == 2
    assert (
        len(lower(ONE, stages=[affine], params=params, frozen=["0.b"])[0].of("ADD")[0].writes) == 1
    )


# ---- sums ----
def test_replicas_sum_their_gradients_in_one_order():
    rows = "[0F0, 1F1, 1B1, 0B0]\n[0F1, 1F0, 1B0, 0B1]"
    plans = lower(Schedule.parse(rows))
    for rank, plan in plans.items():
        tail = plan.short[-10:]
        exchange = [f"RECV {1 - rank} to sum", f"SEND {1 - rank}", f"WAIT {1 - rank} to sum"]
        assert tail == [*exchange, "SUM", "SUM"] * 2
    received = [[line.writes[0] for line in plan.of("WAIT")[-2:]] for plan in plans.values()]
    summed = [[line.reads for line in plan.of("SUM")[::2]] for plan in plans.values()]
    for number in range(2):
        # What is first on one rank came from there, so it was received by the other.
        places = [summed[rank][number].index(received[rank][number]) for rank in range(2)]
        assert sorted(places) == [0, 1]


def test_ties_sum_the_gradients_of_both_stages():
    plans = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"), tied=[("0", "1")])
    for rank, plan in plans.items():
        assert plan.short[-5:] == [
            f"RECV {1 - rank} to sum",
            f"SEND {1 - rank}",
            f"WAIT {1 - rank} to sum",
            "SUM",
            "SUM",
        ]
    assert plans[0].of("SUM")[0].reads[1] == plans[0].of("WAIT")[-1].writes[0]
    assert plans[1].of("SUM")[0].reads[0] == plans[1].of("WAIT")[-1].writes[0]


def test_ties_of_one_rank_send_nothing():
    plan = lower(Schedule.parse("[0F0, 1F0, 1B0, 0B0]"), tied=[("0", "1")])[0]
    # One sum, and one copy of it for each stage.
    assert plan.short[-3:] == ["SUM", "SUM", "SUM"]
    assert [len(line.reads) for line in plan.of("SUM")] == [2, 1, 1]


def test_a_tied_parameter_without_a_gradient_counts_as_zeros():
    plan = lower(
        Schedule.parse("[0F0, 1F0, 1B0, 0B0]"),
        stages=[layer, lambda p, x: torch.sin(x)],
        tied=[("0", "1")],
    )[0]
    assert plan.only("ADD", "ZERO", "SUM") == ["ADD take", "ZERO", "SUM", "SUM", "SUM"]


# ---- fused actions ----
def test_a_fused_action_runs_its_parts():
    rows = "[0F0, (0F1;0B0)OVERLAP_F_B, 0B1]"
    plan = lower(Schedule.parse(rows))[0]
    assert sorted(plan.only("run")) == sorted(
        ["0F0", "loss F0", "0F1", "loss F1", "loss B0", "0B0", "loss B1", "0B1"]
    )


def test_a_fused_action_sends_each_value_when_it_is_computed():
    rows = "[0F0, 0F1, 0B0, 0B1]\n[1F0, (1F1;1B0)OVERLAP_F_B, 1B1]"
    plan = lower(Schedule.parse(rows))[1]
    lines = plan.only("run", "SEND")
    assert lines.index("SEND 0") == lines.index("1B0") + 1


# ---- what the caller's function and other ranks get ----
def test_each_microbatch_is_passed_to_the_caller_s_function_after_its_forward():
    rows = Schedule.parse("[0F0, 0F1, 0B0, 0B1]")
    plan = lower(rows, call={"each": lambda number, y, loss: None})[0]
    assert plan.only("F", "EACH") == ["0F0", "loss F0", "EACH", "0F1", "loss F1", "EACH"]
    output, loss = plan.of("EACH")[1].reads
    assert output in line(plan, "0F1").writes and loss in line(plan, "loss F1").writes


def test_state_is_passed_from_one_microbatch_to_the_next():
    def counted(p, state, x):
        return x @ p, state + 1

    plan = lower(
        Schedule.parse("[0F0, 0F1, 0B0, 0B1]"),
        stages=[fpipe.Stage(counted, state=True)],
        side={"state": [torch.zeros(())]},
    )[0]
    assert sources(plan, "0F0") == ["caller", "caller", "caller"]
    assert sorted(sources(plan, "0F1")) == ["0F0", "caller", "caller"]
    assert {*line(plan, "0F1").writes} & {*plan.results}
