"""Another user of the machine, and forged files: nothing of theirs is executed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import attacker
import fpipe
from fpipe.products.command.cli import main as command


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that every attack tries to create, in a folder in which everybody may."""
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o777)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    return tmp_path / "open" / "canary"


def _attacked(canary: Path) -> str:
    """In a rank: gather, let the attacker in, gather again."""
    group = fpipe.init(timeout=15)
    group.gather_objects(rank := group.here[0])
    done = canary.with_name("done")
    pids = group.gather_objects(os.getpid())
    if rank == 0:
        script = [
            sys.executable,
            attacker.__file__,
            os.environ["MASTER_PORT"],
            str(canary),
            *map(str, pids),
        ]
        ran = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
        done.with_name("report").write_text(ran.stdout + ran.stderr, encoding="utf-8")
        done.touch()
    else:
        while not done.exists():
            time.sleep(0.05)
        time.sleep(1)  # rank 0 reads what the attacker wrote for this rank
    try:
        return str(group.gather_objects(rank))
    except fpipe.FpipeError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.xdist_group("security")
def test_another_user_runs_nothing_in_a_job(canary: Path):
    """Ranks unpickled what they found in the store: any user of the machine could run code as the
    owner of the job.
    """
    outcomes = fpipe.launch(_attacked, canary, ranks=2, timeout=100)
    report = canary.with_name("report").read_text(encoding="utf-8")
    assert not canary.exists()
    assert "not data" in outcomes[0], outcomes
    assert outcomes[1] == "[0, 1]" or outcomes[1].split(":")[0] in (
        "PeerError",
        "GroupError",
        "StalledError",
    ), outcomes
    assert not report.strip(), report


# ---- files ----
def forged(canary: Path) -> dict[str, bytes]:
    run = f'__import__("os").system("touch {canary}")'
    return {
        "a pickle": pickle.dumps(attacker.Attack(str(canary))),
        "python": run.encode(),
        "a formula": f"=cmd|'/bin/sh -c touch {canary}'!A0,0F0".encode(),
        "a template": f"${{{{{run}}}}},0F0".encode(),
        "deep": b'{"saved":' + b"[" * 100_000,
    }


@pytest.mark.parametrize("what", forged(Path("x")))
@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_forged_files_run_nothing(tmp_path: Path, what: str, suffix: str):
    canary, file = tmp_path / "canary", tmp_path / f"plan{suffix}"
    file.write_bytes(forged(canary)[what])
    page = tmp_path / "page.html"
    for read in (
        lambda: fpipe.Schedule.from_csv(file).check().simulate(),
        lambda: fpipe.Costs.from_json(file.read_text(encoding="utf-8", errors="replace")),
    ):
        try:
            read()
        except fpipe.FpipeError:
            continue
    assert command(["check", str(file)]) in (1, 2)
    command(["draw", str(file), "--out", str(page)])
    assert not canary.exists()
    if page.exists():
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text and "<img src=x" not in text


def test_a_forged_schedule_of_a_pipeline_runs_nothing(tmp_path: Path):
    canary, file = tmp_path / "canary", tmp_path / "plan.csv"
    file.write_bytes(forged(canary)["python"])
    with pytest.raises(fpipe.errors.ScheduleError):
        fpipe.pipeline([lambda p, x: x * p] * 2, str(file), group=fpipe.local(2))(
            [torch.ones(())] * 2, torch.ones(2)
        )
    assert not canary.exists()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of any size was read into memory, and /dev/zero without an end."""
    with pytest.raises(
        fpipe.errors.ScheduleError, match="'/dev/zero': it has more than 67108864 bytes"
    ):
        fpipe.Schedule.from_csv("/dev/zero")
    (tmp_path / "costs.json").symlink_to("/dev/zero")
    assert command(["draw", "ZBV", "--costs", str(tmp_path / "costs.json")]) == 2


@pytest.mark.parametrize("name", ["zbv.svg", "zbv.json"])
def test_out_does_not_follow_a_symbolic_link(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    victim, link = tmp_path / "victim", tmp_path / name
    victim.write_text("precious")
    link.symlink_to(victim)
    assert command(["draw", "ZBV", "--ranks", "2", "--microbatches", "2", "--out", str(link)]) != 0
    assert "symbolic link" in capsys.readouterr().err
    assert victim.read_text() == "precious"
    link.unlink()
    link.write_text("old")
    link.chmod(0o640)
    assert command(["draw", "ZBV", "--ranks", "2", "--microbatches", "2", "--out", str(link)]) == 0
    assert link.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim", name]


@pytest.mark.parametrize("target", ["pipe", "redirected", "device", "file"])
def test_out_may_be_a_stream_of_the_process(tmp_path: Path, target: str):
    """/dev/stdout is a symbolic link; it was refused as one to a file."""
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("before\n")
    link.symlink_to({"device": "/dev/null", "file": file}.get(target, "/dev/stdout"))
    code = (
        "import sys; from fpipe.actions.text_files import write_bytes; write_bytes(sys.argv[1], "
        "b'text')"
    )
    path = "/dev/stdout" if target == "redirected" else str(link)
    with file.open("ab") if target == "redirected" else nullcontext(subprocess.PIPE) as stdout:
        ran = subprocess.run(
            [sys.executable, "-c", code, path], stdout=stdout, stderr=subprocess.PIPE, timeout=60
        )
    assert ran.stdout == {"pipe": b"text", "redirected": None}.get(target, b"")
    assert (b"symbolic link" in ran.stderr) == (target == "file")
    assert file.read_text() == ("before\ntext" if target == "redirected" else "before\n")
