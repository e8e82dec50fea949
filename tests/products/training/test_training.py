"""``fpipe train``: its parts in one process, and one complete run on two."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fpipe
from fpipe import tree
from fpipe.products.command.cli import main
from fpipe.products.demo import Sizes, Text, gpt, sonnets
from fpipe.products.demo.conduct import of_all_ranks, verdict, write
from fpipe.products.demo.rank import Measured, Ready, Settings, Step, work
from fpipe.products.demo.screen import Screen, sparkline


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, report: object) -> None:
        self.sent.append(report)


def settings(name: str, ranks: int = 2, steps: int = 3) -> Settings:
    schedule = fpipe.make_schedule(name, ranks, 2 * ranks)
    return Settings(schedule, steps=steps, length=8, width=8, layers=2, pictures=2)


@pytest.mark.parametrize("name", ["ZBV", "DualPipe", "LoopedBFS"])
def test_gradients_are_those_of_one_process(name: str, tmp_path: Path):
    wire = Wire()
    small = settings(name)
    last_step = work(small, wire)  # type: ignore[arg-type]
    assert [report.number for report in wire.sent if isinstance(report, Measured)] == [2]
    last = of_all_ranks([last_step])
    result = verdict(small, last)
    assert (result.largest, result.loss) == (0, 0)
    assert result.numbers == sum(leaf.numel() for leaf in tree.leaves(last.before))
    last.grads[0]["embed"]["token"][0, 0] += 1
    assert verdict(small, last).largest == 1
    assert [r.number for r in wire.sent if isinstance(r, Step)] == [0, 1, 2]
    page = write(last, tmp_path / "out", name)
    assert sorted(p.name for p in page.parent.iterdir()) == [
        "measured.json",
        "simulated.json",
        "timeline.html",
    ]
    assert f"{name} measured" in page.read_text() and f"{name} simulated" in page.read_text()


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
    assert len(text.text) > 20_000 and text.decode(text.tokens) == text.text
    same, other = text.batch(3, 4, 16), text.batch(4, 4, 16)
    assert torch.equal(same[0], text.batch(3, 4, 16)[0]) and not torch.equal(same[0], other[0])
    assert Text("aba").letters == "ab"


def test_screen_shows_what_is_reported():
    console = Console(file=io.StringIO(), width=90, force_terminal=True, color_system=None)
    screen = Screen(console, "ZBV", 10)
    screen.show(Ready(1234))
    with console.capture() as before:
        console.print(screen.picture())
    assert "1,234 parameters" in before.get() and "tracing" in before.get()
    for number in range(5):
        screen.show(Step(number, 4.0 - number, 100, 0.5))
    timeline = fpipe.make_schedule("DualPipeV", 2, 4).simulate()
    screen.show(Measured(4, timeline))
    with console.capture() as capture:
        console.print(screen.picture())
    shown = capture.get()
    assert "loss 0.0000" in shown and "200 tokens/s" in shown and "5/10" in shown
    drawn = timeline.draw(width=86, color=False).splitlines()
    assert all(line in shown for line in drawn) and "step 5 as it ran" in shown
    assert any(re.match(r"rank 0 .*0F", line) for line in drawn) and "weight gradient" in drawn[-1]
    assert sparkline([2, 1], 9) == "█▁"


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
        (["--schedule", "DualPipe", "--ranks", "3"], "3 ranks are odd"),
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
    monkeypatch.setattr("fpipe.products.demo.conduct.cores", lambda: 1)
    plan = tmp_path / "plan.csv"
    fpipe.make_schedule("ZBV", 2, 4).to_csv(plan)
    out = tmp_path / "run"
    common = ["--steps", "4", "--width", "8", "--layers", "2"]
    assert main(["train", "--schedule", str(plan), "--out", str(out), *common]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 processes, 4 stages" in text and "step 4" in text
    assert "Largest difference of its gradients from a single process: 0 " in text
    assert "2 processes share 1 of this machine's cores" in text
    assert "Three things to try next" in text and all(
        f" {word} " in text for word in ("view", "train", "compare")
    )
    assert (out / "timeline.html").stat().st_size > 10_000
