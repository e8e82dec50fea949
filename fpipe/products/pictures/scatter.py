# SPDX-License-Identifier: Apache-2.0
"""Time against memory of many schedules: a figure of matplotlib whose names do not overlap."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from math import isfinite

from matplotlib import RcParams, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox
from numpy import array, clip
from numpy.typing import ArrayLike

from ...actions import number
from .colours import THEME, palette
from .html import page
from .labels import size_text, wrapped
from .plotting import figure_bytes, write
from .scene import BYTES, Look, TimeAndMemory

WIDTH, SHAPE = 768.0, 0.6  # pixels, of the height too, and height per width
PAD = 0.12  # inches around the figure
PAGE = 900.0
PHONE = 370.0
LINE = 20.0
ABOUT = (
    "Lower left is better: for each grey schedule a green one takes no more time and "
    "no more memory."
)
TAKE = "The ring marks the one to take."
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
lines.markersize 5
"""
#: where a name may be, as seen from its point: 1 or -1 to the right, and upwards; first to the left
#: for green points, as no point is to the lower left of them
WAYS = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0))


def paint(
    points: Sequence[TimeAndMemory],
    look: Look,
    suffix: str,
    title: str,
    limit: float,
    take: str = "",
    below: str = "",
) -> bytes:
    """A ``.svg``, ``.png``, ``.pdf`` or ``.html``; ``limit`` is what a rank may hold, and ``take``
    the name of the point to take. A page has the HTML ``below`` the picture.
    """
    said = [*title.splitlines(), ABOUT, *[TAKE] * bool(take)]
    if suffix != ".html":
        return _figure(points, look, suffix, [] if look.paper else said, limit, take)
    parts = [f"<h2>{escape(said[0])}</h2>", *(f"<p>{escape(line)}</p>" for line in said[1:])]
    for kind, width in (("wide", look.width or PAGE), ("narrow", PHONE)):
        drawn = _figure(points, replace(look, width=width), ".svg", [], limit, take)
        picture = drawn[drawn.index(b"<svg") :].decode()
        parts.append(
            picture.replace("<svg", f'<svg class="{kind}" style="width:100%;height:auto"', 1)
        )
    return page(said[0], "".join([*parts, below]), look.dark).encode()


def _figure(
    points: Sequence[TimeAndMemory],
    look: Look,
    suffix: str,
    said: Sequence[str],
    limit: float,
    take: str,
) -> bytes:
    """A picture below these lines."""
    width = look.width or WIDTH
    colours = palette(1, bool(look.dark))
    rows = map(str.split, SETTINGS.splitlines())
    settings = {key: colours.get(value, value) for key, value in rows}
    settings["font.size"] = "7" if look.paper or width < 500 else "9"
    with rc_context(RcParams(settings)):
        heading = [part for line in said for part in wrapped(line, 13, width - 80)]
        # below the heading a narrow one is higher than wide: names need room
        height = max(width * SHAPE, (330.0 if look.paper else 440.0) + LINE * len(heading))
        figure = Figure((width / 96, height / 96))
        figure.set_layout_engine("constrained", w_pad=PAD, h_pad=PAD)
        _draw(figure, points, heading, limit, take, colours)
        drawn = figure_bytes(figure, suffix, look, None)
    if look.dark is None and suffix == ".svg":
        drawn = drawn.replace(b"<defs>", f"<style>{_dark()}</style><defs>".encode(), 1)
    return re.sub(rb'<g id="([^"]*: total [^"]*)">', rb"<g><title>\1</title>", drawn)


def _draw(
    figure: Figure,
    points: Sequence[TimeAndMemory],
    heading: Sequence[str],
    limit: float,
    take: str,
    colours: Mapping[str, str],
) -> None:
    width = 96 * figure.get_figwidth()
    most = max(memory for _, memory, _, _ in points)
    unit = size_text(most).split()[1] if most >= BYTES else "B"
    scale = 1024.0 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    names: defaultdict[tuple[bool, float, float], list[str]] = defaultdict(list)
    for name, memory, total, is_best in points:
        names[not is_best, -memory / scale, total].append(name)
    right = 1.06 * max(most, limit if isfinite(limit) else 0.0) / scale
    totals = [total for _, _, total, _ in points]
    pad = 0.1 * (max(totals) - min(totals) or max(totals))
    foot, top = min(totals) - 2 * pad, max(totals) + pad  # names fit below the last point
    held = "microbatches of its share of the model" if unit == "B" else unit
    axes = figure.subplots()
    axes.set(
        xlim=(0, right),
        ylim=(foot, top),
        xlabel="\n".join(wrapped(f"memory: the most that a rank holds, in {held}", 13, width - 80)),
        ylabel="total: the time of a step (axis not from 0)",
    )
    if heading:
        write(axes, heading[1:], top, 1, fontsize=8)
        write(axes, heading[:1], top, len(heading), size="large", weight="bold")
    corners = [(right, min(totals))]
    for other, left, y in sorted(names):
        colour = colours["faint" if other else "curve"]
        at = f"{', '.join(names[other, left, y])}: total {number(y)}, memory {number(-left)}"
        axes.plot(-left, y, "o", color=colour, gid=at, zorder=5)
        if take in " ".join(names[other, left, y]).split():
            axes.plot(-left, y, "o", color=colours["mark"], fillstyle="none", markersize=12)
        if not other:
            corners += [(corners[-1][0], y), (-left, y)]
    corners = [*corners[1:], (corners[-1][0], top)]
    axes.plot(*zip(*corners, strict=True), color=colours["curve"], zorder=1.5)
    figure.draw_without_rendering()  # places in pixels follow from the layout
    pixels = axes.transData
    taken = [_box(pixels.transform(ends), 2) for ends in pairwise(corners)]
    taken += [_box(pixels.transform([(-left, y)]), 8) for _, left, y in names]
    if isfinite(limit):
        taken += _limit(axes, limit / scale, foot, top, colours["mark"])
    _write(axes, names, taken, colours, width / 4)


def _limit(axes: Axes, limit: float, foot: float, top: float, colour: str) -> Sequence[Bbox]:
    """Draw the line of what a rank may hold; what it and its text take."""
    line = [(limit, foot), (limit, top)]
    axes.plot(*zip(*line, strict=True), "--", color=colour)
    axes.axvspan(limit, axes.get_xlim()[1], color=colour, alpha=0.06, linewidth=0, zorder=4)
    text = axes.text(limit, top, f"\xa0a rank may hold {number(limit)}", va="bottom", color=colour)
    return text.get_window_extent(), _box(axes.transData.transform(line), 2)


def _write(
    axes: Axes,
    names: Mapping[tuple[bool, float, float], Sequence[str]],
    taken: Sequence[Bbox],
    colours: Mapping[str, str],
    space: float,
) -> None:
    """Write names beside their points, where nothing is taken yet."""
    pixels = axes.transData
    boxes = list(taken)
    ground = {"facecolor": colours["paper"], "linewidth": 0, "pad": 0.5}
    for (other, left, y), group in sorted(names.items()):
        colour = colours["faint" if other else "ink"]
        label = "\n".join(wrapped(", ".join(group), 13, space))
        text = axes.text(-left, y, label, ha="center", va="center", color=colour)
        size = text.get_window_extent()
        ways = WAYS if other else WAYS[::-1]
        box, leader = _beside(pixels.transform((-left, y)), size, axes.bbox, boxes, ways)
        boxes += [box, leader.get_extents()]
        text.set(position=pixels.inverted().transform(box.get_points().mean(0)), bbox=ground)
        ends = pixels.inverted().transform(leader.vertices).T
        axes.plot(*ends, color=colours["faint"], lw=0.5, zorder=1)


def _box(points: ArrayLike, pad: float) -> Bbox:
    """What is around points."""
    places = array(points)
    return Bbox([places.min(0), places.max(0)]).padded(pad)


def _beside(
    spot: ArrayLike,
    size: Bbox,
    inside: Bbox,
    taken: Sequence[Bbox],
    ways: Sequence[tuple[int, int]],
) -> tuple[Bbox, Path]:
    """The nearest box for a text of this size around a spot, and the line from the spot to it, that
    are over nothing that is taken, or over least of it.
    """
    boxes = [
        size.translated(right * (step + size.width / 2), up * (step + size.height / 2))
        for step in range(9, 160, 8)
        for right, up in ways
    ]
    places = [(box, Path(array([spot, clip(spot, box.min, box.max)]))) for box in boxes]

    def over(place: tuple[Bbox, Path]) -> int:
        box, line = place
        crossed = sum(line.intersects_bbox(one, False) for one in taken)
        is_inside = inside.count_contains(box.get_points()) == 2
        return 3 * box.count_overlaps(taken) + 2 * crossed + 99 * (not is_inside)

    return min(places, key=over)


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
