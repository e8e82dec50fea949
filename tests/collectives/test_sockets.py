"""Messages through sockets of fpipe: one connection, the thread that sends the rest, connecting,
and real processes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from carriers import OVER
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.shared_memory import SWITCH as MEMORY
from fpipe.collectives.shared_memory import transport as memory
from fpipe.collectives.sockets import SWITCH, connecting
from fpipe.collectives.sockets.progress import Progress
from fpipe.collectives.sockets.stream import Stream
from fpipe.collectives.sockets.words import Words
from fpipe.tree import Spec

ROW = (Spec((4,), (1,), torch.float32),)


# ---- one connection ----
@contextmanager
def pair(head: int = 7, other: int = 7) -> Iterator[tuple[Stream, Stream]]:
    a, b = socket.socketpair()
    with a, b:
        yield Stream(a, [head]), Stream(b, [other])


def received(stream: Stream, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    frame = stream.request([tensor], (size,))
    end = time.monotonic() + 10
    while frame.left and time.monotonic() < end:
        stream.fill()
    assert not frame.left
    return tensor


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 255, (size,), dtype=torch.uint8)


def test_what_the_system_does_not_take_is_queued_and_sent_in_order():
    with pair() as (a, b):
        sent = [noise(200_000) for _ in range(8)]
        assert [a.send([each], (200_000,)) for each in sent][-1] is False
        assert a.queued
        for each in sent:
            assert received_while(a.retry, b, 200_000).equal(each)
        assert a.retry() and not a.queued


def received_while(retry: Callable[[], object], stream: Stream, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    frame = stream.request([tensor], (size,))
    while frame.left:
        retry()
        stream.fill()
    return tensor


def test_the_thread_sends_the_rest_and_ends():
    with pair() as (a, b):
        sent, progress = noise(3_000_000), Progress()
        assert not a.send([sent], (sent.nbytes,))
        progress.send(a)
        assert received(b, sent.nbytes).equal(sent)
        before = threading.active_count()
        progress.close()
        assert threading.active_count() == before - 1


def test_several_buffers_and_none():
    with pair() as (a, b):
        parts, found = (
            [noise(5), noise(70)],
            [torch.empty(5, dtype=torch.uint8), torch.empty(70, dtype=torch.uint8)],
        )
        assert a.send(parts, (5, 70))
        assert a.send([], ())
        first, second = b.request(found, (5, 70)), b.request([], ())
        b.fill()
        assert not first.left and not second.left
        assert all(map(torch.equal, parts, found))


def test_more_buffers_than_one_call_of_the_system_takes():
    with pair() as (a, b):
        parts, found = (
            [torch.full((1,), n % 251, dtype=torch.uint8) for n in range(3000)] for _ in range(2)
        )
        for each in found:
            each.zero_()
        assert a.send(parts, (1,) * 3000)
        frame = b.request(found, (1,) * 3000)
        b.fill()
        assert not frame.left
        assert torch.cat(found).equal(torch.cat(parts))


def test_a_header_that_arrives_in_two_parts():
    with pair() as (a, b):
        tensor = torch.zeros(4, dtype=torch.uint8)
        frame = b.request([tensor], (4,))
        raw = (4).to_bytes(8, "little") + (7).to_bytes(8, "little") + b"abcd"
        for part in (raw[:3], raw[3:17], raw[17:]):
            a.connection.send(part)
            b.fill()
        assert not frame.left and bytes(tensor.tolist()) == b"abcd"


@pytest.mark.parametrize(
    ("size", "head"), [(8, 7), (2, 7), (4, 8)], ids=["larger", "smaller", "of another call"]
)
def test_another_message_than_the_requested_one_is_odd(size: int, head: int):
    with pair(head) as (a, b):
        a.send([noise(size)], (size,))
        frame = b.request([torch.zeros(4, dtype=torch.uint8)], (4,))
        b.fill()
        assert b.odd and frame.left


def test_an_end_of_the_connection_is_known_after_what_was_under_way():
    with pair() as (a, b):
        a.send([noise(4)], (4,))
        a.finish()
        assert len(received(b, 4)) == 4
        assert not b.ended
        b.request([torch.zeros(4, dtype=torch.uint8)], (4,))
        b.fill()
        assert b.ended == "it ended its connection"
        b.connection.close()
        a.send([noise(4)], (4,))
        assert a.ended


def test_words_of_several_calls():
    a, b = socket.socketpair()
    with a, b:
        first, second = Words({1: a}, 0.0), Words({0: b}, 0.0)
        for number in range(3):
            assert second.equal(number, 5) is None
            assert second.missing(number) == 0
            first.start(number, 5)
            assert second.equal(number, 5) is True
            assert second.equal(number, 6) is False
            assert second.missing(number) is None
        assert second.pause(3, waited=1.0) == ""
        first.finish()
        second.pause(3, waited=1.0)
        assert second.missing(3) == 0
        assert "ended its connection" in second.pause(3, waited=1.0)


# ---- connecting ----
class Gather:
    """``gather`` of ranks that are threads."""

    def __init__(self, size: int):
        self.barrier, self.parts = threading.Barrier(size, timeout=30), [None] * size

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.parts[rank] = value
            self.barrier.wait()
            found = list(self.parts)
            self.barrier.wait()
            return found

        return gather


def connected(
    size: int, near: dict[int, list[int]] | None = None, wanted: Any = None
) -> list[tuple[Any, bool]]:
    gather, near = Gather(size), near or {}
    with ThreadPoolExecutor(size) as pool:
        found = list(
            pool.map(
                lambda rank: connecting.connect(
                    rank,
                    size,
                    near.get(rank, []),
                    gather.of(rank),
                    True if wanted is None else rank in wanted,
                ),
                range(size),
            )
        )
    for links, _ in found:
        for each in links.values():
            for connection in each:
                connection.close()
    return found


def test_every_two_ranks_connect():
    found = connected(4)
    assert [sorted(links) for links, _ in found] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert all(whole for _, whole in found)


def test_near_ranks_do_not():
    found = connected(3, near={0: [1], 1: [0]})
    assert [(sorted(links), whole) for links, whole in found] == [
        ([2], True),
        ([2], True),
        ([0, 1], True),
    ]


def test_a_rank_that_does_not_want_to_has_no_connection():
    found = connected(3, wanted=(0, 2))
    assert [(sorted(links), whole) for links, whole in found] == [
        ([2], False),
        ([], False),
        ([0], False),
    ]


def test_a_rank_that_cannot_listen_has_no_connection(monkeypatch: pytest.MonkeyPatch):
    real, lock = socket.create_server, threading.Lock()

    def refused(*args: Any, **options: Any) -> socket.socket:
        if lock.acquire(blocking=False):  # the first one
            raise OSError("no port is free")
        return real(*args, **options)

    monkeypatch.setattr(socket, "create_server", refused)
    assert sorted(len(links) for links, _ in connected(3)) == [0, 1, 1]


def test_a_rank_that_cannot_be_reached_is_left_to_the_backend(monkeypatch: pytest.MonkeyPatch):
    real = connecting._called
    monkeypatch.setattr(
        connecting,
        "_called",
        lambda mine, other, rank: [] if rank == 2 else real(mine, other, rank),
    )
    assert [(sorted(links), whole) for links, whole in connected(3)] == [
        ([1], False),
        ([0], False),
        ([], False),
    ]


def test_strangers_are_not_connected(monkeypatch: pytest.MonkeyPatch):
    """One sends another token, one nothing: the ranks connect all the same."""
    real, strangers = connecting._called, list[socket.socket]()

    def called(mine: Any, other: Any, rank: int) -> list[socket.socket]:
        for hello in (
            connecting._HELLO.pack(b"?" * 16, rank, 0),
            b"",
            b"GET / HTTP/1.1\r\n\r\n----------",
        ):
            strangers.append(socket.create_connection(("127.0.0.1", other.port)))
            strangers[-1].sendall(hello)
            if not hello:
                strangers[-1].close()
        return real(mine, other, rank)

    monkeypatch.setattr(connecting, "_called", called)
    found = connected(2)
    assert [sorted(links) for links, _ in found] == [[1], [0]]
    for stranger in strangers:
        stranger.close()


def test_an_answer_without_the_token_is_refused():
    a, b = socket.socketpair()
    with closing(a):
        a.sendall(b"?" * 16)
        assert connecting._confirmed([b], b"!" * 16) == []
        assert b.fileno() < 0


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, ("127.0.0.1",)),
        ({"MASTER_ADDR": "127.0.0.1"}, ("127.0.0.1",)),
    ],
)
def test_addresses(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], names: tuple[str, ...]):
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert connecting._names() == names


# ---- processes ----
def _group() -> C10dGroup:
    group = fpipe.init(timeout=20)
    assert isinstance(group, C10dGroup)
    return group


def _exchange(group: C10dGroup, size: int) -> list[float]:
    """Every rank sends to every other one, before any of them receives."""
    spec = (Spec((size,), (1,), torch.float32),)
    others = [rank for rank in range(group.size) if rank != group.rank]
    for rank in others:
        group.send((torch.full((size,), float(group.rank)),), group.rank, rank)
    found = [group.recv(spec, rank, group.rank).wait()[0] for rank in others]
    group.flush()
    assert all(bool((each == each[0]).all()) for each in found)
    return [each[0].item() for each in found]


def _everything() -> tuple[str, bool, list[float], list[float], float]:
    group = _group()
    small, large = _exchange(group, 4), _exchange(group, 4_000_000)
    shared = group.share(
        (torch.tensor([3.0]),) if group.rank == 1 else None, (Spec((1,), (1,), torch.float32),), 1
    )
    return group.carried, group.at_once, small, large, shared[0].item()


def test_messages_of_all_sizes():
    for rank, found in enumerate(
        fpipe.launch(_everything, ranks=3, timeout=60, env=OVER["sockets"])
    ):
        others = [float(other) for other in range(3) if other != rank]
        assert found == (
            "through sockets (FPIPE_SOCKETS=0 turns them off)",
            True,
            others,
            others,
            3.0,
        )


def _two_hosts() -> tuple[str, bool, list[float], list[float], float, float]:
    """Ranks 0 and 1 share memory; rank 2 is as on another host."""
    real = memory.host
    memory.host = lambda: real() + ("" if int(os.environ["RANK"]) < 2 else " another")  # type: ignore[assignment]
    found = _everything()
    group = _group()
    pipe = fpipe.pipeline([torch.mul] * 3, loss=torch.sum, microbatches=3, group=group)
    params = [torch.tensor(float(stage + 2)) if stage in pipe.here else None for stage in range(3)]
    value, _ = fpipe.value_and_grad(pipe)(params, torch.arange(6.0))
    return *found, value.item()


@pytest.mark.skipif("memory" not in OVER, reason="shared memory needs x86-64 Linux")
def test_memory_and_sockets_together():
    found = fpipe.launch(_two_hosts, ranks=3, timeout=60, env={MEMORY: "1", SWITCH: "1"})
    for rank, (carried, at_once, small, large, shared, loss) in enumerate(found):
        assert at_once
        assert ("shared memory" in carried) == (rank < 2)
        assert "sockets" in carried
        assert small == large == [float(other) for other in range(3) if other != rank]
        assert (shared, loss) == (3.0, 24.0 * 15 / 3)


def _one_without() -> tuple[str, list[float]]:
    if os.environ["RANK"] == "1":
        os.environ[SWITCH] = "0"
    group = _group()
    assert not group.at_once
    return group.carried, _exchange(group, 4)


def test_one_rank_without_sockets_uses_the_backend():
    first, second, third = fpipe.launch(_one_without, ranks=3, timeout=60, env={MEMORY: "0"})
    assert "with 1 of 2 ranks" in first[0] and "by the backend with the others" in third[0]
    assert (first[1], second, third[1]) == ([1.0, 2.0], ("", [0.0, 2.0]), [0.0, 1.0])


def _leaves(path: str) -> tuple[float, str]:
    """Rank 0 sends once and ends: its message still arrives, and the next wait raises long before
    the time-out.
    """
    group = _group()
    if group.rank == 0:
        group.send((torch.ones(4),), 0, 1)
        group.flush()
        Path(path).touch()
        return 0.0, ""
    while not Path(path).exists():
        time.sleep(0.01)
    time.sleep(0.3)
    assert group.recv(ROW, 0, 1).wait()[0].tolist() == [1.0] * 4
    start = time.monotonic()
    with pytest.raises(fpipe.PeerError) as error:
        group.recv(ROW, 0, 1).wait()
    return time.monotonic() - start, str(error.value)


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path):
    seconds, text = fpipe.launch(
        _leaves, str(tmp_path / "sent"), ranks=2, timeout=60, env=OVER["sockets"]
    )[1]
    assert seconds < 10
    assert "for a message from rank 0" in text
    assert "it ended its connection" in text


def _another_size() -> str:
    group = _group()
    if group.rank == 0:
        group.send((torch.ones(64),), 0, 1)
        group.flush()
        return ""
    with pytest.raises(fpipe.MismatchError) as error:
        group.recv(ROW, 0, 1).wait()
    return str(error.value)


def test_a_size_that_does_not_match_raises():
    text = fpipe.launch(_another_size, ranks=2, timeout=60, env=OVER["sockets"])[1]
    assert "sent another message than the 16 bytes" in text
