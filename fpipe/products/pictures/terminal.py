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
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import ceil, floor
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from ...actions import OPS, number
from . import labels
from .colours import ink, palette
from .scene import Lane, Scenes
from .shapes import busy, shares

#: (detail, how many lines of text it may fill, 0 for one panel), best first; the first that is
#: short enough is drawn
LAYOUTS = (
    (3, 0),
    (2, 0),
    (3, 24),
    (2, 50),
    (2, 400),
)
_MOST_CELLS = 1e9  #: of a picture: shorter actions are drawn as long as this
WIDEST_CELL = 10  # columns for a short bar of a small schedule

Cell: TypeAlias = tuple[str, str]  #: a character, and the key of its ground or ""


class _Layout(NamedTuple):
    """Columns per unit of time, columns to a panel, and how many panels there are."""

    colours: str
    margin: int
    detail: int
    scale: float
    columns: int
    panels: int


def paint(scenes: Scenes, width: int = 160, colours: str = "") -> str:
    """The text of a picture ``width`` columns wide, plain or with ``"256"`` or ``"truecolor"``."""
    layout = _layout(scenes, width, colours)
    rows = [[_row(lane, layout) for lane in scene.lanes] for scene in scenes]
    last = ceil(max(scene.total for scene in scenes) * layout.scale - 1e-9)
    lines: list[list[Cell]] = []
    for first in range(0, layout.panels * layout.columns, layout.columns):
        stop = min(first + layout.columns, last)
        axis = _cells(_axis(layout, first, stop))
        lines += [[], axis] if first else []
        for scene, lanes in zip(scenes, rows, strict=True):
            if first == 0:
                lines += [_cells(labels.title(scene)[:width]), axis]
            elif len(scenes) > 1:
                lines.append(_cells(scene.name[:width]))
            for rank, row in enumerate(lanes):
                label = f"rank {rank}" if layout.margin > 6 else str(rank)
                lines.append(_cells(label.ljust(layout.margin)) + row[first:stop])
    lines.append([])
    for scene in scenes:
        head = f"{scene.name}: " if len(scenes) > 1 else ""
        for note in labels.notes(scene):
            lines += map(_cells, wrap(head + note, width, subsequent_indent="  "))
            head = ""
    lines += _legend(scenes, layout, width)
    grounds = palette(max(scene.shades for scene in scenes))
    return "".join(_text(line, grounds, colours) for line in lines)


def _cells(text: str, key: str = "") -> list[Cell]:
    return [(char, key) for char in text]


# ---- layout ----
def _layout(scenes: Scenes, width: int, colours: str) -> _Layout:
    ranks = max(len(scene.lanes) for scene in scenes)
    margin = len(str(ranks - 1)) + (6 if width >= 50 else 1)
    columns = max(width - margin, 8)
    total = max(scene.total for scene in scenes)
    cell = max(min(scene.cell for scene in scenes), total / _MOST_CELLS)
    cells = total / cell
    unclear = not colours and max(scene.shades for scene in scenes) > 1  # without stages
    for detail, budget in LAYOUTS:
        names = (name for scene in scenes for name in labels.short_names(scene, detail))
        need = max(map(len, names)) + 1
        if columns < need or (unclear and (detail, budget) == (2, 0)):
            continue
        panels = ceil(cells * need / (columns // need * need) - 1e-9)
        if panels <= 1:  # whole columns per cell where they fill most of the width
            wide = min(columns / cells, WIDEST_CELL) if cells else WIDEST_CELL
            wide = floor(wide + 1e-9) if wide >= 2 else wide
            return _Layout(colours, margin, detail, wide / cell, columns, 1)
        if panels * sum(len(scene.lanes) + 2 for scene in scenes) <= budget:
            even = ceil(cells / panels - 1e-9) * need  # cut between cells
            return _Layout(colours, margin, detail, need / cell, even, panels)
    scale = columns / cells / cell if cells else 1.0
    return _Layout(colours, margin, 0, scale, columns, 1)


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
def _row(lane: Lane, layout: _Layout) -> list[Cell]:
    """The cells of a lane in all panels."""
    if layout.detail == 0:
        return _overview(lane, layout)
    mark = ""
    fill = "-"
    idle = "."
    if layout.colours:
        mark = "▏"
        fill = " "
        idle = " "
    row = _cells(idle * (layout.columns * layout.panels))
    for bar in lane.bars:
        start = round(bar.start * layout.scale)
        wide = min(round(bar.end * layout.scale), len(row)) - start
        count = len(bar.kinds)
        for k, part in enumerate(bar.action.parts):
            a = start + wide * k // count
            b = start + wide * (k + 1) // count
            low, high = _piece(a, b, layout.columns)
            label = labels.name(part, layout.detail)
            end = ""
            if not layout.colours:
                if layout.detail < 3:
                    label = _by_chunk(label, bar.kinds[k])
                end = " " if k + 1 == count else "&"
            text = fill * low + (mark + label)[: high - low]
            text = text.ljust(b - a - len(end), fill) + end
            row[a:b] = _cells(text[: b - a], bar.colours[k])
    return row


def _by_chunk(label: str, colour: str) -> str:
    """The label of an action: small letters for every second chunk of a rank."""
    if int(colour[1:]) % 2:
        return label.lower()
    return label


def _piece(a: int, b: int, columns: int) -> tuple[int, int]:
    """The larger piece of a bar that the edge of a panel cuts, counted from its start; all of one
    that it does not.
    """
    cut = min((a // columns + 1) * columns, b)
    if cut - a >= b - cut:
        return 0, cut - a
    return cut - a, b - a


def _overview(lane: Lane, layout: _Layout) -> list[Cell]:
    """For each column the kind of work with most time not yet shown, or idle time. So an op that
    takes a third of the time gets a third of the columns, and short ones appear too.
    """
    owed: defaultdict[str, float] = defaultdict(float)
    edges = [column / layout.scale for column in range(layout.columns + 1)]
    cells: list[Cell] = []
    for column in shares(busy(lane, painted=bool(layout.colours)), edges):
        column[""] = 1 - sum(column.values())
        for key, share in column.items():
            owed[key] += share
        key = max((key for key in column if column[key] > 0), key=owed.__getitem__, default="")
        owed[key] -= 1
        letter = " " if layout.colours else _by_chunk(key[0], key) if key else "."
        cells.append((letter, key))
    return cells


# ---- the legend, and colours ----
def _legend(scenes: Scenes, layout: _Layout, width: int) -> Iterator[list[Cell]]:
    """The lines of the legend."""
    shades = max(scene.shades for scene in scenes)
    entries = [*labels.kinds(scenes, shades)]
    if layout.colours:
        entries += [entry for scene in scenes for entry in labels.tints(scene)]
    items: list[list[Cell]] = []
    for keys, text in entries:
        letter = keys[0][0] if keys[0][0] in OPS else " "
        swatch = [cell for key in keys for cell in _cells(f"{letter} ", key)]
        if not layout.colours:
            swatch = swatch[:1]
        items.append(swatch + _cells(f" {text}"))
    if not layout.colours and shades == 2 and layout.detail < 3:
        items.append(_cells("small letters: a rank's other stage"))
    line: list[Cell] = []
    for item in items:
        if line and len(line) + 2 + len(item) > width:
            yield line
            line = []
        line += _cells("  " if line else "") + item[:width]
    yield line


def _text(line: list[Cell], grounds: Mapping[str, str], colours: str) -> str:
    text = ""
    for key, run in groupby(line, lambda cell: cell[1]):
        chars = "".join(char for char, _ in run)
        if key and colours:
            from rich.console import COLOR_SYSTEMS  # slow, and not needed for plain text
            from rich.style import Style

            style = Style(color=ink(grounds[key]), bgcolor=grounds[key])
            chars = style.render(chars, color_system=COLOR_SYSTEMS[colours])
        text += chars
    return text.rstrip(" ") + "\n"
