"""Messages through shared memory: every byte in order, whatever room there is, and who is gone is noticed at once."""

from __future__ import annotations

import mmap
import os
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.shared_memory import _futex, mailbox, nearby
from fpipe.collectives.shared_memory.mailbox import Inlet, Outlet, pieces
from fpipe.errors import GroupError, MismatchError
from fpipe.specs import Spec

pytestmark = pytest.mark.skipif(not _futex.AVAILABLE, reason="shared memory is used on x86-64 Linux alone")


def ends() -> tuple[Outlet, Inlet]:
    memory = mmap.mmap(-1, mailbox.LANE)
    return Outlet(memory), Inlet(memory)


SIZES = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=40)


@given(sizes=SIZES, draw=st.randoms(use_true_random=False))
def test_every_message_arrives_in_order_whatever_room_there_is(sizes, draw):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AREA", 4096), ("LARGE", 1024), ("NOTES", 8), ("_UNASKED", 4)):
            patch.setattr(mailbox, name, value)
        pieces.cache_clear()
        outlet, inlet = ends()
        sent = [[torch.randint(0, 255, (size,), dtype=torch.uint8) for size in each] for each in sizes]
        coming = [(n, piece) for n, each in enumerate(sizes) for piece in pieces(tuple(each))]
        found = [[torch.zeros_like(buffer) for buffer in each] for each in sent]
        taken, put = 0, 0
        while taken < len(coming):
            if put < len(sent) and draw.random() < 0.5:
                outlet.put(sent[put], pieces(tuple(sizes[put])))
                put += 1
            elif inlet.there(inlet.count):
                assert inlet.take(found[coming[taken][0]], coming[taken][1])
                taken += 1
            else:
                outlet.pump()
            assert outlet.count - inlet.count <= mailbox.NOTES
            starts = sorted(outlet._live)
            assert all(end <= after for (_, end), (after, _) in pairwise(starts)), "they overlap"
        pieces.cache_clear()
    for each, other in zip(sent, found, strict=True):
        for buffer, copy in zip(each, other, strict=True):
            assert torch.equal(buffer, copy)


def test_a_message_of_another_size_is_not_taken():
    outlet, inlet = ends()
    outlet.put([torch.ones(64)], pieces((256,)))
    assert not inlet.take([torch.ones(128)], pieces((512,))[0])


def test_counters_go_round():
    """After four thousand million messages they start again."""
    outlet, inlet = ends()
    outlet.count = outlet._freed = inlet.count = 2**32 - 2
    outlet.sent.value = outlet.taken.value = 2**32 - 2
    found = torch.zeros(4)
    for number in range(4):
        assert not inlet.there(inlet.count)
        outlet.put([torch.full((4,), float(number))], pieces((16,)))
        assert inlet.there(inlet.count)
        assert inlet.take([found], pieces((16,))[0])
        assert found.tolist() == [number] * 4


def test_the_short_way_puts_what_the_long_way_puts():
    outlet, inlet = ends()
    x = torch.randn(3, 4)
    carry = outlet.carrier(Spec.of(x), x.nbytes)
    assert carry(x)
    assert not carry(x.T.contiguous().T), "other strides are laid out by the long way"
    assert not carry(x.double())
    found = torch.zeros(3, 4)
    assert inlet.take([found], pieces((48,))[0])
    assert torch.equal(found, x)
    assert outlet.count == 1


def test_who_sleeps_is_woken():
    outlet, inlet = ends()
    threading.Timer(0.2, lambda: outlet.put([torch.ones(1)], pieces((4,)))).start()
    start = time.monotonic()
    inlet.sleep(0, 10.0)
    assert inlet.there(0)
    assert time.monotonic() - start < 5


# ---- between processes ----------------------------------------------------------------------------------------------
def _group() -> C10dGroup:
    group = fpipe.init(timeout=20)
    assert isinstance(group, C10dGroup)
    assert group.at_once
    return group


def _large() -> list[bool]:
    """Messages of more than all the room, both ways at once: nobody waits for the other to take them first."""
    group = _group()
    mailbox.AREA, mailbox.LARGE = 1 << 20, 1 << 18
    rank, other = group.rank, 1 - group.rank
    x = [torch.full((3 << 18,), float(10 * rank + n)) for n in range(3)]
    for each in x:
        group.send((each,), rank, other)
    works = [group.recv((Spec.of(each),), other, rank) for each in x]
    found = [bool((work.wait()[0] == 10 * other + n).all()) for n, work in enumerate(works)]
    group.flush()
    return found


def test_messages_larger_than_the_room():
    assert fpipe.launch(_large, ranks=2, timeout=60) == [[True] * 3] * 2


def _out_of_turn() -> list[float]:
    """Receives that are waited for in another order than they were asked for."""
    group = _group()
    spec = (Spec((1,), (1,), torch.float32),)
    if group.rank == 0:
        for number in range(4):
            group.send((torch.tensor([float(number)]),), 0, 1)
        group.barrier()
        return []
    works = [group.recv(spec, 0, 1) for _ in range(4)]
    found = [works[n].wait()[0].item() for n in (2, 0, 3, 1)]
    group.barrier()
    return found


def test_receives_are_waited_for_in_any_order():
    assert fpipe.launch(_out_of_turn, ranks=2, timeout=60)[1] == [2.0, 0.0, 3.0, 1.0]


def _other_size() -> str:
    group = _group()
    if group.rank == 0:
        group.send((torch.ones(4),), 0, 1)
        group.barrier()
        return ""
    try:
        group.recv((Spec((64,), (1,), torch.float32),), 0, 1).wait()
    except MismatchError as error:
        return str(error)
    finally:
        group.barrier()
    return "not told"


def test_a_size_that_does_not_match_is_told():
    assert "sent a message of another size than the 256 bytes" in fpipe.launch(_other_size, ranks=2, timeout=60)[1]


def _leaves() -> tuple[float, str]:
    """Rank 0 sends once and is gone: what it sent still comes, and then who waits is told, long before the time-out."""
    group = _group()
    if group.rank == 0:
        group.send((torch.ones(4),), 0, 1)
        group.flush()
        return 0.0, ""
    spec = (Spec((4,), (1,), torch.float32),)
    time.sleep(0.5)
    assert group.recv(spec, 0, 1).wait()[0].tolist() == [1.0] * 4
    start = time.monotonic()
    try:
        group.recv(spec, 0, 1).wait()
    except GroupError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, "not told"


def test_who_has_left_is_not_waited_for():
    seconds, told = fpipe.launch(_leaves, ranks=2, timeout=60)[1]
    assert seconds < 10
    assert "for a message from rank 0" in told
    assert "its process has ended" in told


def _hosts() -> tuple[bool, str]:
    group = fpipe.init(timeout=20)
    assert isinstance(group, C10dGroup)
    rank, other = group.rank, 1 - group.rank
    work = group.recv((Spec((1,), (1,), torch.float32),), other, rank)
    group.send((torch.tensor([float(rank)]),), rank, other)
    assert work.wait()[0].item() == other
    group.flush()
    return group.at_once, repr(group)


def test_ranks_that_cannot_open_each_others_memory_use_the_backend():
    assert [at_once for at_once, _ in fpipe.launch(_hidden, ranks=2, timeout=60)] == [False, False]


def _hidden() -> tuple[bool, str]:
    if os.environ["RANK"] == "1":  # one way is enough
        real = nearby._Neighbour

        def refused(*_):
            raise PermissionError("another user's")

        nearby._Neighbour = refused  # type: ignore[assignment, misc]
        try:
            return _hosts()
        finally:
            nearby._Neighbour = real  # type: ignore[misc]
    return _hosts()


def test_the_switch_turns_it_off_and_one_is_enough():
    assert [at_once for at_once, _ in fpipe.launch(_off, ranks=2, timeout=60)] == [False, False]


def _off() -> tuple[bool, str]:
    if os.environ["RANK"] == "0":
        os.environ[nearby.SWITCH] = "0"
    return _hosts()


def test_where_there_is_no_such_memory_the_backend_carries():
    assert [at_once for at_once, _ in fpipe.launch(_without, ranks=2, timeout=60)] == [False, False]


def _without() -> tuple[bool, str]:
    if os.environ["RANK"] == "0":

        def refused(*_):
            raise OSError("not permitted")

        os.memfd_create = refused
    return _hosts()
