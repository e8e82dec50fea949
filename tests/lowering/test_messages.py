"""Messages of a plan: their order on both sides, when receives are posted, and when sends are
settled.
"""

from __future__ import annotations

import pytest
import torch

from fpipe import Schedule, make_schedule
from plans import lower, lower_apart

#: Two stages on two ranks, and what each rank would do alone.
TWO = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\n[1F0, 1F1, 1B0, 1B1]")
#: Rank 1 runs the microbatches in another order than rank 0.
SWAPPED = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\n[1F1, 1B1, 1F0, 1B0]")


def test_a_value_is_sent_after_its_action_and_waited_for_before_its_reader():
    plans = lower(TWO)
    assert plans[0].only("SEND", "WAIT", "run") == [
        "0F0",
        "SEND 1",
        "0F1",
        "SEND 1",
        "WAIT 1 #0",
        "0B0",
        "WAIT 1 #1",
        "0B1",
    ]
    assert [line.nbytes for line in plans[0].of("SEND")] == [(8,), (8,)]


def test_the_sender_s_order_is_the_order_of_a_channel():
    sender, receiver = lower(SWAPPED).values()
    assert sender.only("SEND", "run")[:4] == ["0F0", "SEND 1", "0F1", "SEND 1"]
    # The second message is needed first. It is waited for behind the first, which is kept.
    assert receiver.only("WAIT", "run")[:3] == ["WAIT 0 #0", "WAIT 0 #1", "1F1"]
    first, second = receiver.of("WAIT")
    reads = {line.action: line.reads for line in receiver.lines if line.kind == "F"}
    assert second.writes[0] in reads["1F1"] and first.writes[0] in reads["1F0"]


def test_gradients_come_back_in_the_order_of_the_backwards():
    first, second = lower(SWAPPED).values()
    assert second.only("SEND", "B") == [
        "loss B1",
        "1B1",
        "SEND 0",
        "loss B0",
        "1B0",
        "SEND 0",
    ]
    assert first.only("WAIT", "B") == ["WAIT 1 #0", "WAIT 1 #1", "0B0", "0B1"]


def test_two_receives_are_posted_ahead():
    plan = lower(make_schedule("GPipe", 2, 4))[1]
    assert plan.only("RECV", "WAIT", "F") == [
        "RECV 0 #0",
        "RECV 0 #1",
        "RECV 0 #2",
        "WAIT 0 #0",
        "1F0",
        "loss F0",
        "RECV 0 #3",
        "WAIT 0 #1",
        "1F1",
        "loss F1",
        "WAIT 0 #2",
        "1F2",
        "loss F2",
        "WAIT 0 #3",
        "1F3",
        "loss F3",
    ]


def test_receives_are_posted_before_the_first_action_and_one_more_at_each_wait():
    plan = lower(make_schedule("GPipe", 2, 4))[0]
    assert plan.only("RECV", "WAIT", "F", "B") == [
        "RECV 1 #0",
        "RECV 1 #1",
        *("0F0", "0F1", "0F2", "0F3"),
        "RECV 1 #2",
        "WAIT 1 #0",
        "0B0",
        "RECV 1 #3",
        "WAIT 1 #1",
        "0B1",
        "WAIT 1 #2",
        "0B2",
        "WAIT 1 #3",
        "0B3",
    ]


def test_a_strict_group_posts_a_receive_where_the_common_order_has_the_message():
    plans = lower_apart(TWO, "lockstep")
    # At unit costs: 0F0 | 0F1 and 1F0 | 1F1 | 1B0 (of which the loss is part) | 0B0 and 1B1 | 0B1.
    assert plans[1].only("RECV", "SEND", "run") == [
        "RECV 0 #0",
        "1F0",
        "loss F0",
        "RECV 0 #1",
        "1F1",
        "loss F1",
        "loss B0",
        "1B0",
        "SEND 0",
        "loss B1",
        "1B1",
        "SEND 0",
    ]
    assert plans[0].only("RECV", "SEND", "run") == [
        "0F0",
        "SEND 1",
        "0F1",
        "SEND 1",
        "RECV 1 #0",
        "0B0",
        "RECV 1 #1",
        "0B1",
    ]


def test_on_a_strict_group_a_receive_that_comes_first_is_posted_before_a_send():
    rows = "[0F0, 0F1, 0B0, 0F2, 0B1, 0B2]\n[1F0, 1B0, 1F1, 1B1, 1F2, 1B2]"
    plan = lower_apart(Schedule.parse(rows), "lockstep")[1]
    lines = plan.only("RECV", "SEND", "run")
    # 0F2 and 1B1 end at the same time: of messages of one moment that of rank 0 comes first.
    assert lines[lines.index("1B1") :][:3] == ["1B1", "RECV 0 #2", "SEND 0"]


def test_ranks_of_one_process_settle_nothing():
    assert all(not plan.of("SETTLE") for plan in lower(TWO).values())


def test_a_send_is_settled_when_a_gradient_shows_that_it_was_received():
    plan = lower_apart(TWO, "buffered")[0]
    # The gradient of a microbatch proves that both actions that may read its value have run.
    assert plan.only("SEND", "WAIT", "SETTLE") == [
        "SEND 1",
        "SEND 1",
        "WAIT 1 #0",
        "SETTLE 1 1",
        "WAIT 1 #1",
        "SETTLE 1 1",
    ]


def test_sends_are_settled_in_their_order():
    rows = "[0F0, 0F1, 0B1, 0B0]\n[1F0, 1F1, 1B1, 1B0]"
    plan = lower_apart(Schedule.parse(rows), "buffered")[0]
    # 1B1 shows nothing about the first send, to 1B0, and the second is settled behind it.
    assert plan.only("WAIT", "SETTLE") == ["WAIT 1 #0", "WAIT 1 #1", "SETTLE 2 1"]


def test_several_tensors_are_one_message():
    def both(p, x):
        return {"sum": x @ p, "row": (x @ p)[:, :1].double()}

    def joined(p, x):
        return x["sum"] @ p + x["row"].float()

    plans = lower(Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]"), stages=[both, joined])
    assert plans[0].only("SEND", "RECV") == ["RECV 1 #0", "SEND 1"]
    assert len(plans[0].of("SEND")[0].reads) == len(plans[1].of("WAIT")[0].writes) == 2
    assert plans[0].of("SEND")[0].nbytes == plans[1].of("RECV")[0].nbytes
    assert sorted(plans[0].of("SEND")[0].nbytes) == [8, 8]
    assert sorted(plans[1].of("SEND")[0].nbytes) == sorted(plans[0].of("WAIT")[0].nbytes) == [8, 8]


def test_a_value_goes_straight_to_each_stage_that_reads_it():
    def first(p, x):
        return {"h": x @ p, "skip": x * p[0]}

    def middle(p, x):
        return {"h": x["h"] @ p, "skip": x["skip"]}

    def last(p, x):
        return x["h"] @ p + x["skip"]

    rows = "[0F0, 0B0]\n[1F0, 1B0]\n[2F0, 2B0]"
    plans = lower(Schedule.parse(rows), stages=[first, middle, last])
    assert plans[0].only("SEND") == ["SEND 1", "SEND 2"]
    assert plans[1].only("SEND") == ["SEND 2", "SEND 0"]
    assert sorted(plans[2].only("SEND")) == ["SEND 0", "SEND 1"]
    assert [len(line.reads) for plan in plans.values() for line in plan.of("SEND")] == [1] * 6


def test_stages_of_one_rank_exchange_nothing():
    plan = lower(Schedule.parse("[0F0, 1F0, 1B0, 0B0]"))[0]
    assert plan.short == ["0F0", "1F0", "loss F0", "loss B0", "1B0", "ADD take", "0B0", "ADD take"]


@pytest.mark.parametrize("order", ["buffered", "lockstep"])
def test_forwards_alone_send_only_outputs(order: str):
    schedule = make_schedule("GPipe", 2, 3)
    plans = lower_apart(schedule, order, call={"mode": "forward"})  # type: ignore[arg-type]
    # No message comes back. Two sends may be under way, and the next settles the oldest.
    assert plans[0].short == ["0F0", "SEND 1", "0F1", "SEND 1", "0F2", "SEND 1", "SETTLE 1 1"]
    assert plans[1].only("SEND", "SETTLE") == []


def test_a_pullback_posts_receives_of_gradients_after_the_last_forward():
    plan = lower(TWO, loss=None, call={"mode": "vjp"})[0]
    assert plan.short == [
        "0F0",
        "SEND 1",
        "0F1",
        "SEND 1",
        "RECV 1 #0",
        "RECV 1 #1",
        "WAIT 1 #0",
        "0B0",
        "ADD take",
        "WAIT 1 #1",
        "0B1",
    ]


def test_a_leaf_of_the_batch_is_sent_by_the_first_stage_to_a_later_reader():
    def first(p, x):
        return {"h": x["a"] @ p, "b": x["b"]}

    def last(p, x):
        return x["h"] @ p + x["b"]

    batch = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    rows = Schedule.parse("[0F0, 0B0]\n[1F0, 1B0]")
    plans = lower(rows, stages=[first, last], x=batch, loss=lambda y: y.sum(), targets=())
    (send,) = plans[0].of("SEND")
    assert len(send.reads) == 2 and len(set(send.reads) & set(plans[0].feeds)) == 1
