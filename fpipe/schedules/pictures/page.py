# SPDX-License-Identifier: Apache-2.0
"""The layout of a still picture: rectangles and lines of text, for ``.svg`` and ``.png``.

A page is a list of shapes; its unit is the pixel of a plain screen. It knows nothing of files. Where actions would be
narrower than about a pixel, each column has the mean colour of the actions in it, so that a large schedule becomes a
smooth picture without moiré.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby, takewhile
from math import ceil
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from . import labels
from .colours import FAINT, IDLE, INK, LINE, fill, ink, mix
from .scene import Bar, Lane, Scene, name
from .text_width import text_width

EDGE, GAP = 24, 4  # around the page, between lanes
LANE = {8: 26, 32: 20, 10**9: 14}  # lane height up to so many ranks
CELL, NARROWEST, WIDEST = 26, 560, 2200  # the width of a short bar, if space allows; of all bars together
TIGHT, WIDER = 15, 4200  # the same for long schedules


class Rect(NamedTuple):
    """A filled rectangle; ``hint`` is shown under the mouse if the format supports it."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    hint: str = ""


class Text(NamedTuple):
    """A line of text: ``x`` is its left end, middle or right end by ``anchor``, ``y`` its baseline."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: str = "start"
    bold: bool = False


Shape: TypeAlias = Rect | Text


class Page(NamedTuple):
    """A picture: its size and its shapes, the later ones over the earlier."""

    width: float
    height: float
    shapes: list[Shape]


class _Frame(NamedTuple):
    """The measures that all lanes of a page share."""

    left: float
    width: float
    scale: float  # pixels per unit of time
    lane: float  # height
    detail: int
    size: float  # of letters in bars
    hints: bool


def page(scenes: Sequence[Scene]) -> Page:
    """The layout of a picture of these scenes, one over the other on one axis."""
    frame = _frame(scenes)
    right = frame.left + frame.width + 130
    shapes: list[Shape] = []
    y: float = EDGE
    for scene in scenes:
        shapes.append(Text(EDGE, y + 14, labels.title(scene), 17, INK, bold=True))
        shapes.append(Text(EDGE, y + 34, labels.figures(scene), 12.5, FAINT))
        y += 62
        bottom = y + len(scene.lanes) * (frame.lane + GAP) - GAP
        shapes += _axis(scenes, frame, y, bottom, scene.unit)
        for rank, lane in enumerate(scene.lanes):
            middle = y + frame.lane / 2 + 4
            shapes.append(Text(frame.left - 10, middle, f"rank {rank}", 12, INK, "end"))
            shapes.append(Text(frame.left + frame.width + 12, middle, labels.figures_of(lane, scene), 11, FAINT))
            shapes.append(Rect(frame.left, y, frame.width, frame.lane, IDLE))
            shapes += _lane(lane, scene, frame, y)
            shapes += _link(lane, frame, y)
            y += frame.lane + GAP
        y += 18
    shapes += _legend(scenes, frame.left, y)
    return Page(right + EDGE, y + 16 + EDGE - 8, shapes)


def _frame(scenes: Sequence[Scene]) -> _Frame:
    end = max(scene.total for scene in scenes) or 1.0
    cell = min(scene.cell for scene in scenes)
    wide = max(min(end / cell * CELL, WIDEST), NARROWEST)
    if end / cell * TIGHT <= WIDER:  # a wider page, if numbers can be read on it
        wide = max(wide, end / cell * TIGHT)
    scale = wide / end
    ranks = max(len(scene.lanes) for scene in scenes)
    left = EDGE + 10 + 7 * len(f"rank {ranks - 1}")
    lane = next(height for most, height in LANE.items() if ranks <= most)
    detail, size = _label_size(scenes, cell * scale)
    return _Frame(left, wide, scale, lane, detail, size, sum(scene.bars for scene in scenes) <= 4000)


def _label_size(scenes: Sequence[Scene], space: float) -> tuple[int, float]:
    """The fullest names that fit into a short bar, and their size."""
    for detail in (3, 2, 1):
        size = (space - 3) / max(0.5, *(scene.widest_name(detail) for scene in scenes))
        if size >= (9.5 if detail > 1 else 7.5):
            return detail, min(size, 12.0)
    return 0, 0.0


def _axis(scenes: Sequence[Scene], frame: _Frame, top: float, bottom: float, unit: str) -> Iterator[Shape]:
    step = labels.step_of(70 / frame.scale)
    end = max(scene.total for scene in scenes)
    for tick in takewhile(lambda tick: tick * step <= end * (1 + 1e-9), count()):
        x = frame.left + tick * step * frame.scale
        yield Rect(x - 0.5, top - 5, 1, bottom - top + 10, LINE)
        label = labels.number(tick * step) + (f" {unit}" if unit and tick == 0 else "")
        yield Text(x, top - 9, label, 10.5, FAINT, "middle")


# ---- lanes ----------------------------------------------------------------------------------------------------------
def _lane(lane: Lane, scene: Scene, frame: _Frame, y: float) -> Iterator[Shape]:
    if scene.cell * frame.scale < 2:
        yield from _dense(lane, scene, frame, y)
        return
    for bar in lane.bars:
        x, long = frame.left + bar.start * frame.scale, (bar.end - bar.start) * frame.scale
        height = frame.lane / len(bar.shades)
        inset = min(0.5, long / 8)
        hint = _hint(bar, scene) if frame.hints else ""
        for k, (part, shade) in enumerate(zip(bar.action.parts, bar.shades, strict=True)):
            ground = fill(part.op, shade, scene.shades)
            top = y + k * height
            yield Rect(x + inset, top, long - 2 * inset, height, ground, hint)
            label = name(part, frame.detail)
            size = min(frame.size, height - 2)
            if label and size >= 6.5 and text_width(label, size) <= long:
                yield Text(x + long / 2, top + height / 2 + 0.36 * size, label, size, ink(ground), "middle")


def _link(lane: Lane, frame: _Frame, y: float) -> Iterator[Shape]:
    """A thin strip at the foot of a lane: what its link carries."""
    for start, end, what in lane.carried:
        hint = what if frame.hints else ""
        yield Rect(frame.left + start * frame.scale, y + frame.lane - 3, (end - start) * frame.scale, 3, INK, hint)


def _hint(bar: Bar, scene: Scene) -> str:
    text = f"{bar.action}: {labels.number(bar.start)} to {labels.time(bar.end, scene)}"
    if bar.cause and bar.wait > 0:
        rank, position = bar.cause
        text += f", waited {labels.number(bar.wait)} for {scene.lanes[rank].bars[position].action} of rank {rank}"
    return text


def _dense(lane: Lane, scene: Scene, frame: _Frame, y: float) -> Iterator[Shape]:
    """Columns of one pixel, each the mean of the colours that ran in it; equal neighbours are one rectangle."""
    means = []
    for _, idle, running in lane.columns(ceil(frame.width), frame.scale):
        mean, seen = IDLE, 0.0
        for op, shade, time in running:
            seen += time
            mean = mix(mean, fill(op, shade, scene.shades), time / seen)
        means.append(mix(mean, IDLE, min(max(idle * frame.scale, 0.0), 1.0)) if seen else IDLE)
    for colour, run in groupby(enumerate(means), key=itemgetter(1)):
        columns = [x for x, _ in run]
        if colour != IDLE:
            yield Rect(frame.left + columns[0], y, len(columns), frame.lane, colour)


def _legend(scenes: Sequence[Scene], x: float, y: float) -> Iterator[Shape]:
    for op, word, colours in labels.legend(scenes):
        for k, colour in enumerate(colours):
            yield Rect(x + 16 * k, y, 16, 16, colour)
        yield Text(x + 8, y + 12, op, 11, ink(colours[0]), "middle")
        x += 16 * len(colours) + 7
        yield Text(x, y + 12.5, word, 12, INK)
        x += 7 * len(word) + 22
    if any(scene.shades > 1 for scene in scenes):
        yield Text(x, y + 12.5, "paler: a rank's other stages", 12, FAINT)
        x += 190
    if any(scene.fused for scene in scenes):
        yield Rect(x, y, 16, 8, fill("F"))
        yield Rect(x, y + 8, 16, 8, fill("B"))
        yield Text(x + 23, y + 12.5, "fused", 12, INK)
