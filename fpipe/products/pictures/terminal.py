# SPDX-License-Identifier: Apache-2.0
"""A timeline as text: lanes of labelled cells that fit the width, in colour or in plain ASCII.

The width decides the labels: full names (``3F2``) if the picture stays small, then op and
microbatch (``F2``), then, in colour, the microbatch alone. A picture longer than a line is cut into
panels, one under the other, like lines of music; one that would fill too many screens becomes an
overview, in which a column shows the op that takes most of its time. Plain text is ASCII; there the
second chunk of a rank has small letters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil, floor
from operator import itemgetter
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from ...actions import OPS, number
from . import labels
from .colours import ink, mix, of_256, palette, rgb
from .idle import intervals, shares
from .scene import CAUSES, Lane, Scene, Scenes

#: (detail, how many lines of text it may fill, 0 for one panel), best first; the first that is
#: short enough is drawn
COLOURED = ((3, 0), (2, 0), (1, 0), (3, 12), (2, 50), (1, 60), (2, 130), (1, 320))
PLAIN = ((3, 0), (3, 24), (2, 50), (2, 400))
PLAIN_ONE_CHUNK = ((3, 0), (2, 0), *PLAIN[1:])
WIDEST_CELL = 10  # columns for a short bar of a small schedule

Style: TypeAlias = tuple[str, str] | None  # the colours of a letter and of its ground, or idle
Cell: TypeAlias = tuple[str, Style]


class _Layout(NamedTuple):
    """Columns per unit of time, columns to a panel, and how many panels there are."""

    bits: int  # of colour
    margin: int
    detail: int
    scale: float
    columns: int
    panels: int


def paint(scenes: Scenes, width: int = 160, bits: int = 0) -> str:
    """The text of a picture ``width`` columns wide in 0 (no colours), 8 (256) or 24 ``bits``."""
    layout = _layout(scenes, width, bits)
    rows = [[_row(lane, scene, layout) for lane in scene.lanes] for scene in scenes]
    last = ceil(max(scene.total for scene in scenes) * layout.scale - 1e-9)
    lines: list[str] = []
    for panel in range(layout.panels):
        first = panel * layout.columns
        stop = min(first + layout.columns, last)
        lines += ["", _axis(layout, first, stop)] if panel else []
        for scene, cells in zip(scenes, rows, strict=True):
            if panel == 0:
                lines += [labels.title(scene)[:width], _axis(layout, first, stop)]
            elif len(scenes) > 1:
                lines.append(scene.name[:width])
            for rank, (lane, row) in enumerate(zip(scene.lanes, cells, strict=True)):
                label = f"rank {rank}" if layout.margin > 6 else str(rank)
                lines.append(label.ljust(layout.margin) + _ansi(row[first:stop], bits))
                if lane.carried:
                    label = "  link".ljust(layout.margin)[: layout.margin]
                    lines.append(label + _ansi(_link(lane, layout)[first:stop], bits))
    lines.append("")
    for scene in scenes:
        head = f"{scene.name or 'schedule'}: " if len(scenes) > 1 else ""
        for text in (head + labels.figures(scene), labels.idle(scene), labels.note(scene)):
            lines += wrap(text, width, subsequent_indent="  ")
    lines += _legend(scenes, layout, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


# ---- layout ----
def _layout(scenes: Scenes, width: int, bits: int) -> _Layout:
    ranks = max(len(scene.lanes) for scene in scenes)
    margin = len(str(ranks - 1)) + (6 if width >= 50 else 1)
    columns = max(width - margin, 8)
    end = max(scene.total for scene in scenes)
    cell = min(scene.cell for scene in scenes)
    plain = PLAIN if max(scene.shades for scene in scenes) > 1 else PLAIN_ONE_CHUNK
    for detail, budget in COLOURED if bits else plain:
        need = max(len(name) for scene in scenes for name in labels.short_names(scene, detail)) + 1
        if columns < need:
            continue
        panels = ceil(end / cell * need / (columns // need * need) - 1e-9)
        if panels <= 1:
            return _Layout(bits, margin, detail, _filling(end, cell, columns), columns, 1)
        if panels * sum(len(scene.lanes) + 2 for scene in scenes) <= budget:
            even = ceil(end / cell / panels - 1e-9) * need  # cut between cells
            return _Layout(bits, margin, detail, need / cell, even, panels)
    return _Layout(bits, margin, 0, columns / end if end else 1.0, columns, 1)


def _filling(end: float, cell: float, columns: int) -> float:
    """The scale of a picture in one panel: whole columns per cell where they fill most of the
    width.
    """
    most = columns * cell / end if end else WIDEST_CELL
    return min(floor(most + 1e-9) if most >= 2 else most, WIDEST_CELL) / cell


def _axis(layout: _Layout, first: int, stop: int) -> str:
    """Numbers above the columns ``first`` to ``stop``, each standing over the column of its
    time.
    """
    step = labels.step_of(8 / layout.scale)
    line = " " * layout.margin
    tick = ceil(first / layout.scale / step - 1e-9)
    while (column := round(tick * step * layout.scale)) < stop:
        text = number(tick * step)
        at = layout.margin + column - first
        if len(line) <= at and at + len(text) <= layout.margin + layout.columns:
            line = f"{line:<{at}}{text} "
        tick += 1
    return line


# ---- one lane ----
def _row(lane: Lane, scene: Scene, layout: _Layout) -> list[Cell]:
    """The cells of a lane in all panels."""
    if layout.detail == 0:
        return _overview(lane, scene, layout)
    row: list[Cell] = [(" " if layout.bits else ".", None)] * (layout.columns * layout.panels)
    for bar in lane.bars:
        start, stop = round(bar.start * layout.scale), min(round(bar.end * layout.scale), len(row))
        colours = bar.painted if layout.bits else bar.colours
        count = len(colours)
        for k, (part, colour) in enumerate(zip(bar.action.parts, colours, strict=True)):
            a, b = (start + (stop - start) * at // count for at in (k, k + 1))
            label, (low, high) = labels.name(part, layout.detail), _piece(a, b, layout.columns)
            if layout.bits:
                row[a:b] = _coloured(label, b - a, low, high, palette(scene.shades)[colour])
            else:
                label = _by_chunk(label, colour) if layout.detail < 3 else label
                end = " " if k + 1 == count else "&"
                text = ("-" * low + label[: high - low]).ljust(b - a - 1, "-") + end
                row[a:b] = [(char, None) for char in text[: b - a]]
    return row


def _by_chunk(label: str, colour: str) -> str:
    """The label of an action: small letters for every second chunk of a rank."""
    return label.lower() if int(colour[1:]) % 2 else label


def _piece(a: int, b: int, columns: int) -> tuple[int, int]:
    """The larger piece of a bar that the edge of a panel cuts, counted from its start; all of one
    that it does not.
    """
    cut = min((a // columns + 1) * columns, b)
    return (0, cut - a) if cut - a >= b - cut else (cut - a, b - a)


def _coloured(label: str, width: int, low: int, high: int, ground: str) -> list[Cell]:
    """A bar's cells: a thin line at its left edge, its label in the middle of a piece."""
    style, space = (ink(ground), ground), high - low - len(label)
    text = " " * (low + (space + 1) // 2) + label if space >= 0 else ""
    cells: list[Cell] = [(char, style) for char in text.ljust(width)]
    if space > 0:
        cells[0] = ("▏", (mix(ground, "#000000", 0.45), ground))
    return cells


def _link(lane: Lane, layout: _Layout) -> list[Cell]:
    """What a rank's link carries, under its lane."""
    row: list[Cell] = [(" ", None)] * (layout.columns * layout.panels)
    for start, end, _ in lane.carried:
        a, b = round(start * layout.scale), round(end * layout.scale)
        row[a : max(b, a + 1)] = [(">", None)] * (max(b, a + 1) - a)
    return row


def _overview(lane: Lane, scene: Scene, layout: _Layout) -> list[Cell]:
    """Each column, in colour each half of one, shows what takes most of its time."""
    if not layout.bits:
        shown = _dominant(lane, layout.columns, layout.scale, painted=False)
        letters = (_by_chunk(key[0], key) if key else "." for key in shown)
        return [(letter, None) for letter in letters]
    colours = palette(scene.shades)
    shown = _dominant(lane, 2 * layout.columns, 2 * layout.scale, painted=True)
    halves = [colours.get(key, "") for key in shown]
    cells: list[Cell] = []
    for left, right in zip(halves[::2], halves[1::2], strict=True):
        if left == right:
            cells.append((" ", (ink(left), left) if left else None))
        else:
            cells.append(("▌", (left, right)) if left else ("▐", (right, "")))
    return cells


def _dominant(lane: Lane, columns: int, scale: float, painted: bool) -> Iterator[str]:
    """For each column the colour to show, or empty for idle: the one with most time not yet shown.
    So an op that takes a third of the time gets a third of the columns, and short ones appear too.
    """
    owed: defaultdict[str, float] = defaultdict(float)
    busy = [one for one in intervals(lane, painted) if one[2] not in CAUSES]
    for column in shares(busy, [k / scale for k in range(columns + 1)]):
        column[""] = 1 - sum(column.values())
        for key, share in column.items():
            owed[key] += share
        present = [key for key, share in column.items() if share > 0]
        shown = max(present, key=owed.__getitem__, default="")
        owed[shown] -= 1
        yield shown


# ---- colours ----
def _ansi(cells: Sequence[Cell], bits: int) -> str:
    """Cells of one style as one run: the codes of its colours, its text, and a reset before cells
    without a style.
    """
    text = ""
    for style, run in groupby(cells, itemgetter(1)):
        reset = "\x1b[0m" if text and style is None else ""
        text += (_escape(style, bits) if style else reset) + "".join(char for char, _ in run)
    return text + ("\x1b[0m" if cells and cells[-1][1] else "")


def _escape(style: tuple[str, str], bits: int) -> str:
    codes = "0"
    for layer, colour in zip(("38", "48"), style, strict=True):
        if colour:
            number = "2;{};{};{}".format(*rgb(colour)) if bits >= 24 else f"5;{of_256(colour)}"
            codes += f";{layer};{number}"
    return f"\x1b[{codes}m"


def _legend(scenes: Scenes, layout: _Layout, width: int) -> list[str]:
    shades = max(scene.shades for scene in scenes)
    entries = [*labels.kinds(scenes, shades)]
    if layout.bits:
        entries += (entry for scene in scenes for entry in labels.tints(scene))
    items: list[list[Cell]] = []
    for colours, text, _ in entries:
        letter = colours[0][0] if colours[0][0] in OPS else " "
        swatch: list[Cell] = [(letter, None)]
        if layout.bits:
            grounds = [palette(shades)[colour] for colour in colours]
            swatch = [(" ", (ink(ground), ground)) for ground in grounds for _ in "ab"]
            swatch[0] = letter, swatch[0][1]
        items.append([*swatch, *((char, None) for char in f" {text}")])
    if not layout.bits and shades == 2 and layout.detail < 3:
        items.append([(char, None) for char in "small letters: a rank's other stage"])
    lines: list[list[Cell]] = [[]]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) > width:
            lines.append([])
        lines[-1] += [*item[:width], (" ", None), (" ", None)]
    return [_ansi(line, layout.bits) for line in lines]
