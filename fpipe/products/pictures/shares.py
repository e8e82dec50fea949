# SPDX-License-Identifier: Apache-2.0
"""Shares of time: what a lane shows whose actions are too narrow to be drawn one by one.

A lane is cut into pieces, and each shows how much of its time each kind of work takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TypeAlias

from ...actions import OPS
from .scene import Lane, Points, Scene

Interval: TypeAlias = tuple[float, float, str]  # start, end, colour or cause

#: colours in a lane, from its foot up
STACKED = (
    *(f"t{k}" for k in range(10)),
    *(f"{op}0" for op in OPS),
    *("tail", "imbalance", "message", "other", "warmup"),
)
LEAST = 6.0  #: the least width of a piece in pixels
LEAST_CELL = 2.0  #: pixels of a short bar, below which a lane shows shares


def busy(lane: Lane, painted: bool = True) -> list[Interval]:
    """The actions of a lane with their colours as they are painted or as they are by kind; the
    parts of a fused one run one after another.
    """
    found: list[Interval] = []
    for bar in lane.bars:
        length = (bar.end - bar.start) / len(bar.colours)
        for k, colour in enumerate(bar.painted if painted else bar.colours):
            found.append((bar.start + k * length, bar.start + (k + 1) * length, colour))
    return found


def shares(intervals: Sequence[Interval], edges: Sequence[float]) -> list[Mapping[str, float]]:
    """Of each piece between two edges, the share of every key.

    >>> [dict(piece) for piece in shares([(0, 1, "F"), (1, 3, "B")], [0, 2, 4])]
    [{'F': 0.5, 'B': 0.5}, {'B': 0.5}]
    """
    pieces: list[defaultdict[str, float]] = [defaultdict(float) for _ in edges[1:]]
    for start, end, key in intervals:
        first, stop = bisect_right(edges, start) - 1, bisect_left(edges, end)
        for at in range(max(first, 0), min(stop, len(pieces))):
            low, high = edges[at], edges[at + 1]
            pieces[at][key] += (min(end, high) - max(start, low)) / (high - low)
    return [*pieces]


def piece(scene: Scene, scale: float) -> float:
    """The length of a piece: the work of a rank on a whole number of microbatches, so that a steady
    phase is even.
    """
    work = sum(scene.timeline.busy) * scene.scale
    work /= max(scene.microbatches, 1) * max(len(scene.lanes), 1)
    if work <= 0 or work * scale > 4 * LEAST:
        return LEAST / scale
    return work * ceil(LEAST / (work * scale))


def bands(lane: Lane, scene: Scene, scale: float) -> tuple[list[float], dict[str, list[float]]]:
    """The edges of the pieces, and by colour its height in each piece, the later ones over the
    earlier: a height is the share of this colour and of those to be drawn over it.
    """
    length = piece(scene, scale)
    edges = [min(k * length, scene.total) for k in range(ceil(scene.total / length - 1e-9) + 1)]
    work = [(a, b, f"{key[0]}0" if key[0] in OPS else key) for a, b, key in busy(lane)]
    parts = shares([*work, *lane.gaps], edges)
    heights = [0.0] * len(parts)
    found: dict[str, list[float]] = {}
    for colour in STACKED:
        if any(colour in part for part in parts):
            grown = zip(heights, parts, strict=True)
            heights = [min(height + part.get(colour, 0.0), 1.0) for height, part in grown]
            found[colour] = heights
    return edges, dict(reversed(found.items()))


def envelope(curve: Points, length: float) -> Points:
    """A curve with one point in each ``length`` of time, the greatest there.

    >>> envelope([(0, 1), (1, 2), (2, 1), (9, 0)], 4)
    [(0, 2), (8, 0)]
    """
    most: dict[int, float] = {}
    for time, amount in curve:
        at = int(time / length)
        most[at] = max(most.get(at, amount), amount)
    return [(at * length, amount) for at, amount in most.items()]
