# SPDX-License-Identifier: Apache-2.0
"""Timelines, simulated or measured, become scenes: times from the first start on, with colours and
causes of idle time.

A rank warms up until its first backward begins, and is in its tail after its last forward. An idle
time before the first backward is the warm-up, one after the last forward the tail. Between them, it
is the time in which a message was on the way, after the action that sent it had ended, or
imbalance, while another rank was still computing that action. A time on the way counts as a message
in every phase, once the rank has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from ...actions import KINDS, Action, Placement, Timeline
from ...errors import FpipeError
from .scene import Bar, Gap, Lane, Points, Scene

Timelines: TypeAlias = Timeline | Sequence[Timeline]

#: unit, how many of it are a second, and the least total in seconds that is shown in it
_SECONDS = (("s", 1.0, 2.0), ("ms", 1e3, 2e-3), ("us", 1e6, 0.0))
#: tints: 0 to 3 earlier, from much to little; 5 to 8 later, from little to much
SAME, ABSENT = 4, 9


def scenes(timelines: Timelines, difference: bool = False) -> tuple[Scene, ...]:
    """One timeline or several, to be drawn one over the other on one axis of time.

    Short times in seconds become milliseconds or microseconds. With ``difference``, all but the
    first are compared with that.
    """
    drawn = [timelines] if isinstance(timelines, Timeline) else timelines
    if not drawn:
        raise FpipeError("there is no timeline to draw; give at least one")
    unit, *others = sorted({timeline.unit for timeline in drawn})
    if others:
        named = " and in ".join(unit or "units of the costs" for unit in [unit, *others])
        raise FpipeError(f"timelines in {named} have no common axis; give them one unit")
    scale = 1.0
    if unit == "s":
        longest = max(timeline.total for timeline in drawn)
        unit, scale = next((u, scale) for u, scale, least in _SECONDS if longest >= least)
    first, *rest = (_scene(timeline, unit, scale) for timeline in drawn)
    if difference:
        rest = [_against(first, scene) for scene in rest]
    return first, *rest


def _scene(timeline: Timeline, unit: str, scale: float) -> Scene:
    colour_of, shades = _colouring(timeline.placement)

    def at(time: float) -> float:
        return (time - timeline.start) * scale

    rows: list[list[Bar]] = []
    for rank in range(timeline.ranks):
        rows.append([])
        for span in timeline.of_rank(rank):
            wait = timeline.waited_for(rank, span.position)
            bar = Bar(
                span.action,
                at(span.start),
                at(span.end),
                colours=tuple(colour_of(rank, part) for part in span.action.parts),
                cause=(wait.rank, wait.position) if wait else None,
                wait=max(wait.time, 0.0) * scale if wait else 0.0,
            )
            rows[-1].append(bar)
    lanes: list[Lane] = []
    for rank, bars in enumerate(rows):
        gaps = tuple(_gaps(rows, rank, timeline.total * scale))
        bubble = max(1 - timeline.busy[rank] / timeline.span, 0.0) if timeline.span else 0.0
        curve = [(at(time), amount) for time, amount in without_dips(timeline.curve(rank))]
        lanes.append(Lane(tuple(bars), gaps, bubble, curve))
    return Scene(timeline, tuple(lanes), unit, scale, shades)


def without_dips(curve: Points) -> Points:
    """A curve without dips of no length, where one action frees memory at the moment at which the
    next one takes it.
    """
    points = [one for one, then in pairwise(curve) if one[0] < then[0] or one[1] > then[1]]
    return [*points, *curve[-1:]]


def _colouring(placement: Placement) -> tuple[Callable[[int, Action], str], int]:
    """The colour of each action of a rank, and how many shades there are. The shade is the number
    of its stage among the chunks of its rank, counted for each path.
    """
    shades: list[dict[tuple[int, int], int]] = []  # by path: (rank, stage) -> shade
    count = 0
    for path in placement.paths:
        shades.append(
            {(rank, stage): count + path[:stage].count(rank) for stage, rank in enumerate(path)}
        )
        count += max(map(path.count, path))

    def colour_of(rank: int, part: Action) -> str:
        path = shades[placement.path_index(part.microbatch)]
        return f"{part.op}{path.get((rank, part.stage), 0)}"

    return colour_of, count


# ---- idle times ----
def _gaps(rows: Sequence[Sequence[Bar]], rank: int, total: float) -> Iterator[Gap]:
    """The idle times of a rank in order, none shorter than a billionth of the total."""
    bars, least = rows[rank], 1e-9 * total
    warm, last = _steady(bars)
    free = 0.0
    for k, bar in enumerate(bars):
        if bar.start - free > least:
            if k == 0 or bar.start <= warm:
                cause = "warmup"
            elif bar.start > last:
                cause = "tail"
            else:
                cause = "imbalance" if bar.cause else "other"
            sent = bar.start
            if k and bar.cause:
                other, index = bar.cause
                sent = min(max(rows[other][index].end, free), bar.start)
            if sent - free > least:
                yield Gap(free, sent, cause)
            if bar.start - sent > least:
                yield Gap(sent, bar.start, "message")
        free = max(free, bar.end)
    if total - free > least:
        yield Gap(free, total, "tail" if bars else "other")


def _steady(bars: Sequence[Bar]) -> tuple[float, float]:
    """When the warm-up of a rank ends and when its tail begins; its first start and last end
    without backwards.
    """
    if not bars:
        return 0.0, 0.0
    backward = [bar.start for bar in bars if _provides(bar, "I")]
    forward = [bar.end for bar in bars if _provides(bar, "F")]
    if not backward:
        return bars[0].start, bars[-1].end
    last = forward[-1] if forward else bars[-1].end
    return backward[0], max(backward[0], last)


def _provides(bar: Bar, fact: str) -> bool:
    return any(fact in KINDS[part.op].provides for part in bar.action.parts)


# ---- differences ----
def _against(first: Scene, second: Scene) -> Scene:
    """``second`` in the colours of how much earlier or later its actions end than in ``first``.

    An action is compared with the one that provides the same there: B with W, and I and W with B,
    if the other timeline has only those.
    """
    ends = {
        (fact, part.stage, part.whole, part.slice): bar.end
        for bar in first.bars
        for part in bar.action.parts
        for fact in KINDS[part.op].provides
    }

    def shift(bar: Bar) -> float | None:
        part = bar.action.parts[0]
        fact = KINDS[part.op].provides[-1]
        there = ends.get((fact, part.stage, part.whole, part.slice))
        return None if there is None else bar.end - there

    rows = [[bar._replace(shift=shift(bar)) for bar in lane.bars] for lane in second.lanes]
    shifts = [bar.shift for row in rows for bar in row if bar.shift is not None]
    most = max(map(abs, shifts), default=0.0)
    lanes: list[Lane] = []
    for lane, row in zip(second.lanes, rows, strict=True):
        bars = tuple(bar._replace(tint=f"t{tint(bar.shift, most)}") for bar in row)
        lanes.append(lane._replace(bars=bars))
    return replace(second, lanes=tuple(lanes), against=first)


def tint(shift: float | None, most: float) -> int:
    """The tint of a shift, where the greatest is ``most``.

    >>> [tint(shift, 8) for shift in (-8, -1, 0, 0.5, 8, None)]
    [0, 3, 4, 5, 8, 9]
    """
    if shift is None:
        return ABSENT
    if abs(shift) <= 1e-9 * most or not most:
        return SAME
    step = min(int(4 * abs(shift) / most), 3) + 1
    return SAME + step if shift > 0 else SAME - step
