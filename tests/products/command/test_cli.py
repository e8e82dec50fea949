"""The command line: what it prints, what it refuses and how, and that it starts at once."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from fpipe.actions import Per, Track, number
from fpipe.actions.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.generators import make_schedule, schedule_names
from fpipe.products.command import cli, options
from fpipe.products.pictures.labels import percent, size_text
from fpipe.products.search import comparison
from fpipe.schedule import Schedule
from sample import also

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def shell(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fpipe", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def printed(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    """Standard output of a command that ends with ``status``."""
    assert cli.main(args) == status
    out, err = capsys.readouterr()
    assert bool(err) == bool(status)
    return out


# ---- starting ----
def test_draw_starts_without_torch_or_numpy():
    code = (
        "import sys; from fpipe.products.command.cli import main;"
        "status = main(['draw', 'ZBV', '--ranks', '4', '--microbatches', '8']);"
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib', 'PIL', 'optree'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else status)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert "ZBVZeroBubble: 4 ranks, 8 microbatches" in run.stdout


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("draw ZBV", 0),
        ("compare", 0),
        ("names", 0),
        ("plan -h", 0),
        ("rehearse plan.toml", 2),
        ("train --steps 1", 2),
        ("doctor", 2),
    ],
)
def test_without_torch(line: str, status: int):
    """Schedules need no torch; other commands name what is missing."""
    code = (
        "import sys; sys.modules['torch'] = None; from fpipe.products.command.cli import main; "
        f"sys.exit(main({line.split()}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == status, run.stderr
    assert (
        "this command needs torch, which is not installed: pip install torch" in run.stderr
    ) == bool(status)
    assert "bug" not in run.stderr


def test_python_m_fpipe_ends_with_the_status():
    run = shell("check", "nowhere.csv")
    assert run.returncode == 2
    assert run.stderr.startswith("error: there is no file 'nowhere.csv'")


def test_a_reader_that_leaves_early_sees_no_traceback():
    command = f"{sys.executable} -m fpipe draw 1F1B -p 16 -m 200 --width 60 | head -1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("1F1B: 16 ranks, 200 microbatches\n", "")


def test_help_lists_every_command_and_loads_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(cli.COMMANDS, "fly", ("no_such_module_of_ours:fly", "take off"))
    out = printed(capsys, "--help")
    for name in ("draw", "check", "names", "compare"):
        assert re.search(rf"^  {name} +\w", out, re.M)
        assert "Usage: fpipe " + name in printed(capsys, name, "--help")
    assert re.search("^  fly +take off", out, re.M)
    assert out == printed(capsys)


def test_commands_of_other_modules_are_loaded_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "another_module.py").write_text(
        "import click\n\n"
        "@click.command()\n@click.argument('n', type=int)\n"
        "def land(n):\n    click.echo(n + 1)\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "land", ("another_module:land", "come down"))
    assert cli.main(["land", "41"]) == 1
    assert capsys.readouterr().out == "42\n"


def test_version(capsys: pytest.CaptureFixture[str]):
    assert re.fullmatch(r"fpipe \d+\.\d+.*\n", printed(capsys, "--version"))


# ---- drawing ----
def test_draw_by_name_and_from_a_file_are_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    named = printed(
        capsys, "draw", "dualpipev", "--ranks", "2", "--microbatches", "4", "--width", "90"
    )
    s = make_schedule("DualPipeV", 2, 4)
    s.to_csv("DualPipeV.csv")
    Path("DualPipeV.txt").write_text(str(s))
    assert printed(capsys, "draw", "DualPipeV.csv", "--width", "90") == named
    assert (
        printed(capsys, "draw", "DualPipeV.txt", "--ranks", "2", "--stages", "4", "--width", "90")
        == named
    )
    assert "\x1b" not in named
    assert "\x1b[38;2;" in printed(capsys, "draw", "DualPipeV.csv", "--color")


@pytest.mark.parametrize("ending", ["svg", "png", "pdf", "html", "json", "txt"])
def test_draw_writes_files(ending: str, capsys: pytest.CaptureFixture[str]):
    out = printed(
        capsys, "draw", "ZBV", "-p", "2", "-m", "3", "--out", f"a.{ending}", "--out", f"b.{ending}"
    )
    assert re.fullmatch(
        rf"wrote a\.{ending} \([\d.]+ (KiB|B)\)\nwrote b\.{ending} \([\d.]+ (KiB|B)\)\n", out
    )
    assert Path(f"a.{ending}").read_bytes() == Path(f"b.{ending}").read_bytes() != b""


def test_draw_prices_several_schedules_by_a_ranks_share(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, "draw", "1F1B", "ZBV", "-p", "4", "-m", "8", "--width", "200")
    assert "total 33, bubble 27.3%" in out
    assert "total 25.5, bubble 0%" in out


def test_a_schedule_has_the_same_figures_alone_and_compared(capsys: pytest.CaptureFixture[str]):
    """`fpipe draw ZBV` said total 51, peak 8, where `fpipe compare` said 25.5 and 4."""
    found = json.loads(printed(capsys, "compare", "-p", "4", "-m", "8", "--only", "ZBV", "--json"))[
        "schedules"
    ][0]
    assert (found["total"], found["span"], found["memory"]) == (25.5, 24, 4)
    alone = printed(capsys, "draw", "ZBV", "-p", "4", "-m", "8")
    assert "total 25.5, bubble 0%, peak 4 microbatches" in alone
    make_schedule("ZBV", 4, 8).to_csv("plan.csv")
    printed(capsys, "draw", "plan.csv", "-o", "plan.txt")
    assert "total 25.5, bubble 0%, peak 4 microbatches" in Path("plan.txt").read_text()
    assert "total 51, bubble 0%" in printed(
        capsys, "draw", "ZBV", "-p", "4", "-m", "8", "--per", "stage"
    )
    by_stage = "F=" + ":".join("1" * 8)
    assert "total 51, bubble 0%" in printed(
        capsys, "draw", "ZBV", "-p", "4", "-m", "8", "--costs", by_stage
    )


def test_costs_may_be_a_file(capsys: pytest.CaptureFixture[str]):
    Path("costs.json").write_text(Costs(F=2, I=2, W=2).to_json())
    assert "total 66" in printed(capsys, "draw", "1F1B", "--costs", "costs.json")


def test_forwards_alone_can_be_drawn(capsys: pytest.CaptureFixture[str]):
    Path("f.csv").write_text("0F0,0F1\n1F0,1F1\n")
    assert "total 3" in printed(capsys, "draw", "f.csv")


# ---- checking ----
def test_check_tells_counts(capsys: pytest.CaptureFixture[str]):
    Path("good.csv").write_text(GOOD)
    assert (
        printed(capsys, "check", "good.csv")
        == "good.csv: good: 2 ranks, 2 stages, 2 microbatches, 8 actions\n"
    )


def test_check_goes_on_after_a_bad_file(capsys: pytest.CaptureFixture[str]):
    Path("bad.csv").write_text(GOOD.replace("0B1", "0B0"))
    Path("good.csv").write_text(GOOD)
    assert cli.main(["check", "bad.csv", "good.csv"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("good.csv: good")
    assert err.startswith("error: bad.csv: rank 0, position 3")


def noise(kind: str) -> bytes:
    rng = random.Random(7)
    if kind == "bytes":
        return rng.randbytes(10_000_000)
    return "".join(rng.choices("0123456789FBIW,;()x\n", k=10_000_000)).encode()


@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_ten_megabytes_of_noise_are_one_short_error(kind: str, capsys: pytest.CaptureFixture[str]):
    Path("noise.csv").write_bytes(noise(kind))
    assert cli.main(["check", "noise.csv"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: noise.csv")
    assert len(err) < 2000
    assert err.replace("\n", "").isprintable()


# ---- refusing ----
REFUSED = [
    ("draw ZBV --ranks 0", 2, "0 is not in the range x>=1"),
    ("draw ZBV --microbatches -3", 2, "-3 is not in the range x>=1"),
    ("draw ZBV --ranks four", 2, "'four' is not a valid whole number"),
    ("draw ZBV -p 100000 -m 100000", 2, "Give fewer ranks or microbatches"),
    ("draw ZVB", 2, "no schedule is called 'ZVB'; did you mean ZBV"),
    ("draw 1f2b", 2, "did you mean 1F1B"),
    ("draw ZBV --stages 5", 2, "takes 8 stages"),
    ("draw ZBV --difference", 2, "needs two schedules"),
    ("draw ZBV --style paper -o a.svg -o b.html", 2, "and .pdf; leave it out for b.html"),
    ("compare --style paper --out c.HTML", 2, "--style paper is for .svg, .png and .pdf; leave"),
    ("draw ZBV --costs F=nan", 2, "number from 0 up"),
    ("draw ZBV --costs G=1", 2, "the names are F, I, W"),
    ("draw ZBV --costs F=1:2", 2, "there are 8 stages"),
    ("draw ZBV --costs nowhere.json", 2, "nowhere.json: No such file"),
    ("draw ZBV 1F1B --costs F=1:1:1:1", 2, "give one number"),
    ("draw ZBV --out a.gif", 2, "ends in .svg, .png"),
    ("draw ZBV --out nowhere/a.svg", 2, "cannot write 'nowhere/a.svg': No such file or directory"),
    ("draw ZBV --rank 4", 2, "--ranks"),
    ("draw nowhere.csv", 2, "there is no file 'nowhere.csv'"),
    ("draw good.csv --ranks 8", 2, "is a schedule of 2 ranks, not 8; leave out --ranks"),
    ("draw good.csv -m 3", 2, "is a schedule of 2 microbatches, not 3"),
    ("draw bad.csv", 1, "position 3"),
    ("draw", 2, "SCHEDULE"),
    ("names Q*", 2, "no schedule is called 'Q*'"),
    (
        "compare --only DualPipe -p 3",
        2,
        "no schedule fits these counts: DualPipe (an even number of ranks, not 3)",
    ),
    ("check good.csv --ranks 3", 1, "the schedule has 2 ranks, not 3"),
    ("check junk.csv", 1, "found 'junk'"),
    ("check hole.csv", 1, "no rank holds stage 1"),
    ("check empty.csv", 1, "at least one rank"),
    ("check forwards.csv", 1, "0B0 (or 0I0 and 0W0) is missing"),
    ("check .", 2, "there is no file"),
    ("compare -p 0", 2, "0 is not in the range x>=1"),
    ("compare --costs F=1:2", 2, "(a multiple of 4 stages on 4 ranks, not 2)"),
    ("compare --memory 60GB", 2, "'60GB' is in bytes, but saved=1.0 counts microbatches"),
    ("solve --memory 60GB", 2, "give costs with saved in bytes, as fpipe.measure_costs does"),
    ("solve --memory lots", 2, "memory='lots' is no limit"),
    ("darw ZBV", 2, "there is no command 'darw'; did you mean draw?"),
    ("ZBV", 2, "fpipe draw ZBV"),
    ("xyzzy", 2, "the commands are draw, check, names, compare, solve, plan"),
]


@pytest.mark.parametrize(("line", "status", "words"), REFUSED, ids=[line for line, _, _ in REFUSED])
def test_refusals_are_one_error(
    line: str, status: int, words: str, capsys: pytest.CaptureFixture[str]
):
    files = {
        "good.csv": GOOD,
        "bad.csv": GOOD.replace("0B1", "0B0"),
        "junk.csv": GOOD.replace("0F1", "0F1junk"),
        "hole.csv": GOOD.replace("1F", "2F").replace("1B", "2B"),
        "empty.csv": "",
        "forwards.csv": "0F0,0F1\n1F0,1F1\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    assert cli.main(line.split()) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("error:") == 1
    assert words in err
    assert "Traceback" not in err


def test_a_bug_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken() -> tuple[str, ...]:
        raise RuntimeError("gears\x1b[31m jammed")

    monkeypatch.delenv("FPIPE_TRACEBACK", raising=False)
    monkeypatch.setattr(options, "schedule_names", broken)
    assert cli.main(["names"]) == 70
    assert "bug in fpipe: RuntimeError: gears\\x1b[31m jammed" in capsys.readouterr().err
    monkeypatch.setenv("FPIPE_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        cli.main(["names"])


def test_an_interrupt_ends_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def stop() -> tuple[str, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "schedule_names", stop)
    assert cli.main(["names"]) == 130
    assert capsys.readouterr().err.strip() == "error: interrupted"


# ---- names and the table ----
def test_names_begin_a_line_each(capsys: pytest.CaptureFixture[str]):
    start, head, *groups = printed(capsys, "names").split("\n\n")
    assert start.startswith("start with ZBV, short for ZBVZeroBubble; "), "it was the last line"
    assert head.split()[:2] == ["schedule", "stages"]
    one, two, on_two_ranks = (group.splitlines()[1:] for group in groups)
    lines = {line.split()[0]: line for line in one + two + on_two_ranks}
    assert sorted(lines) == sorted(schedule_names())
    assert len(lines) == len(one + two + on_two_ranks), "a schedule had up to four lines"
    assert lines["ZBVZeroBubble"].split()[:2] == ["ZBVZeroBubble", "2"]
    assert all(len(line.split()) > 3 and "`" not in line for line in lines.values())
    assert one[0].split()[0] == "GPipe" and len(on_two_ranks) == 2
    assert {line.split()[0] for line in two} >= {"ZBVZeroBubble", "DualPipeV", "SeqZBH1"}


def test_names_are_filtered_and_printed_as_json(capsys: pytest.CaptureFixture[str]):
    found = json.loads(printed(capsys, "names", "dualpipe*", "ZBV", "--json"))
    assert [row["name"] for row in found] == ["ZBVZeroBubble", "DualPipeV", "DualPipe"]
    assert found[0]["about"] == "Zero bubble on a V, for the memory of 1F1B."


def test_check_prints_json(capsys: pytest.CaptureFixture[str]):
    Path("good.csv").write_text(GOOD)
    Path("bad.csv").write_text(GOOD.replace("0B1", "0B0"))
    assert cli.main(["check", "bad.csv", "good.csv", "--json"]) == 1
    out, err = capsys.readouterr()
    bad, good = json.loads(out)
    assert err == ""
    assert (bad["good"], bad["rank"], bad["position"], bad["rule"]) == (False, 0, 3, "count")
    assert "stands already" in bad["error"]
    assert good == {
        "file": "good.csv",
        "good": True,
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "actions": 8,
    }


def test_compare_is_sorted_and_filtered(capsys: pytest.CaptureFixture[str]):
    line = "compare", "-p", "4", "-m", "8", "--only", "ZB*", "--only", "gpipe", "--json"
    found = json.loads(printed(capsys, *line))["schedules"]
    names = ["GPipe", "ZB1P", "ZB2P", "ZBH1", "ZBH2", "ZBVZeroBubble"]
    assert sorted(entry["name"] for entry in found) == names
    bubbles = [entry["bubble"] for entry in found]
    assert bubbles == sorted(bubbles) and len(set(bubbles)) > 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fpipe", "draw", "zb"], "ZBV ZBVZeroBubble ZBH1 ZBH2 ZB1P ZB2P"),
        (["fpipe", "train", "--schedule", "Dual"], "DualPipe DualPipeV"),
        (["fpipe", "compare", "--only", "GP"], "GPipe"),
        (["fpipe", "comp"], "compare"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_shells_complete_names_of_schedules(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.MonkeyPatch.context() as env:
        for name, value in (("_FPIPE_COMPLETE", "bash_complete"), ("COMP_WORDS", " ".join(words))):
            env.setenv(name, value)
        env.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            cli.main([])
    found = {
        line.partition(",")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("plain,")
    }
    assert found == set(expected.split())


def test_help_tells_how_completion_is_switched_on(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, "--help")
    for shell_name in ("bash", "zsh", "fish"):
        assert f"_FPIPE_COMPLETE={shell_name}_source fpipe" in out


METAVARS = {
    "SCHEDULE",
    "FILE",
    "DIR",
    "COSTS",
    "N",
    "SECONDS",
    "LIMIT",
    "PATTERN",
    "NAME",
    "FILE:FUNCTION",
    "HOST:PORT",
    "ARGUMENT",
    "RATE",
    "WIDTH",
    "PERCENT",
    "N,N",
}


def test_there_is_one_metavar_for_each_kind_of_thing():
    context = click.Context(cli.fpipe)
    commands = [cli.fpipe.get_command(context, name) for name in cli.COMMANDS]
    commands += [
        part
        for group in commands
        if isinstance(group, click.Group)
        for part in group.commands.values()
    ]
    for command in commands:
        for p in command.params if command else ():
            taken = isinstance(p.type, (click.Choice, click.types.BoolParamType)) or p.metavar == ""
            shown = p.metavar or p.type.get_metavar(p, context) or ""
            assert taken or shown.strip("[].") in METAVARS, (
                command and command.name,
                p.name,
                shown,
            )


#: total and peak in activations at 8 ranks and 24 microbatches, unit costs, as published
PUBLISHED = {
    "GPipe": (93, 24),
    "1F1B": (93, 8),
    "Interleaved1F1B": (82.5, 11.5),
    "ZBH1": (79, 8),
    "ZBH2": (79, 15),
    "ZBVZeroBubble": (75.5, 8),
    "DualPipe": (78, 9),
    "DualPipeV": (79, 8.5),
}


def test_compare_gives_the_published_figures():
    entries, left_out = comparison.compare(8, 24, costs=Costs(overlap=3))
    found = {entry.name: (entry.total, entry.memory) for entry in entries}
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    by_name = {entry.name: entry for entry in entries}
    assert by_name["ZBVZeroBubble"].span == 72
    assert by_name["DualPipe"].weights == 2
    assert by_name["1F1B"].messages == 24 * 7 * 2
    assert not left_out
    assert [e.total for e in entries] == sorted(e.total for e in entries)


@pytest.mark.parametrize("ranks", [4, 8])
def test_what_names_says_of_schedules_is_what_compare_finds(ranks: int):
    """Chimera was said to be idle for less time than 1F1B: with 8 ranks and 24 microbatches it is
    idle for more.
    """
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        found = {entry.name: entry for entry in comparison.compare(ranks, microbatches)[0]}
        less = found["Chimera"].bubble < found["1F1B"].bubble
        assert less == (microbatches <= 2 * ranks)
        more = found["Interleaved1F1B"].memory > found["1F1B"].memory
        assert more == (microbatches > ranks)
        for name in ("ZBVZeroBubble", "ZBH2"):
            assert (found[name].bubble == 0) == (microbatches >= 2 * ranks)
        assert found["VHalf"].memory <= ranks / 2 + 1
        assert found["VMin"].memory <= ranks / 3 + 2


def test_compare_marks_the_best(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, "compare", "--ranks", "8", "--microbatches", "24", "--costs", "overlap=3")
    rows = {
        line.split()[0]: line.split()[1:]
        for line in out.splitlines()
        if line and line.split()[0] in schedule_names()
    }
    assert set(rows) == set(schedule_names())
    assert rows["ZBVZeroBubble"][:4] == ["75.5*", "8", "0%*", "16"]
    assert rows["1F1B"][:3] == ["93", "8", "22.6%"]
    for column in (0, 1, 5):
        numbers = {name: float(row[column].rstrip("*")) for name, row in rows.items()}
        starred = {name for name, row in rows.items() if row[column].endswith("*")}
        assert starred == {
            name for name, number in numbers.items() if number == min(numbers.values())
        }


def test_compare_tells_what_does_not_fit(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, "compare", "-p", "3", "-m", "5", "--costs", "boundary=2000000,saved=3e6")
    [left_out] = re.findall(r"^not for these counts: .*", out, re.M)
    assert left_out.endswith(": DualPipe, Chimera (an even number of ranks, not 3)")
    assert "MiB" in out
    assert "volume" in out and ", memory 8.6 MiB schedule" in " ".join(out.split())
    out = printed(capsys, "compare", "-p", "4", "-m", "8", "--stages", "16")
    left_out = " ".join(out.split()).partition(" not for these counts: ")[2]
    assert left_out.startswith(
        "ZBVZeroBubble, DualPipeV, VHalf, VMin (8 stages on 4 ranks, not 16), "
        "Overlapped1F1B, DualPipe, Chimera (4 stages on 4 ranks, not 16)"
    )


def test_compare_names_the_one_to_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, long: bool
):
    picture = tmp_path / "frontier.svg"
    given = ["compare", "-p", "4", "-m", "8", "--memory", "3"]
    out = printed(capsys, *given)
    verdict = "take VHalf, the shortest step within memory 3: total 26.5"
    assert out.splitlines()[2].startswith(verdict), "above the table"
    assert re.search(r"^1F1B .* 4! ", out, re.M) and "within the limit; ! is over it" in out
    starred = [line.split()[0] for line in out.splitlines()[:24] if "*" in line]
    assert starred == ["VHalf", "VMin"], "one over the limit cannot be taken"
    assert re.findall(r"^V\w+|^ZBV\w+", out, re.M) == ["VHalf", "VMin", "ZBVZeroBubble"], (
        "those within the limit come first"
    )
    wrote = printed(capsys, *given, "--out", str(picture))
    assert wrote.endswith(f"\nwrote {picture} ({size_text(picture.stat().st_size)})\n")
    assert wrote.startswith(verdict) and "1F1B" not in wrote, "the table again"
    drawn = ElementTree.parse(picture).getroot()
    labels = [label.text or "" for label in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any(label.startswith(verdict) for label in labels)
    assert "VMin" in labels and "Time against memory: 4 ranks, 8 microbatches" in labels
    assert "\xa0a rank may hold 3" in labels
    for name, start in (
        ("a.html", b"<!doc"),
        *([("frontier.png", b"\x89PNG"), ("frontier.pdf", b"%PDF")] if long else []),
    ):
        printed(capsys, "compare", "-p", "4", "-m", "8", "--out", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<p>take ZBVZeroBubble, the shortest step: " in text.partition("<svg")[0]
    page = re.sub("</?(?!wbr)[^>]*>", "", text)
    assert "InterleavedZeroBubble" in page, "a name has no place where a line may end"
    assert "25.5*" in page and "the fewest weights, then the least memory" in page
    heavy = printed(capsys, "compare", "-p", "4", "-m", "8", "--only", "GPipe", "--memory", "3")
    assert "none of these schedules holds at most 3; give more" in heavy, "VHalf does"
    assert heavy.endswith("\n\ntry: fpipe solve -p 4 -m 8 --memory 3\n")
    found = json.loads(printed(capsys, "compare", "-p", "4", "-m", "8", "--json"))
    assert found["take"] == "ZBVZeroBubble" and len(found["schedules"]) > 10


def test_what_compare_says_to_try_is_the_same_problem(capsys: pytest.CaptureFixture[str]):
    """It left out all but --memory, in digits such as 1.2e+10."""
    given = "-p 2 -m 6 --stages 4 --per stage --costs F=1,saved=4e9 --memory 12GB"
    out = printed(capsys, *f"compare {given} --only GPipe --only LoopedBFS".split())
    assert out.splitlines()[-1] == f"try: fpipe solve {given}"
    solved = printed(capsys, *f"solve {given} --seconds 0.1".split())
    assert "memory at most 11.2 GiB" in " ".join(solved.split())


def test_compare_and_solve_name_the_same_schedules(capsys: pytest.CaptureFixture[str]):
    """One took DualPipe, which holds weights twice, and the other ZBH2, without a word of ZBH1."""
    costs = "F=1:1:1:1.6,I=1:1:1:1.6,W=1:1:1:1.2"
    once = "or ZBH1: total 38.2, bubble 28.3%, memory 4"
    twice = "DualPipe, the shortest step: total 29.6, bubble 9.5%, memory 5, weights 2x"
    compared = printed(capsys, "compare", "--costs", costs).splitlines()
    assert compared[3:6] == [f"take {twice}", once, ""]
    solved = printed(capsys, "solve", "--costs", costs).splitlines()
    assert solved[:4] == [
        "the busiest rank works 35.2, the mean is 26.8: cut the layers more evenly by",
        "  fpipe.balance(layers, ranks=4)",
        "take with weights once: ZBH2, total 38.2, 35.2 from step to step (optimal)",
        "or with weights twice: DualPipe, total 29.6, 29.6 from step to step",
    ]
    (place,) = (at for at, line in enumerate(solved) if line.split()[:2] == ["total", "span"])
    assert [line.split("  ")[0] for line in solved[place + 1 : place + 4]] == [
        "ZBH2, as solved",
        "DualPipe",
        "",
    ]
    compared = printed(capsys, "compare")
    assert "\nor " not in compared, "it takes one that holds weights once"


def test_solve_says_what_to_try_after_a_search_that_may_find_more(
    capsys: pytest.CaptureFixture[str],
):
    given = "-p 4 -m 8 --stages 8 --per stage --costs F=1.5 --memory 1.5"
    text = printed(capsys, *f"solve {given} --placement V --seconds 0.1".split())
    assert "% of the least)" in " ".join(text.split())
    more = f"try: fpipe solve {given} --placement V --seconds 0.6 --out plan.csv"
    assert more in text.splitlines()
    uneven = ("solve", "--costs", "F=1:2:1:2", "-p", "4", "-m", "8")
    optimal = printed(capsys, *uneven)
    assert "\ntry: fpipe solve -p 4 -m 8 --stages 4 --costs F=1:2:1:2 --out plan.csv\n" in optimal
    assert "try: fpipe solve" not in printed(capsys, *uneven, "--out", "plan.csv")


def test_solve_where_nothing_is_held(capsys: pytest.CaptureFixture[str]):
    """It was a division by zero."""
    assert printed(capsys, "solve", "--costs", "saved=0").startswith("take ZBVZeroBubble, ")


def test_a_hint_of_completion_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, "--help").endswith(cli.COMPLETION)


CHECKPOINT = ("show", "verify", "convert")
HELPS = [[], *([name] for name in cli.COMMANDS), *(["checkpoint", n] for n in CHECKPOINT)]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_a_help_fits_80_columns(capsys: pytest.CaptureFixture[str], words: list[str]):
    """Examples of fpipe and fpipe plan had 87 columns; lines of fpipe checkpoint ended in dots."""
    lines = printed(capsys, *words, "--help").splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines[1:])


@pytest.mark.parametrize("name", ["draw", "compare", "solve"])
def test_a_help_ends_with_the_names_of_costs(capsys: pytest.CaptureFixture[str], name: str):
    """They were ten lines beside --costs."""
    options, _, costs = printed(capsys, name, "--help").partition("\nCosts:\n")
    assert not {field.name for field in fields(Costs)} - {"unit"} - {*re.findall(r"\w+", costs)}
    assert "bandwidth" not in options


@pytest.mark.parametrize("words", ["names", "compare -p 8 -m 24", "compare -p 8 -m 24 --memory 8"])
def test_lists_fit_80_columns(capsys: pytest.CaptureFixture[str], words: str):
    assert max(map(len, printed(capsys, *words.split()).splitlines())) <= 80


@pytest.mark.parametrize(
    ("width", "points"),
    [("3.4in", 244.8), ("390", 292.5), *also(("86mm", 243.8), ("240pt", 240))],
)
def test_a_picture_for_a_paper_has_the_width_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, width: str, points: float
):
    path = str(tmp_path / "a.pdf")
    words = ["-p", "2", "-m", "2", "--style", "paper", "--width", width, "--out", path]
    for command in (["draw", "1F1B"], ["compare"]):
        printed(capsys, *command, *words)
        (box,) = re.findall(rb"/MediaBox \[ ([^\]]*) \]", Path(path).read_bytes())
        assert float(box.split()[2]) == pytest.approx(points, abs=0.1)


def test_a_picture_for_a_paper_without_numbers_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    words = ["draw", "ZBV", "--style", "paper", "--out", str(tmp_path / "a.svg"), "--width"]
    hint = "bars have no names; --width {}in or fewer microbatches leave room"
    assert hint.format(3.1) in printed(capsys, *words, "3in")
    assert "names" not in printed(capsys, *words, "3.4in")
    both = [*words, "7in", "1F1B", "--difference"]
    assert "bars have no names; --width " in printed(capsys, *both)
    assert "names" not in printed(capsys, *both, "-m", "6")


def test_solve_writes_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    plan, costs = tmp_path / "plan.csv", tmp_path / "profile.json"
    costs.write_text(Costs(F=[1, 1, 1, 2], saved=1e9).to_json())
    options = ("--costs", str(costs), "--memory", "6GB", "--seconds", "0.2", "--out", str(plan))
    out = printed(capsys, "solve", "-p", "2", "-m", "6", *options)
    assert re.search(r" step \((optimal|within \d+\.\d\d% of the least)\)", " ".join(out.split()))
    assert re.search(r"^no schedule with weights once has a span below \d", out, re.M)
    commands = "try: ", "wrote "  # which are copied, so they stay in one line
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(commands))
    t = Schedule.from_csv(plan).check().simulate(Costs.from_json(costs.read_text()))
    figures = rf"^\w.+  {t.total:.6g} +{t.span:.6g} +{size_text(max(t.peak_bytes))} +[\d.]+%$"
    assert max(t.peak_bytes) <= 6e9
    assert re.search(figures.replace("+0", r"\+0"), out, re.M)
    assert cli.main(["solve", "-p", "2", "-m", "6", "--costs", str(costs), "--memory", "1GB"]) == 2


def test_solve_holds_no_more_than_a_named_schedule_of_equal_times(
    capsys: pytest.CaptureFixture[str],
):
    """It placed Ws where a rank held 8 microbatches, for the span and the total of one with 4."""
    uneven = ",".join(f"{op}=1:2:1:1" for op in "FIW")
    text = printed(capsys, "solve", "-p", "4", "-m", "8", "--costs", uneven)
    *_, solved, _ = text.partition("\n\ntotal: ")[0].splitlines()  # and DualPipe
    assert solved.split() == ["ZBH1,", "as", "solved", "49", "48", "4", "37.5%"], (
        "no interleaved one of one stage a rank"
    )
    [command] = re.findall("^try: fpipe (.*)", text, re.M)  # it left out --stages, and failed
    assert "total 49, bubble" in printed(capsys, *shlex.split(command))


def test_solve_says_first_whether_a_named_schedule_is_as_good(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "solve", "-p", "4", "-m", "8")
    first, second, _, problem, _, *table = text.splitlines()
    given = "ranks 4, microbatches 8, stages 8, costs F=1, I=1, W=1 of a rank's whole share"
    assert problem == given
    assert first == "take ZBVZeroBubble, total 25.5, 24 from step to step (optimal)"
    assert second == "try: fpipe draw ZBVZeroBubble -p 4 -m 8 --stages 8"
    assert not any(line.startswith(("rank 0", "stages by rank")) for line in table)
    assert [row.split() for row in table[:3]] == [
        ["total", "span", "memory", "bubble"],
        ["ZBVZeroBubble,", "as", "solved", "25.5", "24", "4", "0%"],
        [],
    ], "two equal rows"
    uneven = printed(capsys, "solve", "-p", "4", "-m", "8", "--costs", "F=1:2:1:2")
    assert uneven.startswith(
        "take with weights once: the solved schedule, total 36, 32 from step to step\n  (optimal)\n"
        "best named schedule: ZBH2, total 36, 33 from step to step\n"
        "or with weights twice: DualPipe, total 31, 31 from step to step\n"
    )
    uneven = printed(capsys, "solve", "-p", "4", "-m", "8", "--costs", "F=1:1:1:2,I=1:1:1:2,W=1")
    assert "\ntake with weights once: ZBH2, " in uneven, "not ZBH1, of a longer span"
    assert "stages 4 (from the costs)" in uneven and "stages 8," in text
    assert uneven.startswith("the busiest rank works 40, the mean is 28: cut the layers")
    assert "busiest" not in text, "no cut is better"
    limit = printed(capsys, "solve", "-p", "4", "-m", "8", "--memory", "1", "--seconds", "0.1")
    assert limit.startswith("take the solved schedule, total ")
    assert "\nno named schedule holds at most 1\n" in limit
    assert limit.split("\n\n")[1].endswith("memory at most 1")


def test_costs_are_shared_among_a_ranks_stages():
    zbv = make_schedule("ZBV", 2, 4)
    whole = Costs(F=3, B=5, overlap=7, kept=0.5)
    shared = Costs(F=1.5, I=0.5, W=0.5, B=2.5, overlap=3.5, saved=0.5, kept=0.25)
    assert whole.scaled(0.5) == shared
    assert list(zbv.simulate(whole, per="rank")) == list(zbv.simulate(shared))
    assert list(zbv.simulate(whole, per="rank", jitter=0.1)) == list(
        zbv.simulate(shared, jitter=0.1)
    )
    by_stage = Costs(F=[1, 2, 3, 4])
    assert list(zbv.simulate(by_stage, per="rank")) == list(zbv.simulate(by_stage))
    with pytest.raises(ScheduleError, match=r"per='model'; say whose costs.*'stage' or 'rank'"):
        zbv.simulate(per="model")  # type: ignore[arg-type]


@pytest.mark.parametrize("per", ["rank", "stage"])
@pytest.mark.parametrize("costs", ["I=2,comm=0.25", "F=" + ":".join("12" * 4)])
def test_equal_costs_give_equal_figures_everywhere(
    costs: str, per: Per, capsys: pytest.CaptureFixture[str]
):
    """`fpipe solve` took the costs of a stage, the other commands those of a rank."""
    options = ("-p", "4", "-m", "8", "--costs", costs, "--per", per)
    rows = json.loads(printed(capsys, "compare", *options, "--json"))["schedules"]
    for row in rows:
        t = make_schedule(row["name"], 4, 8, row["stages"]).simulate(Costs.parse(costs), per=per)
        by_stage = per == "stage" or ":" in costs  # then 1 is saved by each stage of a rank
        memory = max(t.peak_bytes) / (row["stages"] / 4 if by_stage else 1)
        assert (row["total"], row["span"], row["memory"]) == (t.total, t.span, memory)
        drawn = printed(capsys, "draw", row["name"], "--stages", str(row["stages"]), *options)
        assert f"peak {number(memory)} microbatch" in drawn
        assert f"total {number(t.total)}, bubble {percent(t.bubble)}" in drawn
    solved = printed(capsys, "solve", *options, "--seconds", "0.01", "-o", "plan.csv")
    # the default is rank; numbers by stage are those of stages
    whose = " --per stage" if per == "stage" and ":" not in costs else ""
    assert solved.endswith(f"fpipe draw plan.csv{whose} --costs {costs}\n")
    t = Schedule.from_csv("plan.csv").simulate(Costs.parse(costs), per=per)
    assert f"\ntotal {number(t.total)}, bubble {percent(t.bubble)}, peak" in solved
    assert f"total {number(t.total)}, bubble {percent(t.bubble)}" in printed(
        capsys, "draw", "plan.csv", "--costs", costs, "--per", per
    )


def test_our_own_options_are_documented():
    """Every option of every command has a help text."""
    context = click.Context(cli.fpipe)
    for name in cli.COMMANDS:
        command = cli.fpipe.get_command(context, name)
        assert command is not None
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, (command.name, option.name)  # type: ignore[attr-defined]


def test_compare_shows_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """64 ranks and 512 microbatches took half a minute, and nothing was shown."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("fpipe.actions.progress_line.AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    real = comparison.make_schedule

    def slow(*args: object, **keywords: object) -> Schedule:
        end = time.monotonic() + 30
        while time.monotonic() < end and "comparing schedules" not in screen.getvalue():
            time.sleep(0.01)
        return real(*args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "make_schedule", slow)
    assert cli.main(["compare", "-p", "2", "-m", "4", "--only", "1F1B"]) == 0
    assert "1F1B" in capsys.readouterr().out
    assert "comparing schedules" in screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_file_shows_progress_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A file of 21 MB took half a minute, and nothing was shown."""
    Path("plan.csv").write_text(GOOD)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("fpipe.actions.progress_line.AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")

    def slow(path: Path, track: Track) -> Schedule:
        end = time.monotonic() + 30
        for line in track(GOOD.splitlines()):
            seen = "50%" if line[0] == "1" else "reading"
            while terminal and time.monotonic() < end and seen not in screen.getvalue():
                time.sleep(0.01)
        return Schedule.from_csv(path)

    monkeypatch.setattr("fpipe.products.command.options.read_schedule", slow)
    assert cli.main(["check", "plan.csv"]) == 0
    assert "2 ranks, 2 stages, 2 microbatches" in capsys.readouterr().out
    assert ("reading plan.csv" in screen.getvalue()) == terminal == bool(screen.getvalue())


def test_check_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("[0F0, 0B0]"))
    assert cli.main(["check", "-"]) == 0
    assert "-: good: 1 ranks" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("[0B0, 0F0]"))
    assert cli.main(["check", "-"]) == 1
    assert "0B0" in capsys.readouterr().err
