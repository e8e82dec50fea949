# SPDX-License-Identifier: Apache-2.0
"""A timeline as text: lanes of labelled cells that fit the width, in colour or in plain ASCII.

The width decides the labels: full names (``3F2``) if the picture stays small, else op and
microbatch (``F2``). A picture longer than a line is cut into panels, one under the other, like
lines of music; one that would fill more than a screen becomes an overview, in which a column shows
the op that takes most of its time. Plain text is ASCII; there the second chunk of a rank has small
letters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import ceil, floor, inf
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from ...actions import OPS, number
from . import labels
from .colours import ink, palette
from .scene import SAME, Lane, Scene, Scenes, step_of
from .shapes import busy, shares

#: (detail, columns between names, how many lines of text it may fill, 0 for one panel), best first;
#: the first that is short enough is drawn
LAYOUTS = ((3, 1, 0), (2, 1, 0), (2, 0, 0), (3, 1, 24), (2, 1, inf))
LINES = 60  #: of a picture of several panels, if not all of a long one is wanted
_MOST_CELLS = 1e9  #: of a picture: shorter actions are drawn as long as this
WIDEST_CELL = 10  # columns for a short bar of a small schedule
FOLDED = "~"  # where a steady state is left out
#: tint -> its mark below the actions of plain text
ENDS = {f"t{tint}": mark for tint, mark in enumerate("4321=+*%#?")}
#: of the legend of plain text, where a lane has their first character
MARKS = """\
- goes on
& fused
. idle""".splitlines()

Cell: TypeAlias = tuple[str, str]  #: a character, and the key of its ground or ""
Line: TypeAlias = list[Cell]


class _Layout(NamedTuple):
    """Columns per unit of time, columns to a panel, how many panels there are, and columns between
    names. ``below`` is the name of the rows with ``ENDS``, or "".
    """

    colours: str
    below: str
    margin: int
    detail: int
    gap: int
    scale: float
    columns: int
    panels: int

    def column(self, time: float) -> int:
        """Where a time is; halves go up, so that bars of one length are of one width."""
        return floor(time * self.scale + 0.5 + 1e-6)


def paint(
    scenes: Scenes,
    width: int,
    colours: str = "",
    lines: float = LINES,
) -> str:
    """The text of a picture ``width`` columns wide, plain or with a system of colours of rich.

    It has several panels if they fill at most so many ``lines``; one of 0 has no notes.
    """
    width = max(width, 16)
    layout = _layout(scenes, width, colours, lines)
    drawn = [_drawn(scene, layout) for scene in scenes]
    last = ceil(max(scene.length for scene in scenes) * layout.scale - 1e-9)
    text: list[Line] = []
    for first in range(0, layout.panels * layout.columns, layout.columns):
        stop = min(first + layout.columns, last)
        axis = _cells(_axis(layout, scenes[0], first, stop))
        text += [[], axis] if first else []
        for scene, rows in zip(scenes, drawn, strict=True):
            if first == 0:
                text += [[]] * bool(text)  # between scenes
                notes = labels.notes(scene) if lines else ()
                for line in (labels.title(scene), *labels.summary(scene, FOLDED, 16), *notes):
                    text += map(_cells, wrap(line, width, subsequent_indent="  "))
                text += _lines(labels.tints([scene], layout.below), layout, width)
                text.append(axis)
            elif len(scenes) > 1:
                text.append(_cells(scene.name[:width]))
            for rank, lane in enumerate(rows):
                label = f"rank {rank}" if layout.margin > 6 else str(rank)
                for row in lane:
                    text.append(_cells(label.ljust(layout.margin)) + row[first:stop])
                    label = layout.below.rjust(layout.margin - 1) * (layout.margin > 6)
    marks = {char for rows in drawn for lane in rows for row in lane for char, _ in row}
    text += [[], *_legend(scenes, layout, width, marks)]
    grounds = palette(max(scene.shades for scene in scenes))
    return "".join(_text(line, grounds, colours) for line in text)


def _cells(text: str, key: str = "") -> Line:
    return [(char, key) for char in text]


# ---- layout ----
def _layout(
    scenes: Scenes,
    width: int,
    colours: str,
    lines: float,
) -> _Layout:
    ranks = max(len(scene.lanes) for scene in scenes)
    below = ""
    if scenes[-1].against and not colours:
        keys = {key for scene in scenes for key in scene.colours}
        below = "earlier" if any("t0" <= key < f"t{SAME}" for key in keys) else "later"
    margin = len(str(ranks - 1)) + (6 + bool(below) if width >= 50 else 1)
    columns = max(width - margin, 8)
    total = max(scene.length for scene in scenes)
    cell = max(min(scene.cell for scene in scenes), total / _MOST_CELLS)
    cells = total / cell or 1.0
    tall = sum(len(scene.lanes) + 2 for scene in scenes)
    shades = max(scene.shades for scene in scenes)
    unclear = not colours and shades > 1  # without stages
    for detail, gap, budget in () if below else LAYOUTS:
        if unclear and shades > 2:
            detail = 3
        need = max(map(len, labels.short_names(scenes, detail))) + gap
        if columns < need or (unclear and (detail, budget) == (2, 0)):
            continue
        panels = ceil(cells * need / (columns // need * need) - 1e-9)
        if panels <= 1:  # whole columns per cell where they fill most of the width
            wide = min(columns / cells, WIDEST_CELL)
            wide = floor(wide + 1e-9) if wide >= 2 else wide
            return _Layout(colours, below, margin, detail, gap, wide / cell, columns, 1)
        if panels * tall <= min(budget, lines):
            even = ceil(cells / panels - 1e-9) * need  # cut between cells
            return _Layout(colours, below, margin, detail, gap, need / cell, even, panels)
    # cells to a column: a whole number, so that repetitions look alike; a strip fills its width
    count = 1.0 if lines else max(cells / columns, 1.0)
    while (panels := ceil(cells / count / columns - 1e-9)) > 1 and panels * tall > lines:
        count += 1
    even = ceil(cells / count / panels - 1e-9)
    return _Layout(colours, below, margin, 0, 0, 1 / cell / count, even, panels)


def _axis(
    layout: _Layout,
    scene: Scene,
    first: int,
    stop: int,
) -> str:
    """Numbers above the columns ``first`` to ``stop``, each standing over the column of its
    time, behind their unit.
    """
    step = step_of(8 / layout.scale)
    line = f"{scene.timeline.unit[: layout.margin - 1]:<{layout.margin}}"
    tick = 0
    while (column := layout.column(scene.place(tick * step))) < stop:
        text = number(tick * step)
        at = layout.margin + column - first
        fits = len(line) <= at <= layout.margin + layout.columns - len(text)
        if fits and not scene.is_hidden(tick * step):
            line = f"{line:<{at}}{text} "
        tick += 1
    return line


# ---- one lane ----
def _drawn(scene: Scene, layout: _Layout) -> list[list[Line]]:
    """The lines of all lanes: cells, and below those of compared plain text when they end."""
    marked = bool(scene.against and layout.below)
    lanes = []
    for lane in scene.lanes:
        bars = tuple(
            bar._replace(start=scene.place(bar.start), end=scene.place(bar.end))
            for bar in lane.bars
            if not scene.is_hidden(bar.start, bar.end)
        )
        shown = lane._replace(bars=bars)
        rows = [_row(shown, layout), *[_overview(shown, layout, True)] * marked]
        if fold := scene.fold:
            near, far = (round, round) if layout.detail else (floor, ceil)
            start = near(fold.start * layout.scale)
            wide = max(far((fold.start + fold.gap) * layout.scale) - start, 1)
            for row in rows:
                row[start : start + wide] = _cells(FOLDED * wide)
        lanes.append(rows)
    return lanes


def _row(lane: Lane, layout: _Layout) -> Line:
    """The cells of a lane in all panels."""
    if layout.detail == 0:
        return _overview(lane, layout, bool(layout.colours))
    fill, idle = "  " if layout.colours else "-."
    row = _cells(idle * (layout.columns * layout.panels))
    for bar in lane.bars:
        start = layout.column(bar.start)
        wide = min(layout.column(bar.end), len(row)) - start
        count = len(bar.kinds)
        for k, part in enumerate(bar.action.parts):
            a = start + wide * k // count
            b = start + wide * (k + 1) // count
            # part of a bar that the edge of a panel cuts: the larger one has the label
            cut = min((a // layout.columns + 1) * layout.columns, b) - a
            low, high = (0, cut) if 2 * cut >= b - a else (cut, b - a)
            label = labels.name(part, layout.detail)
            end = ""
            if layout.colours:
                label = "▏" * layout.gap + label
            else:
                if layout.detail < 3:
                    label = _by_chunk(label, bar.kinds[k])
                end = " " * layout.gap if k + 1 == count else "&"
            room = max(b - a - len(end), 1)
            fits = len(label) <= min(high, room) - low  # part of a number is another number
            text = (fill * low + label * fits).ljust(room, fill) + end
            row[a:b] = _cells(text[: b - a], bar.colours[k])
    return row


def _by_chunk(label: str, colour: str) -> str:
    """The label of an action: small letters for every second chunk of a rank."""
    return label.lower() if int(colour[1:]) % 2 else label


def _overview(lane: Lane, layout: _Layout, painted: bool) -> Line:
    """For each column the kind of work with most time not yet shown, or idle time. So an op that
    takes a third of the time gets a third of the columns, and short ones appear too.
    """
    owed: defaultdict[str, float] = defaultdict(float)
    actions = [*busy(lane, painted)]
    begins = {int(start * layout.scale + 1e-6) for start, _, _ in actions}
    edges = [column / layout.scale for column in range(layout.columns * layout.panels + 1)]
    cells = []
    before = ""
    for at, column in enumerate(shares(actions, edges)):
        column[""] = 1 - sum(column.values())
        for key, share in column.items():
            owed[key] += share
        key = max((key for key in column if column[key] > 1e-9), key=owed.__getitem__, default="")
        owed[key] -= 1
        if not key:
            letter = " " if painted else "."
        elif key == before and at not in begins and at % layout.columns:
            letter = " " if layout.colours else "-"
        elif layout.colours:
            letter = " " if key in ENDS else key[0]
        else:
            letter = ENDS.get(key) or _by_chunk(key[0], key)
        before = key
        cells.append((letter, key))
    return cells


# ---- the legend, and colours ----
def _legend(
    scenes: Scenes,
    layout: _Layout,
    width: int,
    marks: set[str],
) -> Iterator[Line]:
    """The lines of the legend; ``marks`` are all characters of the lanes."""
    texts: list[str] = []
    said = ""
    if not layout.colours:
        texts += labels.uncoloured(scenes)
        if not marks.isdisjoint("fbiw"):
            texts.append(labels.SMALL)
        texts += [text for text in MARKS if text[0] in marks]
    if layout.detail:
        texts.append(labels.naming(scenes, layout.detail))
    else:
        length = 1 / layout.scale
        count = round(length / min(scene.cell for scene in scenes))
        time = f"a time of {labels.time(length, scenes[0])}. Its letter"
        said = f"A column is {time} is what fills most of it."
        if count > 1:
            said = (
                f"A column is {count} short actions, {time}s show how much of each kind ran, not "
                "in which order: --out x.html has the order."
            )
    entries = [*labels.kinds(scenes, not layout.colours), *(((), text) for text in texts)]
    yield from _lines(entries, layout, width)
    yield from map(_cells, wrap(said, width))


def _lines(entries: Iterable[labels.Entry], layout: _Layout, width: int) -> Iterator[Line]:
    """Entries of a legend, as many to a line as fit; a heading begins one."""
    line: Line = []
    for keys, text in entries:
        swatch = [
            cell for key in keys for cell in _cells(f"{key[0] if key[0] in OPS else ' '} ", key)
        ]
        if keys and not layout.colours:
            swatch = _cells(f"{ENDS[keys[0]]}:" if keys[0] in ENDS else keys[0][0])
        item = swatch + _cells(f" {text}"[not keys :])
        if line and (text.endswith(":") or len(line) + 2 + len(item) > width):
            yield line
            line = []
        line += _cells("  " if line else "") + item[:width]
    if line:
        yield line


def _text(line: Line, grounds: Mapping[str, str], colours: str) -> str:
    text = ""
    for key, run in groupby(line, lambda cell: cell[1]):
        chars = "".join(char for char, _ in run)
        if key and colours:
            from rich.console import COLOR_SYSTEMS  # slow, and not needed for plain text
            from rich.style import Style

            ground = grounds[key]
            style = Style(color=ink(ground), bgcolor=ground)
            chars = style.render(chars, color_system=COLOR_SYSTEMS[colours])
        text += chars
    return text.rstrip(" ") + "\n"
