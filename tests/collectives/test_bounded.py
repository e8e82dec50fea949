"""The store of a job: calls that end in time, and one address."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

import stopped_host
from carriers import OVER
from fpipe.collectives.bounded import BoundedStore, StoreLostError
from fpipe.collectives.faults import FaultMonitor
from fpipe.collectives.meeting import meet
from fpipe.collectives.rendezvous import Rendezvous
from fpipe.errors import GroupError
from fpipe.products.training.launch import _context
from fpipe.products.training.outcome import store as launcher_store
from sample import also

PROCESSES = _context("forkserver", None)  # those of fpipe.launch, which have imported torch


def _host(port: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(60)


@pytest.fixture
def stopped():
    """A connection to a store, and a function that stops the process of the store."""
    ours, theirs = PROCESSES.Pipe()
    host = PROCESSES.Process(target=_host, args=(theirs,), daemon=True)
    host.start()
    store, pid = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False), host.pid
    assert pid is not None

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        tasks = list(Path(f"/proc/{pid}/task").glob("*/stat"))
        while any(task.read_text().rpartition(") ")[2][0] != "T" for task in tasks):
            time.sleep(0.01)  # the thread of the store may answer until it is stopped too

    yield store, stop, lambda: os.kill(pid, signal.SIGCONT)
    host.kill()
    host.join()


@pytest.mark.xdist_group("bounded")
def test_a_wait_for_a_key_ends_when_its_time_is_up(stopped):
    """The last look had the full bound of the store: a wait took twice its time-out."""
    store, stop, _ = stopped
    bounded, start = BoundedStore(store, 30.0), time.monotonic()
    bounded.set("key", "value")
    assert bounded.appears("key", start)
    assert not bounded.appears("other", start + 0.1)
    stop()
    with pytest.raises(StoreLostError):
        bounded.appears("other", time.monotonic() + 0.1)
    assert time.monotonic() - start < 5


@pytest.mark.xdist_group("bounded")
def test_a_part_of_a_wait_does_not_shorten_the_time_of_the_store(stopped):
    """A host that did not answer for a second ended a barrier with a time-out of minutes."""
    store, stop, go_on = stopped
    bounded, start = BoundedStore(store, 30.0), time.monotonic()
    bounded.set("key", "value")
    stop()
    threading.Timer(1.5, go_on).start()
    assert not bounded.appears("other", start + 30, start + 0.1)


@pytest.mark.xdist_group("bounded")
def test_a_rank_leaves_a_round_without_an_answer_of_the_store(stopped):
    """It waited for its time-out and did not say so; only then the next round did."""
    store, stop, _ = stopped
    bounded = BoundedStore(store, 3.0)
    monitor = FaultMonitor(bounded, 1, range(2), 3.0)
    bounded.set("key", "value")
    stop()
    start = time.monotonic()
    Rendezvous(bounded, monitor, lambda: None, count().__next__)._leave(5)
    assert time.monotonic() - start < 1
    monitor.journal.close()


@pytest.mark.xdist_group("bounded")
def test_a_host_that_is_stopped_is_an_error_of_the_meeting(
    stopped, monkeypatch: pytest.MonkeyPatch
):
    """TCPStore waits for ever for its first answer: the process was ended, instead of an
    exception.
    """
    store, stop, _ = stopped
    stop()
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(GroupError, match=r"does not answer within 0\.5 s. Look at rank 0 at 127"):
        meet(0.5)


@pytest.mark.xdist_group("bounded")
def test_calls_end_while_the_process_of_the_store_is_stopped(stopped):
    """``check`` and ``add`` of TCPStore have no time-out: survivors of a stopped rank 0 waited for
    ever.
    """
    store, stop, go_on = stopped
    bounded = BoundedStore(store, 0.5, pause=0.5)
    bounded.set("key", "value")
    assert bounded.get("key") == b"value"
    stop()
    for call in (
        lambda: bounded.check("key"),
        lambda: bounded.add("count", 1),
        lambda: bounded.get("key"),
    ):
        start = time.monotonic()
        with pytest.raises(StoreLostError, match=r"no answer within 0\.5 s"):
            call()
        assert time.monotonic() - start < 2
    assert bounded.lost
    go_on()
    time.sleep(0.6)
    assert bounded.check("key")
    assert not bounded.lost


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")
def test_the_launcher_listens_on_one_address():
    """TCPStore itself listens on all interfaces."""
    store = launcher_store("127.0.0.1")
    port = f":{store.port:04X}"
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    listening = [fields[1] for fields in lines if fields[1].endswith(port) and fields[3] == "0A"]
    assert listening == [f"0100007F{port}"]


@pytest.mark.timeout(300)  # of loaded machines: each rank imports torch
@pytest.mark.parametrize(
    ("moment", "over"),
    [
        *also(("start", "memory"), ("handshake", "gloo")),
        ("step", "gloo"),
        *also(("barrier", "gloo")),
    ],
)
def test_survivors_end_when_the_host_of_the_store_is_stopped(
    moment: str, over: str, tmp_path: Path
):
    """With env:// they waited for ever: the error was known, and the store was asked for its
    cause.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", **OVER[over]}
    files = [tmp_path / str(rank) for rank in range(3)]
    ranks = [
        PROCESSES.Process(
            target=stopped_host.main, args=(moment, env | {"RANK": str(rank)}, file), daemon=True
        )
        for rank, file in enumerate(files)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank, file in list(zip(ranks, files, strict=True))[1:]:
            rank.join(150)
            text = file.read_text().strip().splitlines()[-1]
            assert rank.exitcode == 1
            assert "Error: " in text, text
            assert "rank 0" in text, text
            if text[0].isdigit():
                assert float(text.split()[0]) < stopped_host.TIMEOUT + 5, text
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
