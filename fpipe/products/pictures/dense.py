# SPDX-License-Identifier: Apache-2.0
"""A lane whose actions are too narrow to be drawn: what share of its time each kind of work and
each cause of idle time takes, piece by piece, and the same over the phases of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from ...actions import OPS
from . import labels
from .idle import PHASES, intervals, phases, shares
from .scene import CAUSES, Lane, Scene

#: colours in a lane, from its foot up
STACKED = (
    *(f"t{k}" for k in range(10)),
    *(f"{op}0" for op in OPS),
    *("tail", "imbalance", "message", "other", "warmup"),
)
LEAST = 6.0  #: the least width of a piece in pixels
LEAST_CELL = 2.0  #: pixels of a short bar, below which a lane shows shares


def is_dense(scene: Scene, scale: float) -> bool:
    """Whether the actions of a scene are too narrow to be drawn one by one; ``scale`` is in pixels
    per unit of time.
    """
    return scene.cell * scale < LEAST_CELL


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
    parts = shares(_unshaded(lane), edges)
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


def _unshaded(lane: Lane) -> list[tuple[float, float, str]]:
    return [(a, b, f"{key[0]}0" if key[0] in OPS else key) for a, b, key in intervals(lane)]


def envelope(curve: Sequence[tuple[float, float]], length: float) -> list[tuple[float, float]]:
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


def lines_of_phases(scene: Scene) -> list[str]:
    """For each phase, its share of the time of all ranks and what they do in it."""
    totals: list[Counter[str]] = [Counter() for _ in PHASES]
    for lane in scene.lanes:
        edges = [0.0, *phases(lane.bars), scene.total]
        for k, part in enumerate(shares(_unshaded(lane), edges)):
            for colour, share in part.items():
                totals[k][colour] += share * (edges[k + 1] - edges[k])
    whole = scene.total * len(scene.lanes) or 1.0
    lines = []
    for phase, times in zip(PHASES, totals, strict=True):
        time = times.total()
        if time > 5e-4 * whole:
            does = [
                f"{op} {labels.percent(times[f'{op}0'] / time)}" for op in OPS if times[f"{op}0"]
            ]
            idle = sum(times[cause] for cause in CAUSES) / time
            does += [f"idle {labels.percent(idle)}"] if idle > 5e-4 else []
            lines.append(
                f"{phase.capitalize()}, {labels.percent(time / whole)} of all ranks' time: "
                f"{', '.join(does)}."
            )
    return lines
