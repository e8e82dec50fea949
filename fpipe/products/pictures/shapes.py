# SPDX-License-Identifier: Apache-2.0
"""The lanes of a still picture as rectangles, labels and paths; ``svg`` writes them, and
``plotting`` puts them into figures.

Their x is a time, and their y pixels from the top of the first lane down. Where a short action
would be narrower than two pixels, a lane shows how much of its time each kind of work takes, in
pieces as long as the work of a whole number of microbatches (see ``shares.bands``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from . import labels
from .labels import name, text_width, widest_name
from .scene import CAUSES, Lane, Look, Points, Scene, Scenes
from .shares import LEAST_CELL, bands, envelope

GAP = 4.0  # between lanes
CURVE = 0.45  # the height of a memory curve, in lanes
HEIGHTS = {8: 26, 32: 20, 10**9: 14}  # of a lane, up to so many ranks
CELL, NARROWEST, WIDEST = 26, 560, 2200  # of a short bar, if space allows; of all bars together
TIGHT, WIDER = 15, 4200  # the same for long schedules
FINEST = 0.25  # the least step of the height of a band
MOST_HINTS = 4000  # bars with hints


class Rect(NamedTuple):
    """A filled rectangle, with pixels that stay free at its sides, and a hint under the mouse."""

    start: float
    end: float
    y: float
    height: float
    colour: str
    hint: str = ""
    inset: float = 0.0


class Label(NamedTuple):
    """A short text around a place, on a colour, and the pixels that it may take."""

    time: float
    y: float
    text: str
    size: float
    colour: str
    space: float


class Path(NamedTuple):
    """A line through points, or the area that they enclose where ``width`` is 0."""

    points: Points
    colour: str
    width: float = 0.0
    opacity: float = 1.0


Shape: TypeAlias = Rect | Label | Path


class Frame(NamedTuple):
    """The measures that all lanes share."""

    scale: float  # pixels per unit of time
    lane: float  # height
    curve: float  # height of memory curves
    detail: int  # of the names of actions
    size: float  # of letters in bars
    letters: float  # how much wider letters are than those of ``text_width``
    hints: bool

    @property
    def pitch(self) -> float:
        """From one lane to the next."""
        return self.lane + self.curve + GAP

    def is_dense(self, scene: Scene) -> bool:
        """Whether the actions of a scene are too narrow to be drawn one by one."""
        return scene.cell * self.scale < LEAST_CELL


def frame(scenes: Scenes, look: Look, width: float, lane: float, letters: float = 1.0) -> Frame:
    """The measures for lanes of so many pixels."""
    scale = width / (max(scene.total for scene in scenes) or 1.0)
    hints = sum(len(scene.bars) for scene in scenes) <= MOST_HINTS
    space = min(scene.cell for scene in scenes) * scale - 3
    for detail in (3, 2, 1):  # the fullest names that fit into a short bar
        longest = max(0.5, *(widest_name(scene, detail) for scene in scenes))
        size = min(space / longest / letters, 12.0)
        if size >= (9.5 if detail > 1 else 7.5):
            break
    else:
        detail, size = 0, 0.0
    curve = round(CURVE * lane) if has_curves(scenes, look) else 0
    return Frame(scale, lane, curve, detail, size, letters, hints)


def has_curves(scenes: Scenes, look: Look) -> bool:
    """Whether memory curves are drawn."""
    return look.memory and any(scene.peak for scene in scenes)


def natural_size(scenes: Scenes) -> tuple[float, float]:
    """The width and height of a lane where none is asked for."""
    cells = max(scene.total for scene in scenes) / min(scene.cell for scene in scenes)
    wide = max(min(cells * CELL, WIDEST), NARROWEST)
    ranks = max(len(scene.lanes) for scene in scenes)
    height = next(height for most, height in HEIGHTS.items() if ranks <= most)
    return max(wide, cells * TIGHT) if cells * TIGHT <= WIDER else wide, height


def shapes(rank: int, scene: Scene, f: Frame) -> Iterator[Shape]:
    """The idle times and the actions of a rank, and what it holds."""
    lane, y = scene.lanes[rank], rank * f.pitch
    if f.is_dense(scene):
        yield from _bands(lane, scene, f, y + f.lane)
    else:
        yield from _bars(lane, scene, f, y)
    if f.curve and lane.curve and scene.peak > 0:
        yield from _curve(lane, scene, f, y + f.lane + f.curve)


def _bars(lane: Lane, scene: Scene, f: Frame, y: float) -> Iterator[Shape]:
    for gap in lane.gaps:
        hint = f"idle {labels.time(gap.end - gap.start, scene)}: {CAUSES[gap.cause]}"
        yield Rect(gap.start, gap.end, y, f.lane, gap.cause, hint if f.hints else "")
    for bar in lane.bars:
        long, height = (bar.end - bar.start) * f.scale, f.lane / len(bar.colours)
        hint = labels.hint(bar, scene) if f.hints else ""
        for k, (part, colour) in enumerate(zip(bar.action.parts, bar.painted, strict=True)):
            top = y + k * height
            yield Rect(bar.start, bar.end, top, height, colour, hint, min(0.5, long / 8))
            label, size = name(part, f.detail), min(f.size, height - 2)
            if label and size >= 6.5 and f.letters * text_width(label, size) <= long:
                middle = (bar.start + bar.end) / 2
                yield Label(middle, top + height / 2, label, size, colour, long - 2)


def _bands(lane: Lane, scene: Scene, f: Frame, foot: float) -> Iterator[Path]:
    """The areas of a dense lane."""
    edges, heights_of = bands(lane, scene, f.scale)
    for colour, heights in heights_of.items():
        tops = [foot - round(height * f.lane / FINEST) * FINEST for height in heights]
        yield Path(_steps(list(zip(edges, tops, strict=False)), foot, edges[-1]), colour)


def _curve(lane: Lane, scene: Scene, f: Frame, foot: float) -> Iterator[Path]:
    """What a rank holds; all ranks have one scale."""
    curve = envelope(lane.curve, 2 / f.scale) if f.is_dense(scene) else lane.curve
    tops = [(time, foot - (f.curve - 2) * max(held, 0) / scene.peak) for time, held in curve]
    points = _steps(tops, foot, lane.bars[-1].end if lane.bars else 0.0)
    yield Path(points, "curve", opacity=0.3)
    yield Path(points, "curve", 0.8)


def _steps(tops: Points, foot: float, end: float) -> Points:
    """The outline of an area of steps, each from its time on."""
    points = [(tops[0][0], foot)]
    for time, top in tops:
        if top != points[-1][1]:
            points += [(time, points[-1][1]), (time, top)]
    return [*points, (end, points[-1][1]), (end, foot)]
