"""Ranks that are killed, stopped or raise, on real processes: every survivor raises in time and
names the cause.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from carriers import FIRST, OVER
from fpipe import init, launch
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.setup import adopt
from fpipe.errors import GroupError, LaunchError
from fpipe.products.training import launch as launching
from fpipe.tree import Spec

RANKS, VICTIM, TIMEOUT = 4, 2, 2.0
MESSAGE = (torch.zeros(4),)
SPECS = (Spec.of(MESSAGE[0]),)


def _ring(folder: str, how: str) -> None:
    """A message circulates until rank 2 fails; each survivor writes its error and the time that it
    waited.
    """
    group = init(timeout=60)  # to start may take long where there are few cores
    assert isinstance(group, C10dGroup)
    group.barrier()
    if how == "stop":  # a death is noticed at once, other than on a busy machine
        group._monitor.timeout = TIMEOUT
    rank, begin = group.rank, time.monotonic()
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    try:
        for step in range(10_000):
            group.journal(rank, f"{rank}F{step}")
            if rank == VICTIM and step == 60:
                time.sleep(0.3)  # the journal is written
                _meet(how)
            if rank == 0:
                group.send(MESSAGE, 0, 1, SPECS)
            group.recv(SPECS, (rank - 1) % RANKS, rank).wait()
            if rank != 0:
                group.send(MESSAGE, rank, (rank + 1) % RANKS, SPECS)
            begin = time.monotonic()
            time.sleep(0.005)
    except GroupError as error:
        text = f"{time.monotonic() - begin} {type(error).__name__} {error}"
        Path(folder, f"error{rank}").write_text(text)
        _again(group)
        if how == "stop" and len(list(Path(folder).glob("error*"))) == RANKS - 1:
            with suppress(ProcessLookupError):  # two may be last
                os.kill(int(Path(folder, f"pid{VICTIM}").read_text()), signal.SIGKILL)
    except ValueError as error:
        group.failed(error)
        raise


def _meet(how: str) -> None:
    if how == "raise":
        raise ValueError("boo")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def _again(group: C10dGroup) -> None:
    """A group that failed raises at once on any call."""
    for call in (
        lambda: group.send(MESSAGE, group.rank, 0, SPECS),
        lambda: group.all_reduce(torch.ones(1)),
    ):
        if group.rank != 0:
            with pytest.raises(GroupError, match="failed before"):
                call()


@pytest.mark.covering
@pytest.mark.parametrize(
    ("how", "raised", "end"),
    [
        ("kill", LaunchError, r"[Rr]ank 2 is gone, and its last known action was 2F60"),
        ("stop", LaunchError, r"[Rr]ank 2 does not answer, and its last known action was 2F60"),
        ("raise", ValueError, r"[Rr]ank 2 \(2F60\) raised ValueError: boo"),
    ],
)
@pytest.mark.parametrize("over", OVER)
def test_every_survivor_is_reported(
    tmp_path: Path,
    how: str,
    raised: type[Exception],
    end: str,
    over: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(launching, "GRACE", 30.0)  # of busy machines
    with pytest.raises(raised, match=r"rank 2 ended by signal SIGKILL|boo"):
        launch(_ring, str(tmp_path), how, ranks=RANKS, timeout=40, env=OVER[over])
    for rank in {0, 1, 3}:
        path = tmp_path / f"error{rank}"
        if not path.exists() and how == "raise":
            continue  # ended by the launcher before it could write: the cause is known
        seconds, kind, text = path.read_text().split(" ", 2)
        assert float(seconds) < TIMEOUT + 5
        assert kind == "PeerError" if how != "stop" else kind in ("StalledError", "PeerError")
        before = (rank - 1) % RANKS
        assert f"rank {rank} ({rank}F6" in text
        assert f"for a message from rank {before}" in text
        assert re.search(end, text), text
        assert re.search(r"Look at rank 2( \(process \d+ on \S+\))? first", text), text


def _mismatch() -> tuple[bool, list[float]]:
    """After an error the processes create a new group and continue."""
    group = init(timeout=20)
    assert isinstance(group, C10dGroup)
    rank, other = group.rank, 1 - group.rank
    first = adopt(dist.new_group(), timeout=10.0)  # type: ignore[arg-type]
    stalled = False
    try:
        first.recv(SPECS, other, rank).wait()  # no rank sends
    except GroupError as error:
        stalled = "longer than timeout=10" in str(error) or "connection broke" in str(error)
    first.close()
    group.barrier()
    second = adopt(dist.new_group(), timeout=20)  # type: ignore[arg-type]
    work = second.recv(SPECS, other, rank)
    second.send((torch.full((4,), float(rank)),), rank, other)
    found = work.wait()[0].tolist()
    second.flush()
    second.close()
    return stalled, found


@pytest.mark.parametrize("over", FIRST)
def test_after_an_error_a_new_group_goes_on(over: str):
    assert launch(_mismatch, ranks=2, timeout=60, env=OVER[over]) == [
        (True, [1.0] * 4),
        (True, [0.0] * 4),
    ]


def _absent() -> str:
    group = init(timeout=10.0)  # the processes meet within this time too
    if group.here == (1,):
        time.sleep(11)
        return ""
    try:
        group.barrier()
    except GroupError as error:
        return str(error)
    return "no error"


def test_who_has_not_come_is_named():
    text = launch(_absent, ranks=2, timeout=60)[0]
    assert "rank 0 waited 10." in text
    assert "to meet rank 1, longer than timeout=10." in text


# ---- launch ----
def _value(offset: int) -> tuple[int, str]:
    return offset + int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def _unpicklable() -> object:
    return lambda: 0


def _sleep() -> None:
    time.sleep(60)


def test_launch_brings_results_by_rank():
    assert launch(_value, 10, ranks=3) == [(10, "3"), (11, "3"), (12, "3")]


def test_launch_ends_what_is_late():
    begin = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"ranks \[0, 1\] did not finish within timeout=0.5 seconds"
    ):
        launch(_sleep, ranks=2, timeout=0.5)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: launch(_value, 1, ranks=0), "ranks=0; give a whole number"),
        (lambda: launch(lambda: 1, ranks=1), "cannot be sent to another process"),
        (
            lambda: launch(_unpicklable, ranks=1),
            "the result of rank 0 cannot be sent to another process",
        ),
        (
            lambda: launch(_value, 1, ranks=1, start="teleport"),
            "start='teleport'; this machine has",
        ),
    ],
)
def test_launch_says_what_is_wrong(call, message: str):
    with pytest.raises(LaunchError, match=message):
        call()
