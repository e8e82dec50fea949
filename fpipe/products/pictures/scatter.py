# SPDX-License-Identifier: Apache-2.0
"""Bubble against memory of many schedules: a figure of matplotlib whose names do not overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import isfinite
from typing import TypeAlias

from matplotlib import RcParams, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Bbox, BboxBase
from numpy import array
from numpy.typing import ArrayLike

from ...actions import number
from .colours import THEME, palette
from .labels import size_text, wrapped
from .plotting import figure_bytes
from .scene import Look

WIDTH, LEAST, SHAPE = 768.0, 330.0, 0.6  # pixels, of the height too, and height per width
ABOUT = "Lower and further left is better. Each grey one is in neither better than some green one."
#: settings of matplotlib; names of the theme stand for their colours
SETTINGS = """\
text.color ink
axes.labelcolor ink
xtick.color ink
ytick.color ink
axes.edgecolor faint
axes.facecolor paper
figure.facecolor paper
grid.color line
grid.linewidth 0.6
axes.grid True
axes.axisbelow True
axes.spines.top False
axes.spines.right False
axes.titlelocation left
axes.titlesize medium
lines.markersize 5
"""
#: where a name may be, as seen from its point: 1 or -1 to the right, and upwards
WAYS = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0))
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{}</title>
<style>body{{margin:0}}svg{{display:block;width:100%;max-width:1100px;min-width:600px;height:auto;
margin:auto}}</style>
{}</html>
"""
#: name, memory, bubble, and whether no other has less of one and not more of the other
Point: TypeAlias = tuple[str, float, float, bool]


def paint(points: Sequence[Point], look: Look, suffix: str, title: str, limit: float) -> bytes:
    """A ``.svg``, ``.png``, ``.pdf`` or ``.html``; ``limit`` is what a rank may hold."""
    width = look.width or WIDTH
    colours = palette(1, bool(look.dark))
    rows = map(str.split, SETTINGS.splitlines())
    settings = {key: colours.get(value, value) for key, value in rows}
    settings["font.size"] = "7" if look.paper or width < 500 else "9"
    with rc_context(RcParams(settings)):
        figure = Figure((width / 96, max(width * SHAPE, LEAST) / 96), layout="constrained")
        lines = (_wrapped(line, width - 80) for line in [*title.splitlines(), ABOUT])
        heading = "" if look.paper else "\n".join(lines)
        _draw(figure, points, heading, limit, colours)
        drawn = figure_bytes(figure, ".svg" if suffix == ".html" else suffix, None)
    if look.dark is None and b"<svg" in drawn:
        drawn = drawn.replace(b"<defs>", f"<style>{_dark()}</style><defs>".encode(), 1)
    if suffix != ".html":
        return drawn
    return PAGE.format(escape(title), drawn[drawn.index(b"<svg") :].decode()).encode()


def _draw(
    figure: Figure,
    points: Sequence[Point],
    title: str,
    limit: float,
    colours: Mapping[str, str],
) -> None:
    width = 96 * figure.get_figwidth()
    most = max(memory for _, memory, _, _ in points)
    unit = size_text(most).split()[1] if most >= 4096 else "B"
    scale = 1024.0 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    names: defaultdict[tuple[bool, float, float], list[str]] = defaultdict(list)
    for name, memory, bubble, is_best in points:
        names[not is_best, -memory / scale, bubble].append(name)
    right = 1.06 * max(most, limit if isfinite(limit) else 0.0) / scale
    top = 1.1 * max(0.01, *(bubble for _, _, bubble, _ in points))
    held = "microbatches of its share of the model" if unit == "B" else unit
    axes = figure.subplots()
    axes.set(
        title=title,
        xlim=(0, right),
        ylim=(-0.1 * top, top),
        xlabel=_wrapped(f"memory: the most that a rank holds, in {held}", width - 80),
        ylabel="bubble: idle share of the time",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1, int(top < 0.05)))
    corners = [(right, 0.0)]
    for other, left, y in sorted(names):
        axes.plot(-left, y, "o", color=colours["faint" if other else "curve"])
        if not other:
            corners += [(corners[-1][0], y), (-left, y)]
    corners = [*corners[1:], (corners[-1][0], top)]
    axes.plot(*zip(*corners, strict=True), color=colours["curve"], zorder=1.5)
    figure.draw_without_rendering()  # places in pixels follow from the layout
    pixels = axes.transData
    taken = [_box(pixels.transform(ends), 2) for ends in pairwise(corners)]
    taken += [_box(pixels.transform([(-left, y)]), 5) for _, left, y in names]
    if isfinite(limit):
        line = [(limit / scale, 0.0), (limit / scale, top)]
        axes.plot(*zip(*line, strict=True), "--", color=colours["mark"])
        what = f"\xa0a rank may hold {number(limit / scale)}"
        text = axes.text(*line[1], what, va="top", color=colours["mark"])
        taken += [text.get_window_extent(), _box(pixels.transform(line), 2)]
    _write(axes, names, taken, colours, width / 4)


def _write(
    axes: Axes,
    names: Mapping[tuple[bool, float, float], Sequence[str]],
    taken: Sequence[BboxBase],
    colours: Mapping[str, str],
    space: float,
) -> None:
    """Write names beside their points, where nothing is taken yet."""
    pixels = axes.transData
    boxes = list(taken)
    ground = {"facecolor": colours["paper"], "linewidth": 0, "pad": 0.5}
    for (other, left, y), group in sorted(names.items()):
        colour = colours["faint" if other else "ink"]
        label = _wrapped(", ".join(group), space)
        text = axes.text(-left, y, label, ha="center", va="center", color=colour)
        spot = _box(pixels.transform([(-left, y)]), 0.1)
        box = _beside(spot, text.get_window_extent(), axes.bbox, boxes)
        boxes.append(Bbox.union([box, spot]))
        middle = pixels.inverted().transform(box.get_points().mean(0))
        text.set(position=middle, bbox=ground)
        axes.plot((-left, middle[0]), (y, middle[1]), color=colours["faint"], lw=0.5, zorder=1)


def _box(points: ArrayLike, pad: float) -> BboxBase:
    """What is around points."""
    places = array(points)
    return Bbox([places.min(0), places.max(0)]).padded(pad)


def _beside(
    spot: BboxBase, size: BboxBase, inside: BboxBase, taken: Sequence[BboxBase]
) -> BboxBase:
    """The nearest box for a text of this size around a spot that is over nothing that is taken and
    with nothing between, or over least of it.
    """
    boxes = [
        size.translated(right * (step + size.width / 2), up * (step + size.height / 2))
        for step in range(7, 160, 8)
        for right, up in WAYS
    ]

    def over(box: BboxBase) -> int:
        is_inside = inside.count_contains(box.get_points()) == 2
        between = Bbox.union([box, spot]).count_overlaps(taken)
        return 3 * box.count_overlaps(taken) + between + 99 * (not is_inside)

    return min(boxes, key=over)


def _wrapped(text: str, space: float) -> str:
    return "\n".join(wrapped(text, 13, space))


def _dark() -> str:
    """The rules by which a light figure follows a reader in dark mode."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in map(
            THEME.__getitem__, ("paper", "ink", "faint", "line", "curve", "mark")
        )
        for what in ("fill", "stroke")
    ]
    return f"@media(prefers-color-scheme:dark){{{''.join(rules)}}}"
