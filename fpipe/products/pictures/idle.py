# SPDX-License-Identifier: Apache-2.0
"""Why a rank is idle, what it does in each phase of a step, and which actions depend on which.

A rank warms up until its first backward begins, and is in its tail after its last forward. An idle
time before the first backward is the warm-up, one after the last forward the tail. Between them, it
is the time in which a message was on the way, after the action that sent it had ended, or
imbalance, while another rank was still computing that action. A time on the way counts as a message
in every phase, once the rank has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from ...actions import KINDS, OPS
from .scene import Bar, Gap, Lane, Points, Scene

PHASES = ("warm-up", "steady", "tail")


def phases(bars: Sequence[Bar]) -> tuple[float, float]:
    """When the warm-up of a rank ends and when its tail begins; its first start and last end
    without backwards.
    """
    if not bars:
        return 0.0, 0.0
    facts = [
        {fact for part in bar.action.parts for fact in KINDS[part.op].provides} for bar in bars
    ]
    backward = [bar.start for bar, provided in zip(bars, facts, strict=True) if "I" in provided]
    forward = [bar.end for bar, provided in zip(bars, facts, strict=True) if "F" in provided]
    first = backward[0] if backward else bars[0].start
    last = forward[-1] if forward and backward else bars[-1].end
    return first, max(first, last)


def gaps(lanes: Sequence[Sequence[Bar]], rank: int, total: float) -> Iterator[Gap]:
    """The idle times of a rank in order, none shorter than a billionth of the total."""
    bars, least = lanes[rank], 1e-9 * total
    first, last = phases(bars)
    free = 0.0
    for k, bar in enumerate(bars):
        if bar.start - free > least:
            if k == 0 or bar.start <= first:
                cause = "warmup"
            elif bar.start > last:
                cause = "tail"
            else:
                cause = "imbalance" if bar.cause else "other"
            sent = bar.start
            if k and bar.cause:
                sent = min(max(lanes[bar.cause[0]][bar.cause[1]].end, free), bar.start)
            if sent - free > least:
                yield Gap(free, sent, cause)
            if bar.start - sent > least:
                yield Gap(sent, bar.start, "message")
        free = max(free, bar.end)
    if total - free > least:
        yield Gap(free, total, "tail" if bars else "other")


def critical(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """(rank, index of a bar) of the chain of actions that ends last, each held back by the one
    before it.
    """
    ends = [(-lane.bars[-1].end, rank) for rank, lane in enumerate(lanes) if lane.bars]
    if not ends:
        return []
    rank = min(ends)[1]
    index = len(lanes[rank].bars) - 1
    path: list[tuple[int, int]] = []
    while index >= 0:
        path.append((rank, index))
        rank, index = lanes[rank].bars[index].cause or (rank, index - 1)
    return path[::-1]


def messages(lanes: Sequence[Lane]) -> Iterator[tuple[Bar, int, Bar, int]]:
    """The bar and the rank of an action, and of one on another rank that takes its result."""
    parts = [
        (part, bar, rank)
        for rank, lane in enumerate(lanes)
        for bar in lane.bars
        for part in bar.action.parts
    ]
    sources = {
        (fact, part.stage, part.whole, part.slice): (bar, rank)
        for part, bar, rank in parts
        for fact in KINDS[part.op].provides
    }
    for part, bar, rank in parts:
        for fact, offset in KINDS[part.op].needs:
            source = sources.get((fact, part.stage + offset, part.whole, part.slice))
            if source and source[1] != rank:
                yield *source, bar, rank


# ---- shares of time ----
def intervals(lane: Lane, painted: bool = True) -> list[tuple[float, float, str]]:
    """(start, end, colour or cause) of a lane in order of time, with colours as they are painted or
    as they are by kind; the parts of a fused action run one after another.
    """
    found = [(gap.start, gap.end, gap.cause) for gap in lane.gaps]
    for bar in lane.bars:
        part = (bar.end - bar.start) / len(bar.colours)
        for k, colour in enumerate(bar.painted if painted else bar.colours):
            found.append((bar.start + k * part, bar.start + (k + 1) * part, colour))
    return sorted(found, key=lambda interval: interval[0])


def shares(
    intervals: Sequence[tuple[float, float, str]], edges: Sequence[float]
) -> list[dict[str, float]]:
    """Of each piece between two edges, the share of every key; the intervals are in order of time.

    >>> shares([(0, 1, "F"), (1, 3, "B")], [0, 2, 4])
    [{'F': 0.5, 'B': 0.5}, {'B': 0.5}]
    """
    pieces: list[dict[str, float]] = [{} for _ in edges[1:]]
    at = 0
    for start, end, key in intervals:
        while at < len(pieces) and edges[at + 1] <= start:
            at += 1
        piece = at
        while piece < len(pieces) and edges[piece] < end:
            low, high = edges[piece], edges[piece + 1]
            inside = min(end, high) - max(start, low)
            if inside > 0 and high > low:
                pieces[piece][key] = pieces[piece].get(key, 0.0) + inside / (high - low)
            piece += 1
    return pieces


# ---- lanes whose actions are too narrow to be drawn ----
#: colours in a lane, from its foot up
STACKED = (
    *(f"t{k}" for k in range(10)),
    *(f"{op}0" for op in OPS),
    *("tail", "imbalance", "message", "other", "warmup"),
)
LEAST = 6.0  #: the least width of a piece in pixels
LEAST_CELL = 2.0  #: pixels of a short bar, below which a lane shows shares


def piece(scene: Scene, scale: float) -> float:
    """The length of a piece: the work of a rank on a whole number of microbatches, so that a steady
    phase is even.
    """
    work = scene.work / max(scene.microbatches, 1)
    if work <= 0 or work * scale > 4 * LEAST:
        return LEAST / scale
    return work * ceil(LEAST / (work * scale))


def bands(
    lane: Lane, scene: Scene, scale: float
) -> tuple[list[float], list[tuple[str, list[float]]]]:
    """The edges of the pieces, and (colour, height in each piece), the later ones over the
    earlier: a height is the share of this colour and of those to be drawn over it.
    """
    length = piece(scene, scale)
    edges = [min(k * length, scene.total) for k in range(ceil(scene.total / length - 1e-9) + 1)]
    unshaded = [(a, b, f"{key[0]}0" if key[0] in OPS else key) for a, b, key in intervals(lane)]
    parts = shares(unshaded, edges)
    heights = [0.0] * len(parts)
    found: list[tuple[str, list[float]]] = []
    for colour in STACKED:
        if any(colour in part for part in parts):
            heights = [
                min(height + part.get(colour, 0.0), 1.0)
                for height, part in zip(heights, parts, strict=True)
            ]
            found.append((colour, heights))
    return edges, found[::-1]


def envelope(curve: Points, length: float) -> Points:
    """A curve with one point in each ``length`` of time, the greatest there; equal ones are one.

    >>> envelope([(0, 1), (1, 2), (2, 1), (3, 2), (9, 0)], 4)
    [(0, 2), (8, 0)]
    """
    most: dict[int, float] = {}
    for time, amount in curve:
        most[int(time / length)] = max(most.get(int(time / length), amount), amount)
    points: list[tuple[float, float]] = []
    for at, amount in most.items():
        if not points or points[-1][1] != amount:
            points.append((at * length, amount))
    return points
