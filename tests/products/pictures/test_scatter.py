"""Time against memory: names that can be read, axes with units, dark paper, all formats."""

from __future__ import annotations

import re
from itertools import combinations, pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from fpipe.products import pictures
from fpipe.products.pictures import Look, colours, scatter
from fpipe.products.search.comparison import compare, points
from sample import also

TITLE = "Time against memory: 8 ranks, 24 microbatches"
POINTS = list(points(compare(8, 24)[0]))


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    written: list[Figure] = []
    write = scatter.figure_bytes

    def keep(figure: Figure, *arguments: object) -> bytes:
        written.append(figure)
        return write(figure, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scatter, "figure_bytes", keep)
    return written


def said(axes: Axes) -> str:
    """The lines above the axes, the bold one first."""
    lines = [text for text in axes.texts if isinstance(text, Annotation)]
    return " ".join(text.get_text().replace("\n", " ") for text in reversed(lines))


@pytest.mark.covering
@pytest.mark.parametrize("width", [326.4, 768, *also(400, 1600)])
@pytest.mark.parametrize("limit", [inf, 6.0])
def test_names_are_over_no_other_name_no_point_and_no_line(
    figure: list[Figure], width: float, limit: float
):
    scatter.paint(POINTS, Look(width=width, paper=width < 350), ".png", TITLE, limit)
    (axes,) = figure[0].axes
    figure[0].draw_without_rendering()
    texts = [text for text in axes.texts if not isinstance(text, Annotation)]
    boxes = [text.get_window_extent() for text in texts]
    named = {name for text in texts for name in re.split(r",?[ \n]", text.get_text())}
    assert named >= {name for name, *_ in POINTS}
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    at = axes.transData.transform([(memory, total) for _, memory, total, _ in POINTS])
    assert not [box for box, place in product(boxes, at) if box.padded(2).contains(*place)]
    above = [text.get_window_extent() for text in axes.texts if text not in texts]
    corners = [corner for box in boxes + above for corner in (box.min, box.max)]
    assert all(figure[0].bbox.contains(*corner) for corner in corners)
    assert not [pair for pair in combinations(above, 2) if pair[0].padded(-1).overlaps(pair[1])]
    stairs = axes.transData.transform(axes.lines[0].get_xydata())
    ends = list(pairwise(stairs))
    steps = [(a + k / 50 * (b - a)) for a, b in ends for k in range(51)]
    assert not [box for box, place in product(boxes, steps) if box.contains(*place)]
    leaders = [line for line in axes.lines if line.get_linewidth() == 0.5]
    assert len(leaders) >= len(boxes) - 1
    for line in leaders:
        path = axes.transData.transform_path(line.get_path())
        assert not [box for box in boxes if path.intersects_bbox(box.padded(-1), filled=False)]


def test_a_ring_marks_the_schedule_to_take(figure: list[Figure]):
    scatter.paint(POINTS, Look(), ".png", TITLE, 6.0, "VHalf")
    (axes,) = figure[0].axes
    (ring,) = (line for line in axes.lines if line.get_fillstyle() == "none")
    place = next((memory, total) for name, memory, total, _ in POINTS if name == "VHalf")
    assert tuple(ring.get_xydata()[0]) == pytest.approx(place)
    assert "The ring marks the one to take." in said(axes)
    scatter.paint(POINTS, Look(), ".png", TITLE, 1.0)
    (axes,) = figure[1].axes
    assert "ring" not in said(axes)
    names = [name for name, *_ in POINTS]
    twice = [name.split()[0] for name in names if name.endswith("\xa0(2x\xa0weights)")]
    assert sorted(twice) == ["Chimera", "DualPipe"], "memory does not count weights"
    scatter.paint(POINTS, Look(), ".png", TITLE, inf, "DualPipe")
    assert [line for line in figure[2].axes[0].lines if line.get_fillstyle() == "none"]


def test_axes_have_units_and_the_picture_says_what_is_better(figure: list[Figure]):
    scatter.paint(POINTS, Look(), ".svg", TITLE, inf)
    (axes,) = figure[0].axes
    assert axes.get_xlabel().endswith("in microbatches of its share of the model")
    assert axes.get_ylabel() == "total: the time of a step (axis not from 0)"
    assert said(axes) == f"{TITLE} {scatter.ABOUT}"
    heavy = [(name, memory * 3e9, total, best) for name, memory, total, best in POINTS]
    scatter.paint(heavy, Look(paper=True), ".svg", TITLE, 30e9)
    (axes,) = figure[1].axes
    assert axes.get_xlabel().endswith("in GiB") and said(axes) == ""
    assert {text.get_fontsize() for text in axes.texts} == {7.0}
    assert max(axes.get_xlim()) == pytest.approx(1.06 * 24 * 3e9 / 2**30)


def test_it_follows_its_reader_or_is_dark(tmp_path: Path):
    light, dark = (colours.THEME["ink"], colours.THEME["paper"])
    write = lambda name, look: pictures.frontier(POINTS, tmp_path / name, look, TITLE, inf, "")
    write("both.svg", Look())
    text = (tmp_path / "both.svg").read_text()
    assert f'[style*="fill: {light[0]}"]{{fill:{light[1]}!important}}' in text
    assert "prefers-color-scheme:dark" in text and "<text" in text
    write("dark.svg", Look(dark=True))
    text = (tmp_path / "dark.svg").read_text()
    assert "prefers-color-scheme" not in text and dark[1] in text and light[0] not in text
    write("a.html", Look())
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 2  # one for phones
    assert "<title>VHalf: total 80.5, memory 5</title>" in page
    assert "prefers-color-scheme:dark" in page


@pytest.mark.xdist_group("browser")
def test_the_page_has_its_lines_close_together_and_the_limit_over_names(browser: Any):
    """Names had black boxes in the shaded area, and paragraphs stood far apart."""
    lines = f"{TITLE}\ntake VHalf\ncosts F=1"
    drawn = scatter.paint(POINTS, Look(), ".html", lines, 6.0, "VHalf").decode()
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_content(drawn)
    boxes = [one.bounding_box() for one in page.locator("body > p").all()]
    gaps = [b["y"] - a["y"] - a["height"] for a, b in pairwise(boxes)]
    assert len(gaps) == 3 and max(gaps) < 8
    page.close()
    wide = drawn.split("<svg")[1]
    names, shade, point = (wide.index(one) for one in (">GPipe<", "opacity: 0.06", "<title>GPipe"))
    assert names < shade < point
