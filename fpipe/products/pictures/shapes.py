# SPDX-License-Identifier: Apache-2.0
"""The lanes of a still picture as rectangles, labels and paths; ``svg`` writes them, and
``plotting`` puts them into figures.

Their x is a time, and their y pixels from the top of the first lane down. Where a short action
would be narrower than two pixels, a lane shows how much of its time each kind of work takes, in
pieces as long as the work of a whole number of microbatches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple, TypeAlias

from ...actions import OPS
from . import labels
from .labels import name, text_width, widest_name
from .scene import CAUSES, Lane, Look, Points, Scene, Scenes, has_curves

GAP = 4.0  # between lanes
CURVE = 0.45  # the height of a memory curve, in lanes
# the width of a short bar, and up to which width of all bars together it has that
CELL = 26  # with whole names
COLUMN = 640  # a page has a column of about 700
TIGHT = 15  # with short names
WIDER = 1400  # a window of 1440 shows all of it
SMALLEST = 8.0  # letters
PAPER_LETTERS = 7 * 96 / 72  # the smallest that conferences accept
LETTERS = 1.1  # how much wider than ``text_width`` the letters of matplotlib are
NARROW = 0.75  # the same of numbers for a paper, which are condensed where bars are narrow
PALE = {"curve": 0.45}  # what is not opaque
FINE = 4  # a stripe
WIDEST = 2200
UNEVEN = 1100  # where bars differ much, as in a measured step
NARROWEST = 560
FINEST = 0.25  # the least step of the height of a band
MOST_HINTS = 4000  # bars with hints
LEAST = 6.0  # the least width of a piece
LEAST_CELL = 2.0  # of a bar in the mean, below which a lane shows shares
PAPER_CELL = 1.5  # of a picture for a paper, in points
#: colours in a lane of shares, from its foot up
STACKED = (
    *(f"t{k}" for k in range(10)),
    *(f"{op}0" for op in OPS),
    *("tail", "imbalance", "message", "other", "warmup"),
)

Interval: TypeAlias = tuple[float, float, str]  # start, end, colour or cause


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
    """The area below steps, each at its height from its time on. The first and the last height are
    that of the foot.
    """

    points: Points
    colour: str


Shape: TypeAlias = Rect | Label | Path


class Frame(NamedTuple):
    """The measures that all lanes share."""

    scale: float  # pixels per unit of time
    lane: float  # height
    curve: float  # height of memory curves
    detail: int  # of the names of actions, 0 if none has one
    size: float  # of letters in bars
    letters: float  # how much wider letters are than those of ``text_width``
    hints: bool
    least: float  # size of letters
    named: float  # the least width of bars with names
    dense: bool  # whether actions are too narrow to be drawn one by one
    narrow: float  # how wide letters in bars are, as a share of their usual width

    @property
    def pitch(self) -> float:
        """From one lane to the next."""
        return self.lane + self.curve + GAP


def frame(
    scenes: Scenes,
    look: Look,
    width: float,
    lane: float,
    letters: float = 1.0,
) -> Frame:
    """The measures for lanes of so many pixels."""
    scale = width / (max(scene.length for scene in scenes) or 1.0)
    hints = sum(len(scene.bars) for scene in scenes) <= MOST_HINTS
    named = 0.0
    least = PAPER_LETTERS * letters if look.paper else SMALLEST
    lettered = 2 if scenes[-1].against else 3  # where colours are shifts, letters say what it is
    for detail in (3, lettered, 1):  # the fullest names that fit into a short bar
        shown = [scene for scene in scenes if has_names(scene, detail)]
        longest = widest_name(shown, detail) - 0.2 * look.paper
        space = min(scene.cell for scene in shown) * scale
        size = min(space / longest, least if look.paper else 12.0)
        if size >= (max(least, 9.5) if detail == 3 else least):
            break
    else:  # the kinds with long bars have names then
        size = least
        named = size * longest
        widest = max(bar.end - bar.start for scene in shown for bar in scene.bars) * scale
        if look.paper or widest < named:  # for a paper all bars have one, or none
            detail = 0
    curve = round(CURVE * lane) if has_curves(scenes, look) else 0
    dense = min(scene.mean for scene in scenes) * scale < (PAPER_CELL if look.paper else LEAST_CELL)
    least /= letters
    narrow = min(space / longest / PAPER_LETTERS / LETTERS, 1.0) if look.paper else 1.0
    size /= letters
    return Frame(scale, lane, curve, detail, size, letters, hints, least, named, dense, narrow)


def has_names(scene: Scene, detail: int) -> bool:
    """Whether names of this detail say enough: not numbers alone, where colours are shifts."""
    return detail > 1 or not scene.against


def natural_size(scenes: Scenes) -> tuple[float, float]:
    """The width and height of a lane where none is asked for."""
    cell = min(max(scene.cell, scene.mean / 3) for scene in scenes)
    cells = max(scene.length for scene in scenes) / cell
    widest = UNEVEN if any(scene.cell < 0.6 * scene.mean for scene in scenes) else WIDEST
    wide = max(min(cells * CELL, COLUMN), min(cells * FINE, widest), NARROWEST)
    short, limit = (2, WIDEST) if scenes[-1].against else (1, WIDER)
    need = cells * SMALLEST * widest_name(scenes, short)
    if need <= limit:
        wide = max(wide, need, min(cells * TIGHT, limit))
    ranks = max(len(scene.lanes) for scene in scenes)
    return wide, 26 if ranks <= 8 else 20 if ranks <= 32 else 14


def shapes(scene: Scene, f: Frame) -> Iterator[Shape]:
    """The idle times and the actions of all ranks, and what they hold."""
    for rank, lane in enumerate(scene.lanes):
        y = rank * f.pitch
        if f.dense:
            yield from _bands(lane, scene, f, y + f.lane)
        else:
            yield from _bars(lane, scene, f, y)
        if f.curve and lane.curve and scene.peak > 0:
            foot = y + f.lane + f.curve
            height = (f.curve - 2) / scene.peak  # all ranks have one scale
            curve = envelope(lane.curve, 2 / f.scale) if f.dense else lane.curve
            tops = [
                (time, foot - height * max(held, 0))
                for time, held in curve
                if not scene.is_hidden(time)
            ]
            yield Path([(tops[0][0], foot), *tops, (lane.bars[-1].end, foot)], "curve")
        if fold := scene.fold:  # over all else
            yield Rect(fold.start, fold.end, y, f.pitch, "paper")


def envelope(curve: Points, length: float) -> Points:
    """A curve with one point in each ``length`` of time, the greatest there.

    >>> envelope([(0, 1), (1, 2), (2, 1), (9, 0)], 4)
    [(0, 2), (8, 0)]
    """
    return [
        (at * length, max(amount for _, amount in group))
        for at, group in groupby(curve, lambda point: int(point[0] / length))
    ]


def _bars(lane: Lane, scene: Scene, f: Frame, y: float) -> Iterator[Shape]:
    for gap in lane.gaps:
        hint = f"idle {labels.time(gap.end - gap.start, scene)}: {CAUSES[gap.cause]}"
        if not scene.is_hidden(gap.start, gap.end):
            yield Rect(gap.start, gap.end, y, f.lane, gap.cause, hint if f.hints else "")
    for bar in lane.bars:
        if scene.is_hidden(bar.start, bar.end):
            continue
        wide = (scene.place(bar.end) - scene.place(bar.start)) * f.scale
        height = f.lane / len(bar.kinds)
        size = min(f.size, height - 2)
        inset = min(0.5, wide / 8)
        hint = labels.hint(bar, scene) if f.hints else ""
        top = y
        for part, kind, colour in zip(bar.action.parts, bar.kinds, bar.colours, strict=True):
            yield Rect(bar.start, bar.end, top, height, colour, hint, inset)
            label = name(part, f.detail) if has_names(scene, f.detail) else ""
            if scene.against and scene.shades == 2 and kind.endswith("1"):
                label = label.lower()  # its colour does not tell the stage
            need = max(f.letters * (text_width(label, size) + 0.1 * size), f.named)
            if label and size >= f.least and wide >= need:
                middle = (bar.start + bar.end) / 2
                yield Label(middle, top + height / 2, label, size, colour, wide - 2)
            top += height


# ---- shares of time ----
def _bands(lane: Lane, scene: Scene, f: Frame, foot: float) -> Iterator[Path]:
    """The shares of a dense lane, the upper ones first, each over all of those below it."""
    length = piece(scene, f.scale)
    count = ceil(scene.total / length - 1e-9)
    edges = [min(k * length, scene.total) for k in range(count + 1)]
    work = [  # shades are not told apart
        (start, end, f"{key[0]}0" if key[0] in OPS else key) for start, end, key in busy(lane)
    ]
    parts = shares([*work, *lane.gaps], edges)
    heights = [0.0] * len(parts)
    areas: list[Path] = []
    for colour in STACKED:
        if any(colour in part for part in parts):
            grown = zip(heights, parts, strict=True)
            heights = [min(height + part.get(colour, 0.0), 1.0) for height, part in grown]
            tops = [foot - round(height * f.lane / FINEST) * FINEST for height in heights]
            areas.append(Path([(0.0, foot), *zip(edges, [*tops, foot], strict=True)], colour))
    return reversed(areas)


def piece(scene: Scene, scale: float) -> float:
    """The length of a piece: the work of a rank on a whole number of microbatches, so that a steady
    phase is even.
    """
    work = sum(scene.timeline.busy) / (scene.microbatches * len(scene.lanes) or 1)
    if work <= 0 or work * scale > 4 * LEAST:
        return LEAST / scale
    return work * ceil(LEAST / (work * scale))


def busy(lane: Lane, painted: bool = True) -> Iterator[Interval]:
    """The actions of a lane with their colours as they are painted or as they are by kind; the
    parts of a fused one run one after another.
    """
    for bar in lane.bars:
        length = (bar.end - bar.start) / len(bar.kinds)
        for k, colour in enumerate(bar.colours if painted else bar.kinds):
            yield bar.start + k * length, bar.start + (k + 1) * length, colour


def shares(intervals: Iterable[Interval], edges: Sequence[float]) -> list[defaultdict[str, float]]:
    """Of each piece between two edges, the share of every key.

    >>> [dict(piece) for piece in shares([(0, 1, "F"), (1, 3, "B")], [0, 2, 4])]
    [{'F': 0.5, 'B': 0.5}, {'B': 0.5}]
    """
    pieces: list[defaultdict[str, float]] = [defaultdict(float) for _ in edges[1:]]
    for start, end, key in intervals:
        first = max(bisect_right(edges, start) - 1, 0)
        stop = min(bisect_left(edges, end), len(pieces))
        for at in range(first, stop):
            low = edges[at]
            high = edges[at + 1]
            inside = min(end, high) - max(start, low)
            pieces[at][key] += inside / (high - low)
    return pieces
