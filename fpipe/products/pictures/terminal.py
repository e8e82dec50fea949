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
from dataclasses import dataclass
from itertools import groupby
from math import ceil, floor
from operator import itemgetter
from textwrap import wrap

from . import labels
from .colours import fill, ink, mix, of_256, palette, rgb
from .lanes import Lane
from .scene import Scene, name

#: (detail, how many lines of text it may fill, 0 for one panel), best first; the first that is
#: short enough is drawn
COLOURED = ((3, 0), (2, 0), (1, 0), (3, 12), (2, 50), (1, 60), (2, 130), (1, 320))
PLAIN = ((3, 0), (3, 24), (2, 50), (2, 400))
PLAIN_ONE_CHUNK = ((3, 0), (2, 0), *PLAIN[1:])
WIDEST_CELL = 10  # columns for a short bar of a small schedule

Style = tuple[str, str] | None  # (letters' colour, ground), or idle
Cell = tuple[str, Style]


@dataclass(frozen=True)
class _Plan:
    """How a picture is laid out: ``scale`` columns per unit of time, ``columns`` to a panel,
    ``panels`` of them.
    """

    detail: int
    scale: float
    columns: int
    panels: int
    margin: int


def paint(scenes: Sequence[Scene], look: object = None, width: int = 160, colour: int = 0) -> str:
    """The text of a picture ``width`` columns wide in ``colour`` 0 (none), 8 (256 colours) or 24
    bits.
    """
    plan = _plan(scenes, width, bool(colour))
    rows = [[_row(lane, scene, plan, bool(colour)) for lane in scene.lanes] for scene in scenes]
    last = ceil(max(scene.total for scene in scenes) * plan.scale - 1e-9)
    lines: list[str] = []
    for panel in range(plan.panels):
        first = panel * plan.columns
        stop = min(first + plan.columns, last)
        lines += ["", _axis(plan, first, stop)] if panel else []
        for scene, cells in zip(scenes, rows, strict=True):
            if panel == 0 or len(scenes) > 1:
                lines.append((labels.title(scene) if panel == 0 else scene.name)[:width])
            if panel == 0:
                lines.append(_axis(plan, first, stop))
            for rank, (lane, row) in enumerate(zip(scene.lanes, cells, strict=True)):
                label = f"rank {rank}" if plan.margin > 6 else str(rank)
                lines.append(label.ljust(plan.margin) + _ansi(row[first:stop], colour))
                if lane.carried:
                    lines.append(
                        "  link".ljust(plan.margin)[: plan.margin] + _link(lane, plan, first, stop)
                    )
    lines.append("")
    for scene in scenes:
        figures = (f"{scene.name or 'schedule'}: " if len(scenes) > 1 else "") + labels.figures(
            scene
        )
        for text in (figures, labels.idle(scene), labels.note(scene)):
            lines += wrap(text, width, subsequent_indent="  ")
    lines += _legend(scenes, plan, width, colour)
    return "\n".join(line.rstrip() for line in lines) + "\n"


# ---- layout ----
def _plan(scenes: Sequence[Scene], width: int, colour: bool) -> _Plan:
    ranks = max(len(scene.lanes) for scene in scenes)
    margin = len(str(ranks - 1)) + (6 if width >= 50 else 1)
    columns = max(width - margin, 8)
    end = max(scene.total for scene in scenes)
    cell = min(scene.cell for scene in scenes)
    shades = max(scene.shades for scene in scenes)
    for detail, budget in COLOURED if colour else PLAIN if shades > 1 else PLAIN_ONE_CHUNK:
        need = max(len(name) for scene in scenes for name in scene.short_names(detail)) + 1
        panels = (
            ceil(end / cell * need / (columns // need * need) - 1e-9)
            if columns >= need
            else budget + 1
        )
        if panels <= 1:
            return _Plan(detail, _filling(end, cell, columns), columns, 1, margin)
        if panels * sum(len(scene.lanes) + 2 for scene in scenes) <= budget:
            even = (
                ceil(end / cell / panels - 1e-9) * need
            )  # panels of one length, cut between cells
            return _Plan(detail, need / cell, even, panels, margin)
    return _Plan(0, columns / end if end else 1.0, columns, 1, margin)


def _filling(end: float, cell: float, columns: int) -> float:
    """The scale of a picture in one panel: whole columns per cell where they fill most of the
    width.
    """
    most = columns * cell / end if end else WIDEST_CELL
    return min(floor(most + 1e-9) if most >= 2 else most, WIDEST_CELL) / cell


def _axis(plan: _Plan, first: int, stop: int) -> str:
    """Numbers above the columns ``first`` to ``stop``, each standing over the column of its
    time.
    """
    step = labels.step_of(8 / plan.scale)
    line = " " * plan.margin
    tick = ceil(first / plan.scale / step - 1e-9)
    while (column := round(tick * step * plan.scale)) < stop:
        text = labels.number(tick * step)
        at = plan.margin + column - first
        if len(line) <= at and at + len(text) <= plan.margin + plan.columns:
            line += " " * (at - len(line)) + text + " "
        tick += 1
    return line


# ---- one lane ----
def _row(lane: Lane, scene: Scene, plan: _Plan, colour: bool) -> list[Cell]:
    if plan.detail == 0:
        return _overview(lane, scene, plan, colour)
    row: list[Cell] = [(" " if colour else ".", None)] * (plan.columns * plan.panels)
    for bar in lane.bars:
        start, stop = round(bar.start * plan.scale), min(round(bar.end * plan.scale), len(row))
        parts = bar.action.parts
        for k, (part, shade) in enumerate(zip(parts, bar.shades, strict=True)):
            a = start + (stop - start) * k // len(parts)
            b = start + (stop - start) * (k + 1) // len(parts)
            label = name(part, plan.detail)
            if colour:
                row[a:b] = _coloured(
                    label, a, b, palette(scene.shades)[scene.key(part.op, shade)], plan.columns
                )
            else:
                label = (
                    label.lower() if shade % 2 and plan.detail < 3 and not scene.against else label
                )
                row[a:b] = _plain(label, a, b, " " if part is parts[-1] else "&", plan.columns)
    return row


def _link(lane: Lane, plan: _Plan, first: int, stop: int) -> str:
    """What a rank's link carries, under its lane."""
    row = [" "] * (plan.columns * plan.panels + 1)
    for start, end, _ in lane.carried:
        a, b = (
            round(start * plan.scale),
            min(max(round(end * plan.scale), round(start * plan.scale) + 1), len(row)),
        )
        row[a:b] = ">" * (b - a)
    return "".join(row[first:stop])


def _piece(a: int, b: int, columns: int) -> tuple[int, int]:
    """The larger piece of a bar that the edge of a panel cuts, counted from its start; all of one
    that it does not.
    """
    cut = (a // columns + 1) * columns
    if cut >= b:
        return 0, b - a
    return (0, cut - a) if cut - a >= b - cut else (cut - a, b - a)


def _coloured(label: str, a: int, b: int, ground: str, columns: int) -> list[Cell]:
    """A bar's cells: a thin line at its left edge, its label in the middle."""
    style = (ink(ground), ground)
    cells: list[Cell] = [(" ", style)] * (b - a)
    low, high = _piece(a, b, columns)
    space = high - low - len(label)
    if space > 0:
        cells[0] = ("▏", (mix(ground, "#000000", 0.45), ground))
    if space >= 0:
        at = low + (space + 1) // 2
        cells[at : at + len(label)] = [(char, style) for char in label]
    return cells


def _plain(label: str, a: int, b: int, end: str, columns: int) -> list[Cell]:
    """A bar in ASCII: its label, dashes, and at its end a blank, or ``&`` between the parts of a
    fused one.
    """
    if a >= b:
        return []
    low, high = _piece(a, b, columns)
    text = "-" * low + label[: high - low]
    text = text.ljust(b - a - 1, "-") + end if len(text) < b - a else text
    return [(char, None) for char in text]


def _overview(lane: Lane, scene: Scene, plan: _Plan, colour: bool) -> list[Cell]:
    """Each column, in colour each half of one, shows what takes most of its time."""
    if not colour:
        shown = _dominant(lane, plan.columns, plan.scale)
        return [
            (
                "."
                if one is None
                else (one[0].lower() if one[1] % 2 and not scene.against else one[0]),
                None,
            )
            for one in shown
        ]
    halves = _dominant(lane, 2 * plan.columns, 2 * plan.scale)
    grounds = [None if one is None else palette(scene.shades)[scene.key(*one)] for one in halves]
    cells: list[Cell] = []
    for left, right in zip(grounds[::2], grounds[1::2], strict=True):
        if left == right:
            cells.append((" ", (ink(left), left) if left else None))
        else:
            cells.append(("▌", (left, right or "")) if left else ("▐", (right or "", "")))
    return cells


def _dominant(lane: Lane, columns: int, scale: float) -> Iterator[tuple[str, int] | None]:
    """For each column the (op, shade) to show, or None for idle: the one with most time not yet
    shown. So an op that takes a third of the time gets a third of the columns, and short ones
    appear too.
    """
    owed: dict[tuple[str, int] | None, float] = defaultdict(float)
    for length, idle, running in lane.columns(columns, scale):
        here: dict[tuple[str, int] | None, float] = defaultdict(float)
        for op, shade, time in running:
            here[op, shade] += time
        here[None] = idle
        for what, time in here.items():
            owed[what] += time
        shown = max(
            (what for what, time in here.items() if time > 0), key=owed.__getitem__, default=None
        )
        owed[shown] -= length
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
    codes = ["0"]
    for layer, colour in zip(("38", "48"), style, strict=True):
        if colour:
            number = "2;{};{};{}".format(*rgb(colour)) if bits >= 24 else f"5;{of_256(colour)}"
            codes.append(f"{layer};{number}")
    return f"\x1b[{';'.join(codes)}m"


def _legend(scenes: Sequence[Scene], plan: _Plan, width: int, bits: int) -> list[str]:
    items: list[tuple[str, int]] = []  # and how wide each is
    for op, word, shades in labels.legend(scenes):
        grounds = [fill(op, shade, shades) for shade in range(shades)]
        swatch: list[Cell] = [(" ", (ink(ground), ground)) for ground in grounds for _ in range(2)]
        swatch = [(op, swatch[0][1]), *swatch[1:]] if bits else [(op, None)]
        word = f" {word}"[: max(width - len(swatch), 0)]
        items.append((_ansi(swatch, bits) + word, len(swatch) + len(word)))
    for scene in scenes if bits else ():
        for tints, word in labels.tints(scene):
            swatch = [(" ", ("", palette(1)[f"t{tint}"])) for tint in tints]
            items.append(
                (
                    _ansi(swatch, bits) + f" {word}"[: max(width - len(swatch), 0)],
                    len(swatch) + len(word) + 1,
                )
            )
    if not bits and max(scene.shades for scene in scenes) == 2 and plan.detail < 3:
        note = "small letters: a rank's other stage"[:width]
        items.append((note, len(note)))
    lines, left = [""], width
    for text, size in items:
        if size > left and lines[-1]:
            lines.append("")
            left = width
        lines[-1] += text + "  "
        left -= size + 2
    return lines
