# SPDX-License-Identifier: Apache-2.0
"""Bubble against memory of many schedules: a figure of matplotlib whose names do not overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise, product
from math import cos, pi, sin
from operator import itemgetter
from typing import TypeAlias

from matplotlib import RcParams, rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import BboxBase
from numpy import array
from numpy.typing import ArrayLike

from ...actions import number
from .colours import THEME, palette
from .labels import size_text, wrapped
from .plotting import figure_bytes
from .scene import Look

WIDTH, LEAST, SHAPE = 768.0, 330.0, 0.6  # pixels, of the height too, and height per width
ABOUT = "Better is lower and further left. No schedule has less of both than those on the line."
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
#: steps away from a point, in pixels, and the eighths of a turn that are tried there
STEPS, EIGHTHS = range(7, 160, 8), (0, 1, 7, 2, 6, 3, 5, 4)
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{}</title>
<style>body{{margin:0}}svg{{display:block;width:100%;max-width:1100px;min-width:600px;height:auto;
margin:auto}}</style>
{}</html>
"""
#: name, memory, bubble, and whether no other has less of one and not more of the other
Point: TypeAlias = tuple[str, float, float, bool]
Place: TypeAlias = tuple[float, float]
Box: TypeAlias = Sequence[float]  #: left, foot, right, top in pixels


def paint(
    points: Sequence[Point], look: Look, suffix: str, title: str, limit: float | None
) -> bytes:
    """A ``.svg``, ``.png``, ``.pdf`` or ``.html``; ``limit`` is what a rank may hold."""
    width = look.width or WIDTH
    colours = palette(1, bool(look.dark))
    rows = map(str.split, SETTINGS.splitlines())
    settings = {key: colours.get(value, value) for key, value in rows}
    settings["font.size"] = "7" if look.paper or width < 500 else "9"
    with rc_context(RcParams(settings)):
        figure = Figure((width / 96, max(width * SHAPE, LEAST) / 96), layout="constrained")
        heading = "" if look.paper else f"{title}\n{_wrapped(ABOUT, width - 80)}"
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
    limit: float | None,
    colours: Mapping[str, str],
) -> None:
    width = 96 * figure.get_figwidth()
    most = max(memory for _, memory, _, _ in points)
    unit = size_text(most).split()[1] if most >= 4096 else "B"
    scale = 1024.0 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    names: defaultdict[tuple[bool, Place], list[str]] = defaultdict(list)
    for name, memory, bubble, is_best in points:
        names[not is_best, (memory / scale, bubble)].append(name)
    right = 1.06 * max(most, limit or 0.0) / scale
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
    best = sorted(place for other, place in names if not other)
    corners = [(best[0][0], top)]
    for x, y in [*best, (right, best[-1][1])]:
        corners += [(x, corners[-1][1]), (x, y)]
    axes.plot(*zip(*corners, strict=True), color=colours["curve"])
    for other, place in names:
        axes.plot(*place, "o", color=colours["faint" if other else "curve"], ms=5)
    figure.draw_without_rendering()  # places in pixels follow from the layout
    pixels = axes.transData
    taken = [_around(ends, 2) for ends in pairwise(pixels.transform(corners))]
    taken += [_around(pixels.transform([place]), 5) for _, place in names]
    ground = {"facecolor": colours["paper"], "linewidth": 0, "pad": 0.5}
    drawn: list[Box] = [(0.0, 0.0, 0.0, 0.0)]
    if limit:
        axes.plot([limit / scale] * 2, [0, top], "--", color=colours["mark"])
        what = f" a rank may hold {number(limit / scale)}"
        text = axes.text(limit / scale, top, what, va="top", color=colours["mark"])
        line = pixels.transform([(limit / scale, 0), (limit / scale, top)])
        taken += [_around(line, 2), _around(text.get_window_extent().get_points(), 0)]
    for (other, place), group in sorted(names.items(), key=_from_right):
        colour = colours["faint" if other else "ink"]
        label = _wrapped(", ".join(group), width / 4)
        text = axes.text(*place, label, ha="center", va="center", color=colour)
        at, size = (*pixels.transform(place),), text.get_window_extent()
        found = _beside(at, size, axes.bbox, taken, drawn)
        drawn += found
        taken += found
        middle = pixels.inverted().transform(array(found[0]).reshape(2, 2).mean(0))
        text.set(position=middle, bbox=ground)
        axes.plot(*zip(place, middle, strict=True), color=colours["faint"], lw=0.5, zorder=1)


def _beside(
    at: Box, size: BboxBase, inside: BboxBase, taken: Sequence[Box], drawn: Sequence[Box]
) -> list[Box]:
    """The nearest box for a text of this size beside a point that is over nothing that is taken,
    or over least of it, and pieces of the line to it, which are over nothing that was drawn for
    other points.
    """
    x, y = at
    half = size.width / 2, size.height / 2
    found: list[tuple[int, list[Box]]] = []
    for step, eighth in product(STEPS, EIGHTHS):
        to_x = x + round(cos(eighth * pi / 4)) * (step + half[0])
        to_y = y + round(sin(eighth * pi / 4)) * (step + half[1])
        box = to_x - half[0], to_y - half[1], to_x + half[0], to_y + half[1]
        ways = [(x + k * (to_x - x) / 20, y + k * (to_y - y) / 20) for k in range(20)]
        line = [(a - 1, b - 1, a + 1, b + 1) for a, b in ways]
        line = [piece for piece in line if not _overlaps([piece], [box])]
        over = _overlaps([box], taken) + _overlaps(line, drawn)
        over += 99 * (not inside.contains(*box[:2])) + 99 * (not inside.contains(*box[2:]))
        found.append((over, [box, *line]))
        if not over:
            break
    return min(found, key=itemgetter(0))[1]


def _from_right(named: tuple[tuple[bool, Place], object]) -> tuple[bool, float]:
    (other, (x, _)), _ = named
    return other, -x


def _around(points: ArrayLike, pad: float) -> Box:
    return (*(array(points).min(0) - pad), *(array(points).max(0) + pad))


def _overlaps(boxes: Sequence[Box], others: Sequence[Box]) -> int:
    """How many pairs overlap."""
    a, b = array(boxes)[:, None], array(others)
    return int(((a[..., :2] < b[:, 2:]) & (b[:, :2] < a[..., 2:])).all(-1).sum())


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
