"""``fpipe train``: its parts in one process, and one complete run on two."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fpipe
from fpipe.products.command.cli import main
from fpipe.products.demo import Sizes, Text, gpt, sonnets
from fpipe.products.demo.conduct import largest_difference, screen
from fpipe.products.demo.rank import Settings, Step, work
from sample import also


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Step] = []

    def send(self, report: Step) -> None:
        self.sent.append(report)


def settings(name: str, page: Path, ranks: int = 2, steps: int = 3) -> Settings:
    schedule = fpipe.make_schedule(name, ranks, 2 * ranks)
    return Settings(schedule, page, steps=steps, length=8, width=8, layers=2, pictures=2)


@pytest.mark.parametrize("name", ["ZBV", *also("DualPipe", "LoopedBFS")])
def test_gradients_are_those_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fpipe.products.demo.rank.cores", lambda: 1)
    wire, page = Wire(), tmp_path / "timeline.html"
    small = settings(name, page)
    last_step = work(small, wire)  # type: ignore[arg-type]
    assert [report.number for report in wire.sent if report.timeline] == [2]
    assert largest_difference(small, [last_step]) == 0
    assert largest_difference(small, [last_step._replace(loss=last_step.loss + 1)]) > 0.9
    last_step.grads[0]["embed"]["token"][0, 0] += 1
    assert largest_difference(small, [last_step]) == 1
    assert [report.number for report in wire.sent] == [0, 1, 2]
    text = page.read_text(encoding="utf-8")
    assert f'"{small.schedule.name} in theory: 2 ranks' in text
    theory = text.partition(f'"{small.schedule.name}, measured')[0]  # a phone hides the rest
    assert re.search(
        r"The work of the measured step, spread evenly over ranks, F, I and W\. The measured step "
        r"takes [\d.]+ times as long: 2 processes and their messages wait for 1 core\.",
        theory,
    )
    even, measured = re.findall(r'"bubble","([\d.]+)%"', text)
    assert float(even) == round(100 * small.schedule.simulate(per="rank").bubble, 1)
    assert f'"{small.schedule.name}, measured: 2 ranks' in text and float(measured) > 0


def test_the_model_is_the_same_however_it_is_cut():
    x = torch.arange(6).view(1, 6)
    outputs = []
    for stages in (1, 2, 3, 7):
        functions, params = gpt(Sizes(vocabulary=9, width=8, layers=3), stages)
        y = x
        for fn, p in zip(functions, params, strict=True):
            y = fn(p, y)
        outputs.append(y)
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_the_text_is_shipped_and_batches_follow_from_the_step():
    text = sonnets()
    assert len(text.text) > 20_000 and "".join(text.letters[n] for n in text.tokens) == text.text
    same, other = text.batch(3, 4, 16), text.batch(4, 4, 16)
    assert torch.equal(same[0], text.batch(3, 4, 16)[0]) and not torch.equal(same[0], other[0])
    assert Text("aba").letters == "ab"


@pytest.mark.parametrize("terminal", [False, True])
def test_screen_shows_what_is_reported(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")  # a rank that ran in this process made it "dumb"
    file = io.StringIO()
    console = Console(file=file, width=90, force_terminal=terminal, color_system=None)
    timeline = fpipe.make_schedule("DualPipeV", 2, 4).simulate()
    with screen(console, "ZBV", 25, timeline) as show:
        for number in range(25):
            show(Step(number, 24.0 - number, 200.0, timeline if number == 4 else None))
        show("speed  200\nthe [bold]verdict[/]:" + 13 * " words")
    shown = file.getvalue()
    assert "ZBV" in shown and "loss 0.0000" in shown
    if terminal:
        last = shown.rpartition("fpipe train")[2].splitlines()[:-1]
        assert "25/25" in last[1]
        assert "DualPipeV: 2 ranks, 4 microbatches" in last[3]
        assert "peak 2.5 microbatches" in last[4] and "weight gradient" in "".join(last)
        assert [line[2:9] for line in last if "rank " in line[:8]] == ["rank 0 ", "rank 1 "]
        assert last[-4].startswith("│ speed  200 ")
        assert last[-1].startswith("╰") and "verdict: words words" in last[-3]
        assert last[-2].startswith("│ words") and len(last) < 24
        assert all(len(line) == 90 for line in last[1:])
    else:
        steps = [int(line[5:9]) for line in shown.splitlines() if line.startswith("step")]
        assert steps == [1, *range(2, 25, 2), 25]
        assert shown.startswith("ZBV\nstep    1   loss 24.0000\nstep    2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "ZBX"], "did you mean ZBV"),
        (["--schedul", "DualPipeV"], "Did you mean '--schedule'?"),
        (["--step", "5"], "Did you mean '--steps'?"),
        (
            ["DualPipeV"],
            "unexpected argument 'DualPipeV'; name a schedule with --schedule DualPipeV",
        ),
        (["--ranks", "four"], "'four' is not a valid whole number"),
        (["--schedule", "DualPipe", "--ranks", "3"], "an even number of ranks, not 3"),
        (["--schedule", "nothing.csv"], "there is no file 'nothing.csv'"),
        (["--width", "6"], "multiple of 4"),
        (["--ranks", "0"], "0 is not in the range"),
        (["--out", __file__], "is a file"),
    ],
)
def test_a_mistake_gets_help(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *arguments]) == 2
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text


def test_on_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fpipe.products.demo.rank.cores", lambda: 1)
    plan = tmp_path / "plan.csv"
    fpipe.make_schedule("ZBV", 2, 4).to_csv(plan)
    out = tmp_path / "run"
    common = ["--steps", "4", "--width", "8", "--layers", "2"]
    assert main(["train", "--schedule", str(plan), "--out", str(out), *common]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 processes, 4 stages" in text and "step 4" in text
    assert "last step: loss and gradients identical to those of one process" in text
    waits = "2 processes and their messages wait for 1 core"
    assert re.search(rf"bubble 0% in theory, \d+% here: {waits} check", text)
    assert text.endswith(f"timeline open {out}/timeline.html in a browser")
    assert re.search(r"step 4 loss (\S+) loss from \S+ to \1 speed \S+ tokens/s ", text)
    assert (out / "timeline.html").stat().st_size > 10_000
