# SPDX-License-Identifier: Apache-2.0
"""The layout of a still picture: titles, axis, lanes, memory curves, legend. It knows nothing of
files.

Where a short action would be narrower than two pixels, a lane shows how much of its time each kind
of work takes, in pieces as long as the work of a whole number of microbatches (see ``dense``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from . import labels
from .dense import bands, envelope, lines_of_phases
from .idle import CAUSES, messages
from .lanes import Bar, Lane
from .scene import Scene, name
from .shapes import Look, Page, Path, Rect, Shape, Text
from .text_width import text_width

EDGE, GAP = 24, 4  # around the page, between lanes
LANE = {8: 26, 32: 20, 10**9: 14}  # lane height up to so many ranks
CELL, NARROWEST, WIDEST = (
    26,
    560,
    2200,
)  # the width of a short bar, if space allows; of all bars together
TIGHT, WIDER = 15, 4200  # the same for long schedules
PHONE = 700  # pages narrower than this have short labels beside the lanes
LEAST_CELL = 2.0  # pixels of a short bar, below which a lane shows shares


class _Frame(NamedTuple):
    """The measures that all lanes of a page share."""

    left: float
    width: float
    right: float  # of the page
    scale: float  # pixels per unit of time
    lane: float  # height
    curve: float  # height of memory curves
    detail: int
    size: float  # of letters in bars
    hints: bool
    short: bool  # labels beside the lanes


def page(scenes: Sequence[Scene], look: Look | None = None) -> Page:
    """The layout of a picture of these scenes, one over the other on one axis."""
    look = look or Look()
    frame = _frame(scenes, look)
    shapes: list[Shape] = []
    y: float = EDGE
    for scene in scenes:
        y = _head(shapes, scene, frame, y)
        pitch = frame.lane + frame.curve + GAP
        bottom = y + len(scene.lanes) * pitch - GAP
        shapes += _axis(scenes, frame, y, bottom, scene.unit)
        most = max((lane.peak for lane in scene.lanes), default=0.0)
        for rank, lane in enumerate(scene.lanes):
            shapes += _lane(rank, lane, scene, frame, y + rank * pitch)
            shapes += _link(lane, frame, y + rank * pitch)
            if frame.curve:
                shapes += _curve(
                    lane, most, frame, y + rank * pitch + frame.lane, is_dense(scene, frame.scale)
                )
        if look.messages and not is_dense(scene, frame.scale):
            shapes += _messages(scene, frame, y, pitch)
        if look.critical:
            shapes += _critical(scene, frame, y, pitch)
        y = bottom + 22
    y = _legend(shapes, scenes, frame, look, y)
    return Page(frame.right, y + EDGE - 8, shapes, max(scene.shades for scene in scenes))


def is_dense(scene: Scene, scale: float) -> bool:
    """Whether the actions of a scene are too narrow to be drawn one by one."""
    return scene.cell * scale < LEAST_CELL


def _frame(scenes: Sequence[Scene], look: Look) -> _Frame:
    end = max(scene.total for scene in scenes) or 1.0
    cell = min(scene.cell for scene in scenes)
    ranks = max(len(scene.lanes) for scene in scenes)
    short = look.width is not None and look.width < PHONE
    left = (
        (12 + 7 * len(f"{ranks - 1}") + 10) if short else EDGE + 10 + 7 * len(f"rank {ranks - 1}")
    )
    beside = (
        12.0
        if short
        else 24 + max(text_width(labels.figures_of(one, s), 11) for s in scenes for one in s.lanes)
    )
    wide = natural_width(scenes)
    if look.width is not None:
        wide = max(look.width - left - beside, 60.0)
    scale = wide / end
    lane = lane_height(scenes)
    curve = (
        round(0.45 * lane)
        if look.memory and any(lane.curve for s in scenes for lane in s.lanes)
        else 0
    )
    detail, size = label_size(scenes, cell * scale)
    hints = sum(scene.bars for scene in scenes) <= 4000
    return _Frame(left, wide, left + wide + beside, scale, lane, curve, detail, size, hints, short)


def natural_width(scenes: Sequence[Scene]) -> float:
    """The width of all bars together where none is asked for."""
    cells = max(scene.total for scene in scenes) / min(scene.cell for scene in scenes)
    wide = max(min(cells * CELL, WIDEST), NARROWEST)
    return max(wide, cells * TIGHT) if cells * TIGHT <= WIDER else wide


def lane_height(scenes: Sequence[Scene]) -> float:
    """The height of a lane: less for many ranks."""
    ranks = max(len(scene.lanes) for scene in scenes)
    return next(height for most, height in LANE.items() if ranks <= most)


def label_size(scenes: Sequence[Scene], space: float) -> tuple[int, float]:
    """The fullest names that fit into a short bar, and their size."""
    for detail in (3, 2, 1):
        size = (space - 3) / max(0.5, *(scene.widest_name(detail) for scene in scenes))
        if size >= (9.5 if detail > 1 else 7.5):
            return detail, min(size, 12.0)
    return 0, 0.0


def _head(shapes: list[Shape], scene: Scene, frame: _Frame, y: float) -> float:
    """Title, figures and what they mean; returns where the lanes begin."""
    left = 12 if frame.short else EDGE
    space = frame.right - left - 12
    for line in _wrapped(labels.title(scene), 17, space):
        shapes.append(Text(left, y + 14, line, 17, bold=True))
        y += 20
    texts = [labels.figures(scene), labels.idle(scene), labels.note(scene)]
    texts += lines_of_phases(scene) if is_dense(scene, frame.scale) else []
    for text in filter(None, texts):
        for line in _wrapped(text, 12.5, space):
            shapes.append(Text(left, y + 14, line, 12.5, "faint"))
            y += 17
    return y + 30


def _wrapped(text: str, size: float, space: float) -> Iterator[str]:
    """The lines of a text that fit the space."""
    line = ""
    for word in text.split(" "):
        if line and text_width(f"{line} {word}", size) > space:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _axis(
    scenes: Sequence[Scene], frame: _Frame, top: float, bottom: float, unit: str
) -> Iterator[Shape]:
    step = labels.step_of((45 if frame.short else 70) / frame.scale)
    end = max(scene.total for scene in scenes)
    for tick in takewhile(lambda tick: tick * step <= end * (1 + 1e-9), count()):
        x = frame.left + tick * step * frame.scale
        yield Rect(x - 0.5, top - 5, 1, bottom - top + 10, "line")
        label = labels.number(tick * step) + (f" {unit}" if unit and tick == 0 else "")
        yield Text(x, top - 9, label, 10.5, "faint", "middle")


# ---- lanes ----
def _lane(rank: int, lane: Lane, scene: Scene, frame: _Frame, y: float) -> Iterator[Shape]:
    """The label, the idle time and the actions of a rank."""
    middle = y + frame.lane / 2 + 4
    yield Text(
        frame.left - 8, middle, str(rank) if frame.short else f"rank {rank}", 12, "ink", "end"
    )
    if not frame.short:
        yield Text(
            frame.left + frame.width + 10, middle, labels.figures_of(lane, scene), 11, "faint"
        )
    if is_dense(scene, frame.scale):
        for key, points in bands(lane, scene, frame.scale, frame.lane):
            yield Path(tuple((frame.left + x, y + dy) for x, dy in points), key)
        return
    for gap in lane.gaps:
        x, long = frame.left + gap.start * frame.scale, (gap.end - gap.start) * frame.scale
        what = (
            f"idle {labels.time(gap.end - gap.start, scene)}: {CAUSES[gap.cause]}"
            if frame.hints
            else ""
        )
        yield Rect(x, y, long, frame.lane, gap.cause, what)
    for bar in lane.bars:
        yield from _bar(bar, scene, frame, y)


def _bar(bar: Bar, scene: Scene, frame: _Frame, y: float) -> Iterator[Shape]:
    x, long = frame.left + bar.start * frame.scale, (bar.end - bar.start) * frame.scale
    height = frame.lane / len(bar.shades)
    inset = min(0.5, long / 8)
    hint = _hint(bar, scene) if frame.hints else ""
    for k, (part, shade) in enumerate(zip(bar.action.parts, bar.shades, strict=True)):
        key = scene.key(part.op, shade)
        top = y + k * height
        yield Rect(x + inset, top, long - 2 * inset, height, key, hint)
        label = name(part, frame.detail)
        size = min(frame.size, height - 2)
        if label and size >= 6.5 and text_width(label, size) <= long:
            yield Text(
                x + long / 2,
                top + height / 2 + 0.36 * size,
                label,
                size,
                key,
                "middle",
                on=key,
                space=long - 2,
            )


def _link(lane: Lane, frame: _Frame, y: float) -> Iterator[Shape]:
    """A thin strip at the foot of a lane: what its link carries."""
    for start, end, what in lane.carried:
        hint = what if frame.hints else ""
        yield Rect(
            frame.left + start * frame.scale,
            y + frame.lane - 3,
            (end - start) * frame.scale,
            3,
            "ink",
            hint,
        )


def _hint(bar: Bar, scene: Scene) -> str:
    text = f"{bar.action}: {labels.number(bar.start)} to {labels.time(bar.end, scene)}"
    if bar.cause and bar.wait > 0:
        rank, position = bar.cause
        text += (
            f", waited {labels.number(bar.wait)} for "
            f"{scene.lanes[rank].bars[position].action} of rank {rank}"
        )
    if scene.against:
        text += f"; {labels.shift(bar.shift, scene)}"
    return text


def _curve(lane: Lane, most: float, frame: _Frame, y: float, dense: bool) -> Iterator[Shape]:
    """What a rank holds, below its lane, as an area with a line over it; all ranks have one
    scale.
    """
    curve = envelope(lane.curve, 2 / frame.scale) if dense else lane.curve
    if not curve or most <= 0:
        return
    base, high = y + frame.curve, frame.curve - 2
    points = [(frame.left + curve[0][0] * frame.scale, base)]
    for time, amount in curve:
        x = frame.left + time * frame.scale
        points += [(x, points[-1][1]), (x, base - high * max(amount, 0.0) / most)]
    end = frame.left + (lane.bars[-1].end if lane.bars else 0.0) * frame.scale
    points += [(end, points[-1][1]), (end, base)]
    yield Path(tuple(points), "curve", 0, 0.3)
    yield Path(tuple(points), "curve", 0.8)


# ---- over the lanes ----
def _messages(scene: Scene, frame: _Frame, y: float, pitch: float) -> Iterator[Shape]:
    """A thin line from the end of an action to the start of the one that takes its result, from
    lane edge to edge.
    """
    for rank, k, other, at in messages(scene.lanes):
        start, end = scene.lanes[rank].bars[k].end, scene.lanes[other].bars[at].start
        if end >= start:
            a, b = y + rank * pitch, y + other * pitch
            a, b = (a + frame.lane, b) if a < b else (a, b + frame.lane)
            points = (frame.left + start * frame.scale, a), (frame.left + end * frame.scale, b)
            yield Path(points, "message-line", 0.6, 0.75)


def _critical(scene: Scene, frame: _Frame, y: float, pitch: float) -> Iterator[Shape]:
    """A line through the actions on which the total depends, at the foot of their bars."""
    points: list[tuple[float, float]] = []
    for rank, k in scene.critical:
        bar = scene.lanes[rank].bars[k]
        at = y + rank * pitch + frame.lane - 1.5
        points += [
            (frame.left + bar.start * frame.scale, at),
            (frame.left + bar.end * frame.scale, at),
        ]
    if points:
        yield Path(tuple(points), "mark", 2.2)


# ---- the legend ----
class _Item(NamedTuple):
    """An entry of the legend: its swatches as (key, height share, letter), and its text."""

    swatches: list[tuple[str, float, str]]
    text: str


def legend_items(scenes: Sequence[Scene], look: Look, scale: float) -> Iterator[_Item]:
    """The entries of the legend."""
    dense = all(is_dense(scene, scale) for scene in scenes)
    shown = 1 if dense else max([scene.shades for scene in scenes if not scene.against], default=1)
    for op, word, _ in labels.legend([scene for scene in scenes if not scene.against]):
        yield _Item([(f"{op}{k}", 1.0, "" if k else op) for k in range(shown)], word)
    if shown > 1:
        yield _Item([], "paler: a rank's other stages")
    if dense:
        yield _Item([], "height: share of the time")
    if any(scene.fused for scene in scenes) and not dense:
        yield _Item([("F0", 0.5, ""), ("B0", 0.5, "")], "fused")
    for scene in scenes:
        for tints, word in labels.tints(scene):
            yield _Item([(f"t{tint}", 1.0, "") for tint in tints], word)
    for cause, word in CAUSES.items():
        if any(cause in scene.idle for scene in scenes):
            yield _Item([(cause, 1.0, "")], f"idle: {word}")
    if look.memory and any(lane.curve for scene in scenes for lane in scene.lanes):
        yield _Item([("curve", 0.3, "")], "memory that the rank holds")
    if look.critical:
        yield _Item([("mark", 0.2, "")], "critical path")
    if look.messages and not dense:
        yield _Item([("message-line", 0.1, "")], "message")


def _legend(
    shapes: list[Shape], scenes: Sequence[Scene], frame: _Frame, look: Look, y: float
) -> float:
    """The legend, in as many lines as it needs; returns where it ends."""
    first = 12 if frame.short else frame.left
    x: float = first
    for item in legend_items(scenes, look, frame.scale):
        stacked = len(item.swatches) > 1 and item.swatches[0][1] < 1
        boxes = 16 * (1 if stacked else len(item.swatches))
        space = boxes + 7 + 1.1 * text_width(item.text, 12) + 20
        if x > first and x + space - 20 > frame.right - 12:
            x, y = first, y + 22
        for k, (key, share, letter) in enumerate(item.swatches):
            at, top = (x, y + 8 * k) if stacked else (x + 16 * k, y + 16 - 16 * share)
            shapes.append(Rect(at, top, 16, 16 * share, key))
            if letter:
                shapes.append(Text(at + 8, y + 12, letter, 11, key, "middle", on=key))
        shapes.append(Text(x + boxes + (7 if boxes else 0), y + 12.5, item.text, 12))
        x += space
    return y + 16
