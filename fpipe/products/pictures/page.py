# SPDX-License-Identifier: Apache-2.0
"""The layout of a still picture in SVG: titles, axis, lanes, memory curves, legend.

Where a short action would be narrower than two pixels, a lane shows how much of its time each kind
of work takes, in pieces as long as the work of a whole number of microbatches (see ``dense``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from ...actions import OPS
from . import labels
from .dense import bands, envelope, is_dense, lines_of_phases
from .idle import critical, messages
from .labels import Look
from .scene import CAUSES, Lane, Scene, name
from .svg import document, path, rect, text
from .text_width import text_width

EDGE, GAP = 24, 4  # around the page, between lanes
LANE = {8: 26, 32: 20, 10**9: 14}  # lane height up to so many ranks
CELL, NARROWEST, WIDEST = 26, 560, 2200  # of a short bar, if space allows; of all bars together
TIGHT, WIDER = 15, 4200  # the same for long schedules
PHONE = 700  # pages narrower than this have short labels beside the lanes
FINEST = 0.25  # the least step of the height of a band
MOST_HINTS = 4000  # bars with hints


class _Frame(NamedTuple):
    """The measures that all lanes of a page share."""

    look: Look
    margin: float
    left: float
    width: float  # of the lanes
    right: float  # of the page
    scale: float  # pixels per unit of time
    lane: float  # height
    curve: float  # height of memory curves
    detail: int
    size: float  # of letters in bars
    hints: bool
    short: bool  # labels beside the lanes

    def x(self, time: float) -> float:
        """Where a time is."""
        return self.left + time * self.scale

    @property
    def pitch(self) -> float:
        """From one lane to the next."""
        return self.lane + self.curve + GAP


def paint(scenes: Sequence[Scene], look: Look, inline: bool = False) -> str:
    """The scenes as SVG, one over the other on one axis; ``inline`` for a page of HTML."""
    frame = _frame(scenes, look)
    elements: list[str] = []
    y: float = EDGE
    for scene in scenes:
        heading = list(_heading(scene, frame))
        for content, size, height, kind in heading:
            elements.append(text(frame.margin, y + 14, content, size, kind))
            y += height
        y += 30
        elements += _axis(scenes, scene, frame, y)
        for rank, lane in enumerate(scene.lanes):
            elements += _lane(rank, lane, scene, frame, y + rank * frame.pitch)
        elements += _lines(scene, frame, y)
        y += len(scene.lanes) * frame.pitch - GAP + 22
    legend, y = _legend(scenes, frame, y)
    return document(
        [*elements, *legend],
        (frame.right, y + EDGE - 8),
        max(scene.shades for scene in scenes),
        alt="; ".join(scene.name or "schedule" for scene in scenes),
        dark=look.dark,
        inline=inline,
    )


# ---- measures ----
def _frame(scenes: Sequence[Scene], look: Look) -> _Frame:
    end = max(scene.total for scene in scenes) or 1.0
    ranks = max(len(scene.lanes) for scene in scenes)
    short = look.width is not None and look.width < PHONE
    margin = 12 if short else EDGE
    left = margin + 10 + 7 * len(str(ranks - 1) if short else f"rank {ranks - 1}")
    beside = 12.0
    if not short:
        figures = [labels.figures_of(lane, scene) for scene in scenes for lane in scene.lanes]
        beside = 24 + max(text_width(figure, 11) for figure in figures)
    wide = natural_width(scenes)
    if look.width is not None:
        wide = max(look.width - left - beside, 60.0)
    scale, lane = wide / end, lane_height(scenes)
    detail, size = label_size(scenes, scale)
    return _Frame(
        look,
        margin,
        left,
        wide,
        left + wide + beside,
        scale,
        lane,
        round(0.45 * lane) if has_curves(scenes, look) else 0,
        detail,
        size,
        sum(len(scene.bars) for scene in scenes) <= MOST_HINTS,
        short,
    )


def natural_width(scenes: Sequence[Scene]) -> float:
    """The width of the lanes where none is asked for."""
    cells = max(scene.total for scene in scenes) / min(scene.cell for scene in scenes)
    wide = max(min(cells * CELL, WIDEST), NARROWEST)
    return max(wide, cells * TIGHT) if cells * TIGHT <= WIDER else wide


def lane_height(scenes: Sequence[Scene]) -> float:
    """The height of a lane: less for many ranks."""
    ranks = max(len(scene.lanes) for scene in scenes)
    return next(height for most, height in LANE.items() if ranks <= most)


def has_curves(scenes: Sequence[Scene], look: Look) -> bool:
    """Whether memory curves are drawn."""
    return look.memory and any(lane.curve for scene in scenes for lane in scene.lanes)


def label_size(scenes: Sequence[Scene], scale: float) -> tuple[int, float]:
    """The fullest names that fit into a short bar, and their size."""
    space = min(scene.cell for scene in scenes) * scale
    for detail in (3, 2, 1):
        size = (space - 3) / max(0.5, *(scene.widest_name(detail) for scene in scenes))
        if size >= (9.5 if detail > 1 else 7.5):
            return detail, min(size, 12.0)
    return 0, 0.0


# ---- above the lanes ----
def _heading(scene: Scene, f: _Frame) -> Iterator[tuple[str, float, float, str]]:
    """Title, figures and what they mean: (line, size, height, kind)."""
    space = f.right - f.margin - 12
    for line in wrapped(labels.title(scene), 17, space):
        yield line, 17, 20, "ink b"
    notes = [labels.figures(scene), labels.idle(scene), labels.note(scene)]
    notes += lines_of_phases(scene) if is_dense(scene, f.scale) else []
    for line in (line for note in notes if note for line in wrapped(note, 12.5, space)):
        yield line, 12.5, 17, "faint"


def wrapped(content: str, size: float, space: float) -> Iterator[str]:
    """The lines of a text that fit the space."""
    line = ""
    for word in content.split(" "):
        if line and text_width(f"{line} {word}", size) > space:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _axis(scenes: Sequence[Scene], scene: Scene, f: _Frame, y: float) -> Iterator[str]:
    step = labels.step_of((45 if f.short else 70) / f.scale)
    end = max(scene.total for scene in scenes) * (1 + 1e-9)
    height = len(scene.lanes) * f.pitch - GAP + 10
    for time in takewhile(lambda time: time <= end, (tick * step for tick in count())):
        yield rect(f.x(time) - 0.5, y - 5, 1, height, "line")
        label = labels.time(time, scene) if time == 0 else labels.number(time)
        yield text(f.x(time), y - 9, label, 10.5, "faint m")


# ---- lanes ----
def _lane(rank: int, lane: Lane, scene: Scene, f: _Frame, y: float) -> Iterator[str]:
    """The label, the idle times and the actions of a rank, what its link carries and what it
    holds.
    """
    middle, dense = y + f.lane / 2 + 4, is_dense(scene, f.scale)
    yield text(f.left - 8, middle, str(rank) if f.short else f"rank {rank}", 12, "ink e")
    if not f.short:
        yield text(f.x(0) + f.width + 10, middle, labels.figures_of(lane, scene), 11, "faint")
    if dense:
        yield from _bands(lane, scene, f, y)
    else:
        for gap in lane.gaps:
            length = gap.end - gap.start
            hint = f"idle {labels.time(length, scene)}: {CAUSES[gap.cause]}" if f.hints else ""
            yield rect(f.x(gap.start), y, length * f.scale, f.lane, gap.cause, hint)
        for k in range(len(lane.bars)):
            yield from _bar(k, lane, scene, f, y)
    for start, end, what in lane.carried:
        hint = what if f.hints else ""
        yield rect(f.x(start), y + f.lane - 3, (end - start) * f.scale, 3, "ink", hint)
    if f.curve and lane.curve and scene.peak > 0:
        yield from _curve(lane, scene, f, y + f.lane + f.curve, dense)


def _bar(k: int, lane: Lane, scene: Scene, f: _Frame, y: float) -> Iterator[str]:
    bar = lane.bars[k]
    x, long, height = f.x(bar.start), (bar.end - bar.start) * f.scale, f.lane / len(bar.colours)
    inset = min(0.5, long / 8)
    hint = labels.hint(k, lane, scene) if f.hints else ""
    for part, colour in zip(bar.action.parts, bar.painted, strict=True):
        yield rect(x + inset, y, long - 2 * inset, height, colour, hint)
        label, size = name(part, f.detail), min(f.size, height - 2)
        if label and size >= 6.5 and text_width(label, size) <= long:
            foot = y + height / 2 + 0.36 * size
            yield text(x + long / 2, foot, label, size, f"{colour}t m", space=long - 2)
        y += height


def _bands(lane: Lane, scene: Scene, f: _Frame, y: float) -> Iterator[str]:
    """The areas of a dense lane, whose outlines are steps over its foot."""
    edges, found = bands(lane, scene, f.scale)
    for colour, heights in found:
        points = [(f.x(0), y + f.lane)]
        for height, start in zip(heights, edges, strict=False):
            top = y + f.lane - round(height * f.lane / FINEST) * FINEST
            if top != points[-1][1]:
                points += [(f.x(start), points[-1][1]), (f.x(start), top)]
        end = f.x(edges[-1])
        yield path([[*points, (end, points[-1][1]), (end, y + f.lane)]], colour)


def _curve(lane: Lane, scene: Scene, f: _Frame, foot: float, dense: bool) -> Iterator[str]:
    """What a rank holds as an area with a line over it; all ranks have one scale."""
    curve = envelope(lane.curve, 2 / f.scale) if dense else lane.curve
    points = [(f.x(curve[0][0]), foot)]
    for time, amount in curve:
        top = foot - (f.curve - 2) * max(amount, 0.0) / scene.peak
        points += [(f.x(time), points[-1][1]), (f.x(time), top)]
    end = f.x(lane.bars[-1].end if lane.bars else 0.0)
    points += [(end, points[-1][1]), (end, foot)]
    yield path([points], "curve", opacity=0.3)
    yield path([points], "curve", 0.8)


def _lines(scene: Scene, f: _Frame, y: float) -> Iterator[str]:
    """Over the lanes: thin lines from the end of actions to the start of those that take their
    results, and a line through the actions on which the total depends, at the foot of their bars.
    """
    if f.look.messages and not is_dense(scene, f.scale):
        lines = []
        for first, rank, then, other in messages(scene.lanes):
            if first.end <= then.start:
                a, b = y + rank * f.pitch, y + other * f.pitch
                a, b = (a + f.lane, b) if a < b else (a, b + f.lane)
                lines.append([(f.x(first.end), a), (f.x(then.start), b)])
        if lines:
            yield path(lines, "message-line", 0.6, 0.75)
    chain = critical(scene.lanes) if f.look.critical else []
    bars = [(scene.lanes[rank].bars[k], y + rank * f.pitch + f.lane - 1.5) for rank, k in chain]
    if bars:
        points = [(f.x(time), at) for bar, at in bars for time in (bar.start, bar.end)]
        yield path([points], "mark", 2.2)


# ---- the legend ----
def _legend(scenes: Sequence[Scene], f: _Frame, y: float) -> tuple[list[str], float]:
    """The legend, in as many lines as it needs, and where it ends."""
    first = f.margin if f.short else f.left
    x, elements = first, []
    dense = all(is_dense(scene, f.scale) for scene in scenes)
    for colours, content, height in labels.legend(scenes, f.look, dense):
        stacked = height == 0.5
        boxes = 16 if stacked else 16 * len(colours)
        space = boxes + 7 + 1.1 * text_width(content, 12) + 20
        if x > first and x + space - 20 > f.right - 12:
            x, y = first, y + 22
        for k, colour in enumerate(colours):
            left, top = (x, y + 8 * k) if stacked else (x + 16 * k, y + 16 - 16 * height)
            elements.append(rect(left, top, 16, 16 * height, colour))
            if k == 0 and height == 1 and colour[0] in OPS:
                elements.append(text(left + 8, y + 12, colour[0], 11, f"{colour}t m"))
        elements.append(text(x + boxes + (7 if boxes else 0), y + 12.5, content, 12))
        x += space
    return elements, y + 16
