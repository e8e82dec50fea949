# SPDX-License-Identifier: Apache-2.0
"""A lane whose actions are too narrow to be drawn: what share of its time each kind of work and
each cause of idle time takes, piece by piece, and the same over the phases of a step. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from ...actions.action_kinds import OPS
from . import labels
from .difference import TINTS
from .idle import CAUSES, PHASES, phases, shares
from .lanes import Lane
from .scene import Scene

KINDS = (
    *(f"t{k}" for k in range(TINTS)),
    *OPS,
    "tail",
    "imbalance",
    "message",
    "other",
    "warmup",
)  #: in a lane, from its foot up
LEAST, FINEST = 6.0, 0.25  #: the least width of a piece and the least step of its height, in pixels


def intervals(lane: Lane, tinted: bool = False) -> list[tuple[float, float, str]]:
    """(start, end, kind) of a lane in order of time; the parts of a fused action run one after
    another.
    """
    found = [(gap.start, gap.end, gap.cause) for gap in lane.gaps]
    for bar in lane.bars:
        parts = bar.action.parts
        each = (bar.end - bar.start) / len(parts)
        found += [
            (
                bar.start + k * each,
                bar.start + (k + 1) * each,
                f"t{bar.shades[0]}" if tinted else part.op,
            )
            for k, part in enumerate(parts)
        ]
    return sorted(found, key=lambda interval: interval[0])


def piece(scene: Scene, scale: float) -> float:
    """The length of a piece: the work of a rank on a whole number of microbatches, so that a steady
    phase is even.
    """
    each = scene.work / max(scene.microbatches, 1)
    if each <= 0 or each * scale > 4 * LEAST:
        return LEAST / scale
    return each * ceil(LEAST / (each * scale))


def bands(
    lane: Lane, scene: Scene, scale: float, height: float
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """(kind, outline) of a lane, in pixels from its left top corner, the later ones over the
    earlier.
    """
    long = piece(scene, scale)
    edges = [min(k * long, scene.total) for k in range(ceil(scene.total / long - 1e-9) + 1)]
    parts = shares(intervals(lane, scene.against is not None), edges)
    tops: list[float] = [0.0] * len(parts)  # the share up to and with a kind
    outlines: list[tuple[str, list[tuple[float, float]]]] = []
    for kind in KINDS:
        if any(kind in part for part in parts):
            tops = [
                min(top + part.get(kind, 0.0), 1.0) for top, part in zip(tops, parts, strict=True)
            ]
            outlines.append(
                (f"{kind}0" if kind in OPS else kind, _outline(tops, edges, scale, height))
            )
    yield from reversed(outlines)


def _outline(
    tops: Sequence[float], edges: Sequence[float], scale: float, height: float
) -> list[tuple[float, float]]:
    """The steps of an area over the foot of a lane."""
    points = [(0.0, height)]
    for top, start in zip(tops, edges, strict=False):
        y = height - round(top * height / FINEST) * FINEST
        if y != points[-1][1]:
            points += [(start * scale, points[-1][1]), (start * scale, y)]
    end = edges[-1] * scale
    return [*points, (end, points[-1][1]), (end, height)]


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
    """For each phase, its share of the time of all ranks and what they do in it.

    A rank warms up until its first backward, and is in its tail after its last forward.
    """
    totals: list[dict[str, float]] = [{} for _ in PHASES]
    for lane in scene.lanes:
        first, last = phases(lane.bars)
        edges = [0.0, first, last, scene.total]
        for k, part in enumerate(shares(intervals(lane), edges)):
            for kind, share in part.items():
                totals[k][kind] = totals[k].get(kind, 0.0) + share * (edges[k + 1] - edges[k])
    whole = scene.total * len(scene.lanes) or 1.0
    lines = []
    for phase, kinds in zip(PHASES, totals, strict=True):
        time = sum(kinds.values())
        if time > 5e-4 * whole:
            ops = [f"{kind} {labels.percent(kinds[kind] / time)}" for kind in OPS if kind in kinds]
            idle = sum(share for kind, share in kinds.items() if kind in CAUSES) / time
            ops += [f"idle {labels.percent(idle)}"] if idle > 5e-4 else []
            lines.append(
                f"{phase.capitalize()}, {labels.percent(time / whole)} of all ranks' time: "
                f"{', '.join(ops)}."
            )
    return lines
