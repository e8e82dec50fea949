"""Messages through shared memory: every byte in order, whatever the free space, and a peer that is
gone is noticed.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import fpipe
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.shared_memory import SWITCH, _native, lane, mailboxes
from fpipe.collectives.shared_memory.lane import LaneReader, LaneWriter, pieces
from fpipe.errors import GroupError, MismatchError
from fpipe.tree import Spec

pytestmark = pytest.mark.skipif(
    not _native.AVAILABLE, reason="shared memory is used on x86-64 Linux alone"
)


def ends() -> tuple[LaneWriter, LaneReader]:
    memory = mmap.mmap(-1, lane.LANE)
    return LaneWriter(memory, [0]), LaneReader(memory, [0])


SIZES = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=40)


@given(sizes=SIZES, draw=st.randoms(use_true_random=False))
def test_every_message_arrives_in_order_whatever_the_free_space(sizes, draw):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AREA", 4096), ("LARGE", 1024), ("NOTES", 8)):
            patch.setattr(lane, name, value)
        pieces.cache_clear()
        writer, reader = ends()
        sent = [
            [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in each] for each in sizes
        ]
        coming = [(n, piece) for n, each in enumerate(sizes) for piece in pieces(tuple(each))]
        found = [[torch.zeros_like(buffer) for buffer in each] for each in sent]
        taken, put = 0, 0
        while taken < len(coming):
            if put < len(sent) and draw.random() < 0.5:
                writer.write(sent[put], pieces(tuple(sizes[put])))
                put += 1
            elif reader.has():
                assert reader.read(found[coming[taken][0]], coming[taken][1])
                taken += 1
            else:
                writer.retry()
            assert writer.count - reader.count <= lane.NOTES
            notes = [2 * (number % lane.NOTES) for number in range(reader.count, writer.count)]
            starts = sorted((reader.notes[note], reader.notes[note + 1]) for note in notes)
            assert all(start + size <= after for (start, size), (after, _) in pairwise(starts)), (
                "they overlap"
            )
        pieces.cache_clear()
    for each, other in zip(sent, found, strict=True):
        for buffer, copy in zip(each, other, strict=True):
            assert torch.equal(buffer, copy)


def test_a_message_of_another_size_is_not_taken():
    writer, reader = ends()
    writer.write([torch.ones(64)], pieces((256,)))
    assert not reader.read([torch.ones(128)], pieces((512,))[0])


@pytest.mark.parametrize("start", [lane.AREA, lane.AREA - 64, 2**63])
def test_a_start_outside_of_the_lane_raises(start: int):
    """The copy was a segmentation fault."""
    writer, reader = ends()
    writer.write([torch.ones(64)], pieces((256,)))
    writer.notes[0] = start
    with pytest.raises(GroupError, match=f"begins at {start} in a shared memory"):
        reader.read([torch.ones(64)], pieces((256,))[0])


def test_a_counter_beyond_what_was_sent_raises():
    writer, reader = ends()
    writer.write([torch.ones(1)], pieces((4,)))
    reader.taken[0] = 7
    with pytest.raises(GroupError, match="7 messages are marked as read, and 1"):
        writer._room(lane.AREA)


def test_only_a_memory_file_of_this_user_is_opened(tmp_path: Path):
    file = _native.memory_file(4096)
    _native.check_memory_file(file, 4096)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="4096 bytes"):
        _native.check_memory_file(file, 8192)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, 0)
    os.close(file)
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb+") as other, pytest.raises(OSError):  # noqa: PT011
        _native.check_memory_file(other.fileno(), 4096)


def test_counters_wrap_around():
    """After 2**32 messages they start at 0 again."""
    writer, reader = ends()
    writer.count = reader.count = 2**32 - 2
    writer.sent[0] = writer.taken[0] = 2**32 - 2
    found = torch.zeros(4)
    for number in range(4):
        assert not reader.has()
        writer.write([torch.full((4,), float(number))], pieces((16,)))
        assert reader.has()
        assert reader.read([found], pieces((16,))[0])
        assert found.tolist() == [number] * 4


def test_a_lane_returns_the_pages_of_large_messages():
    """It kept up to 256 MiB for the rest of the job."""
    file = _native.memory_file(lane.LANE)
    memory = mmap.mmap(file, lane.LANE)
    writer, reader = LaneWriter(memory, [0]), LaneReader(memory, [0])

    def travel(size: int) -> None:
        sent, (piece,) = torch.full((size,), 3, dtype=torch.uint8), pieces((size,))
        found = torch.zeros_like(sent)
        assert writer.write([sent], [piece]) and reader.read([found], piece)
        assert torch.equal(sent, found)

    for _ in range(3):
        travel(lane.LARGE)
        travel(100)
    held = os.fstat(file).st_blocks * 512
    assert held >= lane.LARGE, "large messages that follow each other find their pages"
    for _ in range(20 * lane.QUIET):
        travel(100)
    assert os.fstat(file).st_blocks * 512 < lane.KEEP + (1 << 20)
    travel(lane.LARGE)
    os.close(file)


def test_a_sleeping_reader_is_woken():
    writer, reader = ends()
    threading.Timer(0.2, lambda: writer.write([torch.ones(1)], pieces((4,)))).start()
    start = time.monotonic()
    reader.sleep(10.0)
    assert reader.has()
    assert time.monotonic() - start < 5


# ---- between processes ----
def _group() -> C10dGroup:
    group = fpipe.init(timeout=20)
    assert isinstance(group, C10dGroup)
    assert group.at_once
    return group


def _large() -> list[bool]:
    """Messages larger than the area, both ways at once: no rank waits until the other has
    received.
    """
    group = _group()
    lane.AREA, lane.LARGE = 1 << 20, 1 << 18
    rank, other = group.rank, 1 - group.rank
    x = [torch.full((3 << 18,), float(10 * rank + n)) for n in range(3)]
    for each in x:
        group.send((each,), rank, other)
    works = [group.recv((Spec.of(each),), other, rank) for each in x]
    found = [bool((work.wait()[0] == 10 * other + n).all()) for n, work in enumerate(works)]
    group.flush()
    return found


def test_messages_larger_than_the_area():
    assert fpipe.launch(_large, ranks=2, timeout=60) == [[True] * 3] * 2


def _out_of_turn() -> list[float]:
    """Receives that are waited for in another order than they were requested."""
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
    return "no error"


def test_a_size_that_does_not_match_raises():
    assert (
        "sent a message of another size than the 256 bytes"
        in fpipe.launch(_other_size, ranks=2, timeout=60)[1]
    )


def _leaves() -> tuple[float, str]:
    """Rank 0 sends once and exits: its message still arrives, and the next wait raises long before
    the time-out.
    """
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
    return time.monotonic() - start, "no error"


def test_a_rank_that_has_exited_is_not_waited_for():
    seconds, text = fpipe.launch(_leaves, ranks=2, timeout=60)[1]
    assert seconds < 10
    assert "for a message from rank 0" in text
    assert "its process has ended" in text


def _hosts() -> bool:
    group = fpipe.init(timeout=20)
    assert isinstance(group, C10dGroup)
    rank, other = group.rank, 1 - group.rank
    work = group.recv((Spec((1,), (1,), torch.float32),), other, rank)
    group.send((torch.tensor([float(rank)]),), rank, other)
    assert work.wait()[0].item() == other
    group.flush()
    return group.at_once


def test_ranks_that_cannot_open_each_others_memory_use_the_backend():
    assert fpipe.launch(_hidden, ranks=2, timeout=60) == [False, False]


def _hidden() -> bool:
    if os.environ["RANK"] == "1":  # one way is enough
        real = mailboxes.Peer

        def refused(*_):
            raise PermissionError("another user's")

        mailboxes.Peer = refused  # type: ignore[assignment, misc]
        try:
            return _hosts()
        finally:
            mailboxes.Peer = real  # type: ignore[misc]
    return _hosts()


def test_the_switch_turns_it_off_and_one_is_enough():
    assert fpipe.launch(_off, ranks=2, timeout=60) == [False, False]


def _off() -> bool:
    if os.environ["RANK"] == "0":
        os.environ[SWITCH] = "0"
    return _hosts()


def test_without_memory_files_the_backend_sends():
    assert fpipe.launch(_without, ranks=2, timeout=60) == [False, False]


def _without() -> bool:
    if os.environ["RANK"] == "0":

        def refused(*_):
            raise OSError("not permitted")

        os.memfd_create = refused
    return _hosts()


def test_a_limit_of_address_space_leaves_messages_to_the_backend():
    """The first message raised an OSError."""
    assert fpipe.launch(_narrow, ranks=2, timeout=60) == [False, False]


def _narrow() -> bool:
    if os.environ["RANK"] == "0":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20), resource.RLIM_INFINITY))
    return _hosts()


def test_a_limit_of_open_files_is_named():
    texts = fpipe.launch(_no_files, ranks=2, timeout=60)
    assert "ulimit -n" in texts[0]
    assert "rank 0" in texts[1]


def _no_files() -> str:
    if os.environ["RANK"] == "0":

        def refused(*_):
            raise OSError(errno.EMFILE, "Too many open files")

        os.memfd_create = refused
    with pytest.raises(GroupError) as error:
        _hosts()
    return str(error.value)
