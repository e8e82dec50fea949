"""The fake world: deterministic, strict, and its faults raise the errors of real processes, only
sooner.
"""

from __future__ import annotations

import time

import pytest
import torch

import fpipe
from conformance import CASES, conform
from fpipe.collectives.group import Done, Group
from fpipe.collectives.local import LocalGroup, local
from fpipe.errors import (
    DeadlockError,
    GroupError,
    MismatchError,
    PeerError,
    StalledError,
    UnsupportedError,
)
from fpipe.testing import (
    Delay,
    Drop,
    Kill,
    Refuse,
    outcomes,
    run,
)
from fpipe.testing.faults import Fault
from fpipe.tree import Spec

ONE = (Spec((2,), (1,), torch.float32),)


CALLS = "send recv settle flush share gather_objects all_reduce start_reduce start_gather barrier"


def pair(group: Group) -> float:
    """Rank 0 sends three messages, rank 1 adds them up."""
    rank = group.here[0]
    if rank == 0:
        for number in range(3):
            group.journal(0, f"0F{number}")
            group.send((torch.full((2,), float(number)),), 0, 1)
        return 0.0
    group.journal(1, "1F0")
    return sum(group.recv(ONE, 0, 1).wait()[0][0].item() * 10**number for number in range(3))


# ---- the suite ----
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_local_conforms(ranks: int):
    group = local(ranks)
    assert isinstance(group, Group)
    assert len(conform(group)) == len(CASES)


@pytest.mark.covering
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
def test_fakes_conform(ranks: int, order: str):
    for seed in range(2):
        names = run(conform, ranks, order=order, seed=seed)
        assert names == [names[0]] * ranks
        assert len(names[0]) == len(CASES)


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        ("swapped", "messages_keep_their_order"),
        ("contiguous", "every_dtype_and_layout_arrives"),
        ("sum_for_max", "reductions_are_right"),
        ("first_only", "every_dtype_and_layout_arrives"),
        ("doubled", "endpoints_carry_a_plan"),
        ("forgetful", "attributes_are_consistent"),
    ],
)
def test_the_suite_detects_a_broken_group(monkeypatch: pytest.MonkeyPatch, broken: str, case: str):
    """A suite that passes every group is useless."""
    group = local(2)
    sender = LocalGroup.sender

    def changed(change) -> None:
        """Send what a function of the tensors and the number of the message returns."""

        def broken_sender(self, src, dst, specs):
            send = sender(self, src, dst, specs)
            return lambda tensors: send(change(tensors, len(self._channel(src, dst)[0])))

        monkeypatch.setattr(LocalGroup, "sender", broken_sender)

    if broken == "swapped":
        changed(lambda tensors, number: tuple(t + number % 2 for t in tensors))
    elif broken == "contiguous":
        monkeypatch.setattr("fpipe.collectives.wire.lay_out", lambda tensor, spec: tensor)
    elif broken == "sum_for_max":
        monkeypatch.setattr(
            LocalGroup, "all_reduce", lambda self, x, op="sum": x * 2 if op == "max" else x
        )
    elif broken == "first_only":
        changed(lambda tensors, number: tensors[:1])
    elif broken == "doubled":

        def doubled(self, src, dst, specs):
            send = sender(self, src, dst, specs)
            return lambda tensors: send(tuple(2 * t for t in tensors))

        monkeypatch.setattr(LocalGroup, "sender", doubled)
        monkeypatch.setattr(
            LocalGroup,
            "send",
            lambda self, t, src, dst, specs=None: sender(self, src, dst, ())(t) or Done(),
        )
    else:
        monkeypatch.setattr(LocalGroup, "last_note", lambda self, rank: "")
    with pytest.raises((AssertionError, GroupError)) as raised:
        conform(group)
    assert case in "".join(raised.value.__notes__)


def test_reset_drops_messages_that_were_not_received():
    group = local(2)
    group.send((torch.zeros(2),), 0, 1)
    group.recv(ONE, 1, 0)
    group.reset()
    group.send((torch.ones(2),), 0, 1)
    assert group.recv(ONE, 0, 1).wait()[0].tolist() == [1, 1]
    assert not group.recv(ONE, 1, 0).done()


# ---- the world ----
def test_the_same_seed_gives_the_same_run():
    def story(seed: int) -> list[str]:
        events: list[str] = []

        def play(group):
            for step in range(5):
                events.append(f"{group.rank}:{step}")
                group.barrier()
                work = group.recv(ONE, (group.rank + 1) % 3, group.rank)
                group.send((torch.zeros(2),), group.rank, (group.rank - 1) % 3)
                events.append(f"{group.rank}:{work.done()}")
                work.wait()

        run(play, 3, seed=seed)
        return events

    assert story(5) == story(5)
    assert len({tuple(story(seed)) for seed in range(8)}) > 4


def test_buffered_needs_no_partner_and_lockstep_does():
    def both_send_first(group):
        other = 1 - group.rank
        group.send((torch.zeros(2),), group.rank, other)
        return group.recv(ONE, other, group.rank).wait()[0].tolist()

    assert run(both_send_first, 2) == [[0, 0], [0, 0]]
    with pytest.raises(
        DeadlockError,
        match="rank 0 waits to send message 0 to rank 1; rank 1 waits to send message 0",
    ):
        run(both_send_first, 2, order="lockstep")


def test_what_is_no_function_is_refused():
    with pytest.raises(GroupError, match="a function of the group of a rank, not 3"):
        run(3, ranks=2)  # type: ignore[arg-type]


def test_an_error_names_the_fake_rank():
    def fail(group):
        if group.rank == 2:
            raise ValueError("boo")
        group.barrier()

    with pytest.raises(ValueError, match="boo") as raised:
        run(fail, 3)
    assert "on fake rank 2 of 3" in raised.value.__notes__[0]
    ended = outcomes(fail, 3)
    assert isinstance(ended[0].error, PeerError)
    assert "rank 2 is gone. Nothing is known of rank 2; it raised ValueError: boo" in str(
        ended[0].error
    )


def test_ranks_that_call_different_collectives_raise():
    def disagree(group):
        return group.barrier() if group.rank else group.gather_objects(1)

    with pytest.raises(
        MismatchError, match=r"rank (0|1) came to (gather_objects|barrier) and rank"
    ):
        run(disagree, 2)


def test_a_tensor_changed_before_it_arrived_is_detected():
    def hasty(group):
        if group.rank == 0:
            x = torch.zeros(2)
            group.send((x,), 0, 1)
            x += 1
            return None
        return group.recv(ONE, 0, 1).wait()

    def patient(group):
        if group.rank == 0:
            x = torch.zeros(2)
            group.send((x,), 0, 1).wait()
            x += 1
            return None
        return group.recv(ONE, 0, 1).wait()[0].tolist()

    with pytest.raises(
        GroupError, match="rank 0 changed a tensor that was still on its way to rank 1"
    ):
        run(hasty, 2)
    assert run(patient, 2)[1] == [0, 0]


def test_a_send_that_is_settled_too_early_is_detected():
    def early(group):
        if group.rank == 0:
            group.send((torch.zeros(2),), 0, 1)
            group.settle(1, 1)
        else:
            group.barrier()

    def known(group):
        if group.rank == 0:
            group.send((torch.zeros(2),), 0, 1)
            group.recv(ONE, 1, 0).wait()
            group.settle(1, 1)
        else:
            group.recv(ONE, 0, 1).wait()
            group.send((torch.zeros(2),), 1, 0)

    with pytest.raises(
        GroupError, match="let go of message 0 to rank 1, which has not asked for it"
    ):
        run(early, 2)
    run(known, 2)


# ---- faults ----
def test_a_delay_that_is_short_changes_nothing():
    assert run(pair, 2, faults=[Delay(0, 1, 1, seconds=30)])[1] == run(pair, 2)[1] == 210


def test_a_long_delay_raises_without_waiting():
    begin = time.monotonic()
    with pytest.raises(
        StalledError,
        match=r"rank 1 \(1F0\) waited for message 1 of rank 0, longer than timeout=60.*0F2",
    ):
        run(pair, 2, faults=[Delay(0, 1, 1, seconds=90)])
    assert time.monotonic() - begin < 5


def test_a_lost_message():
    with pytest.raises(StalledError, match="for message 2 of rank 0, longer than timeout=60"):
        run(pair, 2, faults=[Drop(0, 1, 2)])


@pytest.mark.parametrize("call", range(3))
def test_a_killed_rank_is_noticed(call: int):
    ended = outcomes(pair, 2, faults=[Kill(0, before=call)])
    assert ended[0].killed
    assert isinstance(ended[1].error, PeerError)
    assert f"rank 0 is gone. Rank 0's last known action was 0F{call}" in str(ended[1].error)


def test_a_refused_operation():
    with pytest.raises(UnsupportedError, match="recv is refused on rank 1 by a Refuse fault"):
        run(pair, 2, faults=[Refuse("recv", rank=1)])
    with pytest.raises(GroupError, match="never occurred"):  # on another rank
        run(pair, 2, faults=[Refuse("recv", rank=0)])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Drop(0, 1, 10_000),
            r"nth=10000\) never occurred.*by channel were 0 to 1: 3; calls .* rank 0: 3, rank 1: 3",
        ),
        (Delay(1, 0, 0, seconds=1), "never occurred"),
        (Kill(1, before=99), "never occurred"),
        (Refuse("barrier"), "never occurred"),
        (Refuse("nonsense"), "nonsense.*never occurred"),
        (Drop(0, 2, 0), "never occurred"),
        (Kill(2, 0), "never occurred"),
        (Drop(0, 1, -1), "never occurred"),
    ],
)
def test_a_fault_that_never_occurs_fails_the_test(fault: Fault, message: str):
    for play in (run, outcomes):
        with pytest.raises(GroupError, match=message):
            play(pair, 2, faults=[fault])


def test_a_fault_that_an_error_prevented_is_reported_with_the_error():
    with pytest.raises(GroupError, match="never occurred") as raised:
        run(pair, 2, faults=[Kill(0, before=0), Drop(0, 1, 2)])
    assert isinstance(raised.value.__cause__, PeerError)


def test_every_call_of_a_group_can_be_refused():
    def everything(group: Group) -> None:
        conform(group)

    for operation in CALLS.split():
        with pytest.raises(UnsupportedError, match=f"{operation} is refused"):
            run(everything, 2, faults=[Refuse(operation)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ranks": 0}, "ranks=0"), ({"ranks": 2, "order": "fifo"}, "order='fifo'")],
)
def test_what_run_refuses(arguments: dict, message: str):
    with pytest.raises(GroupError, match=message):
        run(pair, **arguments)


def test_no_thread_is_left_behind():
    import threading

    before = threading.active_count()
    for seed in range(5):
        outcomes(pair, 2, seed=seed, faults=[Kill(0, 1)])
        run(pair, 2, seed=seed)
    assert threading.active_count() == before


def test_a_rank_that_never_returns_to_its_group_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    """The world waited for it without a bound."""
    import threading

    monkeypatch.setattr("fpipe.testing.world.LIMIT", 0.3)
    before, forgotten = threading.active_count(), threading.Event()

    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            forgotten.wait(20)
        group.barrier()

    with pytest.raises(
        DeadlockError, match=r"rank 1 has run for 0\.3 s without a call of its group"
    ):
        run(work, 3)
    forgotten.set()
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() == before


@pytest.mark.parametrize("order", ["lockstep", "buffered"])
def test_a_rank_that_returns_early_is_named(order):
    def early(group: Group) -> object:
        return None if group.here[0] == 1 else group.gather_objects(1)

    with pytest.raises(DeadlockError, match=r"rank 0 waits .*The function has ended on rank 1:"):
        run(early, ranks=2, order=order)


def test_a_group_of_a_run_that_has_ended_is_refused():
    """A call waited for a turn that no rank gives any more, without an end."""
    group, _ = fpipe.testing.run(lambda group: group, ranks=2)
    pipe = fpipe.pipeline(
        [lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2, group=group
    )
    with pytest.raises(fpipe.errors.GroupError, match="run that has ended"):
        fpipe.value_and_grad(pipe)([torch.ones(())] * 2, torch.ones(4))
