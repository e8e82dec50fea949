"""Golden files: orders, drawings, tables, a plan. ``make golden`` writes them again.

A change of output is then visible in the commit that causes it. Data published by others are in
``data`` and are never rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fpipe
from fpipe.generators import catalogue
from fpipe.products import pictures
from fpipe.products.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parents[1] / "golden"

Golden = Callable[..., None]


def test_orders(golden: Golden):
    """Every schedule of the package, 4 ranks and 8 microbatches."""
    made = (fpipe.make_schedule(entry.name, 4, 8) for entry in catalogue.TABLE)
    golden(FILES / "orders.txt", "\n".join(f"{schedule.name}\n{schedule}\n" for schedule in made))


def test_drawings(golden: Golden):
    """A terminal's drawings, of one stage a rank, of two, and of fused actions."""
    timelines = [
        fpipe.make_schedule(name, 4, 8).simulate() for name in ("1F1B", "ZBV", "DualPipeV")
    ]
    golden(
        FILES / "drawings.txt",
        "\n".join(pictures.draw(t, width=120, color=False) for t in timelines),
    )


@pytest.mark.parametrize(("name", "width"), [("bubbles", 800), ("bubbles-phone", 390)])
def test_front_page(golden: Golden, tmp_path: Path, name: str, width: int):
    """The pictures of README.md, by the command that it names: for its column, and for a phone."""
    made = tmp_path / "bubbles.svg"
    words = "draw 1F1B ZBV --ranks 4 --microbatches 8 --no-memory"
    assert words in (ROOT / "README.md").read_text(encoding="utf-8")
    assert main([*words.split(), "--width", str(width), "--out", str(made)]) == 0
    golden(ROOT / "docs" / "pictures" / f"{name}.svg", made.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["timeline", "difference"])
@pytest.mark.parametrize(("end", "width"), [("", 800), ("-phone", 390)])
def test_pictures_of_timelines(golden: Golden, tmp_path: Path, name: str, end: str, width: int):
    """The pictures of docs/howto/timeline.md, by the commands above them."""
    page = (ROOT / "docs" / "howto" / "timeline.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"^fpipe (draw .*) --out {name}\.svg$", page, re.M)
    made = tmp_path / "picture.svg"
    assert main([*words.split(), "--width", str(width), "--out", str(made)]) == 0
    shown = made.read_text(encoding="utf-8")
    golden(ROOT / "docs" / "pictures" / f"{name}{end}.svg", shown)


def test_pictures_of_a_notebook(golden: Golden):
    """The two pictures of a cell, for a wide one and for a phone, that docs/howto/notebooks.md
    shows.
    """
    shown = fpipe.make_schedule("ZBV", 4, 8)._repr_html_()
    drawn = re.findall(r"<svg.*?</svg>", shown, re.S)
    for end, picture in zip(("", "-phone"), drawn, strict=True):
        golden(ROOT / "docs" / "pictures" / f"notebook{end}.svg", f"{picture}\n")


def test_pictures_of_a_profile(golden: Golden):
    """Those of the profile in docs/howto/notebooks.md, from its costs in microseconds."""
    costs = fpipe.Costs(
        F=[3.16, 3.13, 2.93, 2.91, 2.85, 2.9, 2.95, 7.91],
        I=[0, 4.14, 4.22, 4.04, 4.19, 4.16, 4.29, 13.47],
        W=[4.66, 2.86, 2.84, 2.77, 2.81, 2.84, 2.86, 3.04],
        send=[0.15, 0.13, 0.14, 0, 0.13, 0.13, 0.13],
        receive=[0.68, 0.7, 0.63, 0, 0.77, 0.74, 0.63],
        unit="us",
    )
    timeline = fpipe.make_schedule("ZBV", 4, 8).simulate(costs)
    page = (ROOT / "docs" / "howto" / "notebooks.md").read_text(encoding="utf-8")
    total = f"{timeline.total / 1000:.4f} ms"
    assert f"simulated, ranks at once: {total}, bubble {timeline.bubble:.1%}" in page
    times = zip(*(getattr(costs, op) for op in "FIW"), strict=True)
    for stage, row in enumerate(times):
        cells = (f"{time:.1f}" if time else "-" for time in row)
        assert re.search(rf"^ +{stage} +{' +'.join(cells)}$", page, re.M), stage
    named = replace(timeline, name="ZBV, simulated, ranks at once")
    drawn = re.findall(r"<svg.*?</svg>", pictures.figure(named), re.S)
    for end, picture in zip(("", "-phone"), drawn, strict=True):
        golden(ROOT / "docs" / "pictures" / f"profile{end}.svg", f"{picture}\n")


@pytest.mark.parametrize(
    "words",
    [("names",), ("compare", "--ranks", "4", "--microbatches", "8")],
    ids=lambda words: words[0],
)
def test_output(golden: Golden, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    """What commands print."""
    assert main(words) == 0
    golden(FILES / f"{words[0]}.txt", capsys.readouterr().out)


def test_plan(golden: Golden):
    """What two ranks run, with every byte."""
    layer = lambda p, x: x + torch.tanh(x @ p)
    squared = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, microbatches=2, group=fpipe.local(2))
    golden(
        FILES / "plan.txt",
        f"{pipe.plan([torch.eye(4)] * 4, torch.ones(4, 4), torch.zeros(4, 4))}\n",
    )


def test_a_change_is_caught_and_the_flag_writes_it(golden: Golden, tmp_path: Path):
    path = tmp_path / "new" / "file.txt"
    golden(path, "one\ntwo\n", update=True)
    golden(path, "one\ntwo\n", update=False)
    with pytest.raises(
        pytest.fail.Exception,
        match=r"(?s)file\.txt differs from the current output.*make golden.*\+three",
    ):
        golden(path, "one\nthree\n", update=False)
    assert path.read_text() == "one\ntwo\n"
    golden(path, "one\nthree\n", update=True)
    golden(path, "one\nthree\n", update=False)
