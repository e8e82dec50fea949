"""The search for the rank that stopped the others, over journals in one process."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from fpipe.collectives import faults, journal, trail
from fpipe.collectives.bounded import BoundedStore, StoreLostError
from fpipe.collectives.codec import encode
from fpipe.collectives.faults import FaultMonitor
from fpipe.collectives.rendezvous import TRACING, Rendezvous
from fpipe.errors import StalledError

WAIT = 1.0
LATE = 2.25  #: seconds of a slow trace


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch):
    """Half of the times of a search."""
    monkeypatch.setattr(faults, "host", lambda: ("the launcher", None))
    beats = [(module, "BEAT") for module in (journal, trail, faults)]
    for module, name in (*beats, (faults, "_BUDGET")):
        monkeypatch.setattr(module, name, getattr(module, name) / 2)


@contextmanager
def journals(ranks: int) -> Iterator[tuple[BoundedStore, list[journal.Journal]]]:
    store = BoundedStore(dist.HashStore(), 5.0)
    found = [journal.Journal(store, rank) for rank in range(ranks)]
    for each in found:
        each.write()
    try:
        yield store, found
    finally:
        for each in found:
            each.close()


def monitor(
    store: BoundedStore, journals: list[journal.Journal], rank: int, names: list[int]
) -> FaultMonitor:
    return FaultMonitor(store, names.index(rank), names, WAIT, journals[rank])


def test_the_search_goes_from_one_group_to_another():
    """Rank 0 waits in its pipeline for rank 1, which waits for a copy on rank 3: the fault of one
    group stopped all.
    """
    with journals(4) as (store, (first, second, third, fourth)):
        second.note("1B0")
        second.peers = (3,)
        second.write()
        fourth.note("1F2")
        fourth.close()  # it stops
        fourth.write()
        error = monitor(store, [first, second, third, fourth], 0, [0, 1]).diagnose(
            RuntimeError("timed out"), 1, "for"
        )
    assert (
        "Rank 1 (1B0) waits for rank 3; rank 3 does not answer, and its last known action was 1F2"
        in str(error)
    )
    assert "Look at rank 3 (process" in str(error)


def test_of_ranks_that_wait_for_all_the_one_that_does_not_wait_is_named():
    """A sum over all ranks, of which rank 2 computes: its time-out named another rank that
    waited.
    """
    with journals(3) as (store, found):
        for each in found[:2]:
            each.peers = tuple({0, 1, 2} - {found.index(each)})
            each.write()
        error = monitor(store, found, 0, [0, 1, 2]).diagnose(
            RuntimeError("timed out"), None, "for the sum with"
        )
    assert "Rank 2 waits for no rank" in str(error)
    assert "Look at rank 2" in str(error)


def test_a_rank_that_waits_in_another_library_is_not_the_culprit():
    """Rank 2 is stopped, and rank 1 waits for it in a collective of its own program: it waits for
    no rank of fpipe, and was named.
    """
    with journals(3) as (store, found):
        found[1].note("1B3")
        found[1].write()
        found[2].close()  # it stops
        error = monitor(store, found, 0, [0, 1, 2]).diagnose(RuntimeError("timed out"), 1, "for")
    assert "Look at rank 2" in str(error)


@pytest.mark.parametrize("cause", ["death", "error"])
def test_an_error_of_a_backend_in_code_of_the_user_has_its_cause_elsewhere(
    cause: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Rank 2 dies, and a collective of another library raises on rank 1, which ends: rank 0 named
    rank 1, which itself had nothing but the error of gloo.
    """
    with journals(3) as (store, found):
        monkeypatch.setattr(faults, "_MONITORS", {})
        monitors = [monitor(store, found, rank, [0, 1, 2]) for rank in range(3)]
        faults._MONITORS[""] = monitors[2]
        if cause == "error":
            faults.uncaught(lambda *_: None, ValueError, ValueError("boo"), None)
        found[2].close()
        faults._MONITORS[""] = monitors[1]
        for _ in range(2):  # the second time nothing is new
            sys.excepthook(RuntimeError, RuntimeError("[gloo/tcp] Connection closed by peer"), None)
        found[1].close()
        error = monitors[0].diagnose(RuntimeError("its process has ended"), 1, "for")
    said = "raised ValueError: boo" if cause == "error" else "does not answer"
    assert f"Rank 1 lost rank 2; rank 2 {said}" in str(error)
    assert "Look at rank 2" in str(error)
    printed = capfd.readouterr().err
    assert printed.count("rank 1 waited in another library for all ranks") == 1
    assert printed.count("Look at rank 2") == 1
    assert "Connection closed by peer" in printed, "the hook before is called"


def test_a_rank_whose_report_is_late_is_not_the_culprit():
    """Rank 1 raised; rank 0 closed its connections, and was too busy to write why."""
    with journals(3) as (store, found):
        found[0].write()
        monitor(store, found, 1, [0, 1, 2]).failed(ValueError("boo"))
        error = monitor(store, found, 2, [0, 1, 2]).diagnose(
            RuntimeError("Connection closed by peer"), 0, "to meet"
        )
    assert "Rank 1 raised ValueError: boo. Look at rank 1 " in str(error)


def test_a_failure_that_another_rank_concluded_is_known_without_the_store():
    """Rank 0 hosts the store and ends after its error; the others blamed rank 0."""
    with journals(3) as (store, found):
        found[0].conclude(2, "rank 2 raised ValueError: boo")
        while found[1].concluded is None:  # its thread reads it within a second
            time.sleep(0.05)
        found[1]._gone = True
        error = monitor(store, found, 1, [0, 1, 2]).diagnose(
            RuntimeError("connection reset"), 0, "for"
        )
    assert "Rank 2 raised ValueError: boo. Look at rank 2 first" in str(error)


@pytest.mark.long
def test_a_search_that_has_no_time_left_does_not_say_that_there_is_no_journal():
    """A busy store answered late, and the error said that a rank had no entry, which it had."""
    with journals(2) as (_, found):
        mine, other = found
        other.note("3F1")
        other.write()
        assert "3F1" in trail.search(mine, 0, (1,), True, (1,)).text
        mine.hurry(0.0)
        assert trail.search(mine, 0, (1,), False, (1,)).text == "" and mine.lost
        mine.hurry()
        assert "3F1" in trail.search(mine, 0, (1,), True, (1,)).text and not mine.lost


def test_the_rank_that_does_not_connect_is_named():
    """A rank that stopped after the roll call: the others named the host of the store."""
    with journals(3) as (store, found):
        owner = monitor(store, found, 0, [0, 1, 2])
        found[2].close()  # it stops
        with (
            pytest.raises(StalledError, match=r"to connect to all ranks, .*Look at rank 2"),
            owner.connecting(),
        ):
            raise dist.DistStoreError("wait timeout after 3000ms")


def test_a_rank_that_cannot_connect_reports_why():
    """The others waited for their time-out."""
    with journals(2) as (store, found):
        with (
            pytest.raises(ValueError, match="backend"),
            monitor(store, found, 0, [0, 1]).connecting(),
        ):
            raise ValueError("no such backend")
        error = monitor(store, found, 1, [0, 1]).diagnose(
            RuntimeError("timed out"), None, "to connect to"
        )
    assert "Rank 0 raised ValueError: no such backend" in str(error)


def test_a_store_that_is_lost_during_the_search_does_not_hide_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
):
    """Rank 0 hosts the store, waited for rank 2, and ended with its error while rank 1 read the
    journals.
    """
    monkeypatch.setattr(faults, "host", lambda: ("rank 0", 0))
    with journals(3) as (store, found):
        found[0].peers = (2,)
        found[0].write()

        def last(rank: int) -> journal.Entry | None:
            found[1]._gone = rank == 2
            return None if rank == 2 else found[0].last(0)

        monkeypatch.setattr(found[1], "last", last)
        text = str(
            monitor(store, found, 1, [0, 1, 2]).diagnose(RuntimeError("timed out"), 0, "for")
        )
    assert "Rank 0 waits for rank 2; the store of the job does not answer" in text
    assert "Look at rank 2 first" in text


@pytest.mark.parametrize(
    ("error", "peer", "first"),
    [
        (RuntimeError("connection reset"), 1, "Look at rank 1 and at the launcher first"),
        (RuntimeError("connection reset"), None, "Look at the launcher first"),
        (StoreLostError("timed out"), 1, "Look at the launcher first"),
    ],
)
def test_without_the_store_its_host_is_named(error: RuntimeError, peer: int | None, first: str):
    """Any rank was named first where the launcher was killed, and was said to have no journal
    entry.
    """
    with journals(3) as (store, found):
        found[0]._gone = True
        text = str(monitor(store, found, 0, [0, 1, 2]).diagnose(error, peer, "for"))
    assert first in text
    assert "no journal entry" not in text


def test_a_wait_inside_a_stage_that_the_backend_does_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """``wait_tensor`` has no time-out of its own: the journal ends the process with the error."""
    ended: list[Exception] = []
    monkeypatch.setattr(faults, "give_up", ended.append)
    monkeypatch.setattr(faults, "GRACE", 0.2)
    monkeypatch.setattr(faults, "members", lambda name: [0, 1])
    with journals(2) as (store, found):
        owner = monitor(store, found, 0, [0, 1])
        monkeypatch.setattr(faults, "_MONITORS", {"tp": owner})
        with faults.watched("tp")():
            for _ in range(45):
                time.sleep(0 if ended else 0.1)
    assert isinstance(ended[0], StalledError)
    assert "in a collective of a stage with rank 1" in str(ended[0])


def test_errors_of_a_stage_itself_are_not_those_of_its_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(faults, "members", lambda name: [0, 1])
    with journals(2) as (store, found):
        owner = monitor(store, found, 0, [0, 1])
        monkeypatch.setattr(faults, "_MONITORS", {"tp": owner})
        with pytest.raises(RuntimeError, match="shapes"), faults.watched("tp")():
            raise RuntimeError("shapes do not fit")
    assert owner.broken is None


@pytest.mark.parametrize(
    ("note", "computes"),
    [(f"{TRACING} stage 1", True), (f"{TRACING} stage 1", False), ("1F0", True)],
)
def test_a_slow_first_trace_is_waited_for(
    note: str, computes: bool, monkeypatch: pytest.MonkeyPatch
):
    """It looked like a stall: the action of the rank that traces says so, and its process computes.

    One that slept in its trace was waited for as well. Both ranks are in this process, so that its
    seconds of processor are those of a clock that runs or stands still.
    """
    monkeypatch.setattr(
        journal, "seconds_of_processor", time.monotonic if computes else lambda: 1.0
    )
    with journals(2) as (store, found):
        meetings = [
            Rendezvous(store, monitor(store, found, rank, [0, 1]), lambda: None, count().__next__)
            for rank in range(2)
        ]
        found[1].note(note)

        def late() -> object:
            time.sleep(LATE)
            return meetings[1].gather("b")

        with ThreadPoolExecutor() as pool:
            second = pool.submit(late)
            if note.startswith(TRACING) and computes:
                assert meetings[0].gather("a") == ["a", "b"]
                assert second.result(30) == ["a", "b"]
            else:
                with pytest.raises(StalledError, match=r"Look at rank 1"):
                    meetings[0].gather("a")
                second.result(30)


def test_a_process_that_computes_uses_a_processor_and_one_that_sleeps_does_not():
    before = journal.seconds_of_processor()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        sum(range(10_000))
    after = journal.seconds_of_processor()
    assert after - before > 0.05
    time.sleep(0.3)
    assert journal.seconds_of_processor() - after < 0.2


def test_a_wall_clock_that_steps_back_silences_no_journal(monkeypatch: pytest.MonkeyPatch):
    """A journal that compared times of the wall clock wrote nothing for an hour: its rank, which
    was tracing, counted as dead.
    """
    wall = time.time
    with journals(1) as (_, (own,)):
        first = second = own.last(0)
        assert first is not None
        monkeypatch.setattr(time, "time", lambda: wall() - 3600)
        end = time.monotonic() + 20 * journal.BEAT  # a busy machine is late
        while second is not None and second.beat == first.beat and time.monotonic() < end:
            time.sleep(0.8 * journal.BEAT)
            second = own.last(0)
        assert second is not None
        assert second.beat > first.beat
        assert first.age < second.age < 60


def test_only_clocks_that_do_not_step_measure_pauses():
    """The wall clock is read for the day of a report, and for nothing else."""
    package = Path(journal.__file__).parents[1]
    read = [
        path.name
        for path in package.rglob("*.py")
        if re.search(
            r"\btime\.time\b|from time import .*\btime\b|\bdatetime\.(now|today)", path.read_text()
        )
    ]
    assert not read


def test_late_ranks_of_a_meeting_share_one_time_out():
    """Each had a time-out from when the one before had come: of many ranks that are late or
    stopped, the last one was noticed after many time-outs.
    """
    with journals(3) as (store, found):
        owner = monitor(store, found, 0, [0, 1, 2])
        meeting = Rendezvous(store, owner, lambda: None, count().__next__)

        def late(rank: int) -> None:
            time.sleep(0.8 * rank * WAIT)
            store.set(f"round/0/{rank}", encode("b"))

        for rank in (1, 2):
            Thread(target=late, args=(rank,)).start()
        with pytest.raises(StalledError, match=r"waited 1\.\d s to meet rank 2, .*Look at rank 2"):
            meeting.gather("a")
