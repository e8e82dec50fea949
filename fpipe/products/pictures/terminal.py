# SPDX-License-Identifier: Apache-2.0
"""A timeline as text: lanes of labelled cells that fit the width, in colour or in plain ASCII.

The width decides the labels: full names (``3F2``) if the picture stays small, else op and
microbatch (``F2``). A picture longer than a line is cut into panels, one under the other, like
lines of music; one that would fill too many screens becomes an overview, in which a column shows
the op that takes most of its time. Plain text is ASCII; there the second chunk of a rank has small
letters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from math import ceil, floor
from textwrap import wrap
from typing import Literal, NamedTuple, TypeAlias

from ...actions import OPS, number
from . import labels
from .colours import ink, palette
from .scene import Lane, Scene, Scenes
from .shares import busy, shares

#: (detail, how many lines of text it may fill, 0 for one panel), best first; the first that is
#: short enough is drawn
LAYOUTS = ((3, 0), (2, 0), (3, 24), (2, 50), (2, 400))
WIDEST_CELL = 10  # columns for a short bar of a small schedule

Colours: TypeAlias = Literal["256", "truecolor"] | None  #: a system of rich, or plain text
Pair: TypeAlias = tuple[str, str]  # the colours of a letter and of its ground


class Cell(NamedTuple):
    """A character and its colours."""

    char: str
    colours: Pair | None = None


class _Layout(NamedTuple):
    """Columns per unit of time, columns to a panel, and how many panels there are."""

    colours: Colours
    margin: int
    detail: int
    scale: float
    columns: int
    panels: int


def paint(scenes: Scenes, width: int = 160, colours: Colours = None) -> str:
    """The text of a picture ``width`` columns wide."""
    layout = _layout(scenes, width, colours)
    rows = [[_row(lane, scene, layout) for lane in scene.lanes] for scene in scenes]
    last = ceil(max(scene.total for scene in scenes) * layout.scale - 1e-9)
    lines: list[list[Cell]] = []
    for panel in range(layout.panels):
        first = panel * layout.columns
        stop = min(first + layout.columns, last)
        axis = _cells(_axis(layout, first, stop))
        lines += [[], axis] if panel else []
        for scene, lanes in zip(scenes, rows, strict=True):
            if panel == 0:
                lines += [_cells(labels.title(scene)[:width]), axis]
            elif len(scenes) > 1:
                lines.append(_cells(scene.name[:width]))
            for rank, row in enumerate(lanes):
                label = f"rank {rank}" if layout.margin > 6 else str(rank)
                lines.append([*_cells(label.ljust(layout.margin)), *row[first:stop]])
    lines.append([])
    for scene in scenes:
        head = f"{scene.name}: " if len(scenes) > 1 else ""
        for note in labels.notes(scene):
            lines += map(_cells, wrap(head + note, width, subsequent_indent="  "))
            head = ""
    lines += _legend(scenes, layout, width)
    return _text(lines, colours)


def _cells(text: str, colours: Pair | None = None) -> list[Cell]:
    return [Cell(char, colours) for char in text]


# ---- layout ----
def _layout(scenes: Scenes, width: int, colours: Colours) -> _Layout:
    ranks = max(len(scene.lanes) for scene in scenes)
    margin = len(str(ranks - 1)) + (6 if width >= 50 else 1)
    columns = max(width - margin, 8)
    end = max(scene.total for scene in scenes)
    cell = min(scene.cell for scene in scenes)
    unclear = not colours and max(scene.shades for scene in scenes) > 1  # without stages
    for detail, budget in LAYOUTS:
        need = max(len(name) for scene in scenes for name in labels.short_names(scene, detail)) + 1
        if columns < need or (unclear and (detail, budget) == (2, 0)):
            continue
        panels = ceil(end / cell * need / (columns // need * need) - 1e-9)
        if panels <= 1:
            return _Layout(colours, margin, detail, _filling(end, cell, columns), columns, 1)
        if panels * sum(len(scene.lanes) + 2 for scene in scenes) <= budget:
            even = ceil(end / cell / panels - 1e-9) * need  # cut between cells
            return _Layout(colours, margin, detail, need / cell, even, panels)
    return _Layout(colours, margin, 0, columns / end if end else 1.0, columns, 1)


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
    row = _cells((" " if layout.colours else ".") * (layout.columns * layout.panels))
    pairs = _pairs(scene.shades)
    for bar in lane.bars:
        start, stop = round(bar.start * layout.scale), min(round(bar.end * layout.scale), len(row))
        count = len(bar.colours)
        for k, part in enumerate(bar.action.parts):
            a, b = (start + (stop - start) * at // count for at in (k, k + 1))
            low, high = _piece(a, b, layout.columns)
            label = labels.name(part, layout.detail)
            if layout.colours:
                text = (" " * low + f"▏{label}"[: high - low]).ljust(b - a)
                row[a:b] = _cells(text, pairs[bar.painted[k]])
            else:
                label = _by_chunk(label, bar.colours[k]) if layout.detail < 3 else label
                end = " " if k + 1 == count else "&"
                text = ("-" * low + label[: high - low]).ljust(b - a - 1, "-") + end
                row[a:b] = _cells(text[: b - a])
    return row


@cache
def _pairs(shades: int) -> dict[str, Pair]:
    """The letters and the ground of each colour, on light paper."""
    return {key: (ink(ground), ground) for key, ground in palette(shades).items()}


def _by_chunk(label: str, colour: str) -> str:
    """The label of an action: small letters for every second chunk of a rank."""
    return label.lower() if int(colour[1:]) % 2 else label


def _piece(a: int, b: int, columns: int) -> tuple[int, int]:
    """The larger piece of a bar that the edge of a panel cuts, counted from its start; all of one
    that it does not.
    """
    cut = min((a // columns + 1) * columns, b)
    return (0, cut - a) if cut - a >= b - cut else (cut - a, b - a)


def _overview(lane: Lane, scene: Scene, layout: _Layout) -> list[Cell]:
    """Each column shows what takes most of its time."""
    shown = _dominant(lane, layout)
    if layout.colours:
        pairs = _pairs(scene.shades)
        return [Cell(" ", pairs[key] if key else None) for key in shown]
    return [Cell(_by_chunk(key[0], key) if key else ".") for key in shown]


def _dominant(lane: Lane, layout: _Layout) -> Iterator[str]:
    """For each column the colour to show, or empty for idle: the one with most time not yet shown.
    So an op that takes a third of the time gets a third of the columns, and short ones appear too.
    """
    owed: defaultdict[str, float] = defaultdict(float)
    edges = [column / layout.scale for column in range(layout.columns + 1)]
    for column in shares(busy(lane, painted=bool(layout.colours)), edges):
        present = {**column, "": 1 - sum(column.values())}
        for key, share in present.items():
            owed[key] += share
        shown = max((key for key in present if present[key] > 0), key=owed.__getitem__, default="")
        owed[shown] -= 1
        yield shown


# ---- the legend, and colours ----
def _legend(scenes: Scenes, layout: _Layout, width: int) -> Iterator[list[Cell]]:
    """The lines of the legend."""
    shades = max(scene.shades for scene in scenes)
    pairs = _pairs(shades)
    items: list[list[Cell]] = []
    for colours, text, _ in _entries(scenes, shades, layout):
        letter = colours[0][0] if colours[0][0] in OPS else " "
        if layout.colours:
            swatch = [cell for key in colours for cell in _cells(f"{letter} ", pairs[key])]
        else:
            swatch = [Cell(letter)]
        items.append([*swatch, *_cells(f" {text}")])
    if not layout.colours and shades == 2 and layout.detail < 3:
        items.append(_cells("small letters: a rank's other stage"))
    line: list[Cell] = []
    for item in items:
        if line and len(line) + 2 + len(item) > width:
            yield line
            line = []
        line += _cells("  " if line else "") + item[:width]
    yield line


def _entries(scenes: Scenes, shades: int, layout: _Layout) -> Iterator[labels.Entry]:
    yield from labels.kinds(scenes, shades)
    if layout.colours:
        for scene in scenes:
            yield from labels.tints(scene)


def _text(lines: Sequence[list[Cell]], colours: Colours) -> str:
    for line in lines:
        while line and line[-1] == Cell(" "):
            line.pop()
    if not colours:
        return "".join("".join(cell.char for cell in line) + "\n" for line in lines)
    from rich.color import ColorSystem  # slow, and not needed for plain text
    from rich.style import Style

    system = ColorSystem.TRUECOLOR if colours == "truecolor" else ColorSystem.EIGHT_BIT
    text = ""
    for line in lines:
        for pair, run in groupby(line, lambda cell: cell.colours):
            chars = "".join(cell.char for cell in run)
            if pair:
                style = Style(color=pair[0], bgcolor=pair[1])
                chars = style.render(chars, color_system=system)
            text += chars
        text += "\n"
    return text
