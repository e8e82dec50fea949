"""Groups over torch.distributed, on real processes: the conformance suite, hostile backends, and
``fpipe.init``.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import faulty_backends
from carriers import OVER
from conformance import CASES, conform
from fpipe import launch
from fpipe.collectives.agreement import Reduced
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.group import Group
from fpipe.collectives.setup import adopt, init
from fpipe.errors import GroupError
from fpipe.products.command.doctor import command, probe, visit
from fpipe.tree import Spec

ROW = (Spec((4,), (1,), torch.float32),)


# ---- gloo ----
def _gloo() -> dict:
    group = init(timeout=30)
    assert isinstance(group, C10dGroup)
    found: dict = {
        "again": init(timeout=30) is group,
        "protocol": isinstance(group, Group),
        "repr": repr(group),
    }
    found["names"] = conform(group)
    found["held"], found["at_once"] = [], group.at_once
    found["memory"] = any(name.endswith(".mailboxes") for name in sys.modules)
    if group.at_once:
        return found
    if group.rank == 0:
        for number in range(6):
            group.send((torch.full((4,), float(number)),), 0, 1)
        found["held"].append(len(group._sent[1]))
        group.recv(ROW, 1, 0).wait()  # rank 1 reports four received messages
        group.settle(1, 4)
        found["held"].append(len(group._sent[1]))
        group.flush()
        found["held"].append(len(group._sent[1]))
    elif group.rank == 1:
        for _ in range(4):
            group.recv(ROW, 0, 1).wait()
        group.send((torch.zeros(4),), 1, 0)
        for _ in range(2):
            group.recv(ROW, 0, 1).wait()
        group.flush()
    return found


@pytest.mark.covering
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("over", OVER)
def test_gloo_conforms(ranks: int, over: str):
    for rank, found in enumerate(launch(_gloo, ranks=ranks, timeout=100, env=OVER[over])):
        assert found["at_once"] == (over != "gloo")
        assert found["memory"] == (over == "memory"), "it is imported only where it is used"
        assert found["names"] == [case.__name__ for case in CASES]
        assert found["again"]
        assert found["protocol"]
        assert found["repr"] == f"rank {rank} of {ranks} on cpu over gloo"
        if not found["at_once"]:
            assert found["held"] == ([6, 2, 0] if rank == 0 else [])


def test_a_reduction_that_completes_at_the_end_of_a_pause_is_not_late():
    """The time-out of ten milliseconds was taken for that of the group."""

    class Work:
        completed = False

        def is_completed(self) -> bool:
            return self.completed

        def wait(self, timeout: object = None) -> None:
            self.completed = True
            if timeout is not None:
                raise RuntimeError("Operation timed out!")

    pg = SimpleNamespace(allreduce=lambda *_: Work())
    compared = Reduced.announced(pg, 0, 7)  # type: ignore[arg-type]
    assert compared.equal() is None
    compared.pause()
    assert compared.equal()


# ---- hostile backends ----
def _hostile() -> dict[str, tuple[object, object, object]]:
    """profile -> (result of the raw call, result of the suite through fpipe, findings that
    contradict the table).
    """
    dist.init_process_group("gloo")
    faulty_backends.register()
    rank = dist.get_rank()
    found = {}
    for profile in faulty_backends.PROFILES:
        name = profile.__name__.lower()
        through = adopt(
            dist.new_group(backend=name),
            timeout=20,
            capabilities=faulty_backends.capabilities(profile),
        )  # type: ignore[arg-type]
        try:
            adapted: object = len(conform(through))
        except Exception as error:
            adapted = f"{error!r} {getattr(error, '__notes__', '')}"
        wrong = [finding for finding in probe(through) if not finding.right]
        seen = [(finding.what, finding.dtypes) for finding in wrong if finding.native]
        missed = faulty_backends.FOUND.get(profile)
        if missed is not None and missed not in [finding.what for finding in wrong]:
            seen.append((missed, "not found"))
        through.close()
        raw = dist.new_group(backend=name)  # of its own: some never recover
        try:
            found[name] = faulty_backends.RAW[profile](raw, rank), adapted, seen  # type: ignore[arg-type]
        except RuntimeError as error:
            found[name] = str(error), adapted, seen
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def hostilities() -> list[dict[str, tuple[object, object, object]]]:
    return launch(_hostile, ranks=2, timeout=100)


@pytest.mark.xdist_group("c10d")
@pytest.mark.parametrize(
    "profile", [profile.__name__.lower() for profile in faulty_backends.PROFILES]
)
def test_hostile_backends_are_right_through_fpipe_and_wrong_without(hostilities, profile: str):
    raw = [found[profile][0] for found in hostilities]
    adapted = [found[profile][1] for found in hostilities]
    assert adapted == [len(CASES)] * 2
    assert [found[profile][2] for found in hostilities] == [[]] * 2, (
        "the doctor sees otherwise than the table says"
    )
    assert raw != [True, True], "the profile does no harm, so that the adaptor shows nothing"


def test_raw_calls_are_right_on_gloo():
    """Otherwise the test above could attribute a wrong raw call to a profile."""
    assert launch(_raw_on_gloo, ranks=2, timeout=60) == [[True] * len(faulty_backends.RAW)] * 2


def _raw_on_gloo() -> list[bool]:
    dist.init_process_group("gloo")
    return [call(dist.group.WORLD, dist.get_rank()) for call in faulty_backends.RAW.values()]


# ---- init ----
def _mesh() -> tuple:
    group = init(dp=2)
    assert isinstance(group, C10dGroup)
    world = dist.get_rank()
    total = group.dp.all_reduce(torch.tensor(float(world)), "mean").item()  # type: ignore[attr-defined]
    return group.rank, group.size, group.dp.rank, total, group.gather_objects(world)  # type: ignore[attr-defined]


def test_a_mesh_of_pipelines():
    found = launch(_mesh, ranks=4, timeout=100)
    assert [each[:3] for each in found] == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]
    assert [each[3] for each in found] == [0.5, 0.5, 2.5, 2.5]
    assert [each[4] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _over_ones_own() -> tuple:
    dist.init_process_group("gloo")
    group = init()
    errors = []
    for arguments in ({"pp": 3}, {"dp": 3}, {"pp": 2, "dp": 2}):
        try:
            init(**arguments)
        except GroupError as error:
            errors.append(str(error))
    return group.size, errors


def test_a_process_group_of_ones_own_is_used():
    size, errors = launch(_over_ones_own, ranks=2, timeout=60)[0]
    assert size == 2
    assert (
        errors[0]
        == "pp=3 x dp=1 is not the 2 processes that were started; start 3, or leave pp out"
    )
    assert errors[1].startswith("pp=(the rest) x dp=3 is not the 2")
    assert errors[2].startswith("pp=2 x dp=2 is not the 2")


def test_one_process_holds_all_ranks(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert init().size == 1
    assert init(pp=4, device="cpu").here == (0, 1, 2, 3)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 2}, "dp=2 needs 2 processes and there is one; start them with torchrun"),
        ({"pp": 0}, "pp=0; give a whole number"),
        ({"dp": 1.5}, "dp=1.5; give a whole number"),
        ({"timeout": 0}, "timeout=0; give the seconds"),
    ],
)
def test_init_says_what_is_wrong(arguments: dict, message: str):
    with pytest.raises(GroupError, match=message):
        init(**arguments)


def _over_a_fake() -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pytest.raises(GroupError) as refused:
        init()
    return str(refused.value)


def test_a_backend_that_sends_nothing_is_refused():
    assert launch(_over_a_fake, ranks=1, timeout=60)[0] == (
        "fpipe does not know what backend 'fake' does with tensors of cpu, and torch's 'fake' "
        "sends nothing; leave backend= out, or state what it does: fpipe.adopt(..., capabilities=)"
    )


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("RANK", "", "must be a number from 0 to 1"),
        ("RANK", "x", "must be a number from 0 to 1"),
        ("RANK", "2", "must be a number from 0 to 1"),
        ("RANK", "-1", "must be a number from 0 to 1"),
        ("WORLD_SIZE", "0", "must be a number from 1"),
        ("WORLD_SIZE", "two", "must be a number from 1"),
        ("LOCAL_RANK", "1.5", "must be a number from 0"),
        ("MASTER_PORT", "65536", "must be a number from 0 to 65535"),
        ("MASTER_ADDR", "", "is not set; give the host of rank 0"),
    ],
)
def test_variables_of_a_launcher(name: str, text: str, rule: str, monkeypatch: pytest.MonkeyPatch):
    """Refused before anything is connected: with rank -1, torch ends the process."""
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    for key, value in ({"MASTER_ADDR": "localhost"} | job | {name: text}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(GroupError, match=rf"{name} .*{rule}"):
        init(device="cpu")
    assert os.environ[name] == text


@pytest.mark.filterwarnings("ignore:Device capability of nosuch")
def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch):
    job = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "1"}
    for key, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **job}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(GroupError, match=r"could not meet .*nosuch.* check RANK, WORLD_SIZE"):
        init(device="cpu", backend="nosuch")


# ---- the doctor ----
def test_the_doctor_knows_gloo():
    reports = launch(visit, ranks=2, timeout=60)
    assert reports[0] == reports[1]
    text, faults = reports[0]
    assert "device    cpu (CPU)" in text
    assert "avg       integers, bools: refused" in text
    assert "fpipe refuses it with an error" in text
    assert "NOT IN THE TABLE" not in text
    assert not faults
    assert command.name == "doctor"
