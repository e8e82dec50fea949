# SPDX-License-Identifier: Apache-2.0
"""Timelines, simulated or measured, become scenes: times from the first start on, in one unit, with
colours and causes of idle time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, TypeAlias

from ...actions import KINDS, Action, Carried, Placement, Row, Span, Wait
from ...errors import FpipeError, ScheduleError
from .idle import gaps
from .scene import Bar, Lane, Points, Scene

#: unit, how many of it are a second, and the least total in seconds that is shown in it
_SECONDS = (("s", 1.0, 2.0), ("ms", 1e3, 2e-3), ("us", 1e6, 0.0))
SAME, ABSENT = (
    4,
    9,
)  #: tints: 0 to 3 earlier, from much to little; 5 to 8 later, from little to much
_KeyOf: TypeAlias = Callable[[int, Action], str]


class Drawable(Protocol):
    """What pictures need of a timeline. ``fpipe.Timeline`` has it; another class that has it can be
    drawn too.
    """

    @property
    def name(self) -> str:
        """The title, or empty."""
        ...

    @property
    def unit(self) -> str:
        """The unit of time, or empty for that of a cost model."""
        ...

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ...

    @property
    def span(self) -> float:
        """The longest time between a rank's first start and its last end."""
        ...

    @property
    def bubble(self) -> float:
        """The idle share of that time."""
        ...

    def of_rank(self, rank: int, /) -> Sequence[Span]:
        """The spans of a rank, in order."""
        ...

    def curve(self, rank: int, /) -> Points:
        """(time, amount that the rank holds from then on)."""
        ...

    def waited_for(self, rank: int, position: int, /) -> Wait | None:
        """What a span waited for."""
        ...


Timelines: TypeAlias = Drawable | Sequence[Drawable]


def scenes(timelines: Timelines, difference: bool = False) -> tuple[Scene, ...]:
    """One timeline or several, to be drawn one over the other on one axis of time.

    Short times in seconds become milliseconds or microseconds. A timeline without a unit, such as
    one simulated with costs of 1, is stretched beside those with a unit until both have worked as
    long; ``one`` is the factor. With ``difference``, all but the first are compared with that.
    """
    drawn = [*timelines] if isinstance(timelines, Sequence) else [timelines]
    if not drawn:
        raise FpipeError("there is no timeline to draw; give at least one")
    units = {timeline.unit for timeline in drawn} - {""}
    if len(units) > 1:
        raise FpipeError(
            f"timelines in {' and in '.join(sorted(units))} have no common axis; give them one unit"
        )
    rows = [[timeline.of_rank(rank) for rank in range(timeline.ranks)] for timeline in drawn]
    measured = [spans for timeline, spans in zip(drawn, rows, strict=True) if timeline.unit]
    unit, factor = units.pop() if units else "", 1.0
    if unit == "s":
        longest = max(last - first for first, last in map(_extent, measured))
        unit, factor = next((u, f) for u, f, least in _SECONDS if longest >= least)
    result: list[Scene] = []
    for timeline, spans in zip(drawn, rows, strict=True):
        one = 0.0
        if unit and not timeline.unit and _worked(spans):
            one = factor * _worked(measured[0]) / _worked(spans)
        scene = _scene(timeline, spans, unit, one or factor, one)
        result.append(_against(result[0], scene) if difference and result else scene)
    return tuple(result)


def _worked(rows: Sequence[Sequence[Span]]) -> float:
    return sum(span.end - span.start for row in rows for span in row)


def _extent(rows: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """The first start and the last end."""
    starts = (span.start for row in rows for span in row)
    ends = (span.end for row in rows for span in row)
    return min(starts, default=0.0), max(ends, default=0.0)


def _scene(
    timeline: Drawable, rows: Sequence[Sequence[Span]], unit: str, factor: float, one: float
) -> Scene:
    """The scene of a timeline, its times multiplied by ``factor``."""
    first, last = _extent(rows)

    def at(time: float) -> float:
        return (time - first) * factor

    key_of, shades = _colouring([tuple(span.action for span in row) for row in rows])
    lanes: list[Lane] = []
    links: Sequence[Sequence[Carried]] = getattr(timeline, "carried", ()) or [()] * len(rows)
    for rank, (row, link) in enumerate(zip(rows, links, strict=True)):
        bars = []
        for span in row:
            wait = timeline.waited_for(rank, span.position)
            colours = tuple(key_of(rank, part) for part in span.action.parts)
            cause = wait and (wait.rank, wait.position)
            waited = max(wait.time, 0.0) * factor if wait else 0.0
            bars.append(Bar(span.action, at(span.start), at(span.end), colours, cause, waited))
        curve = tuple((at(time), amount) for time, amount in without_dips(timeline.curve(rank)))
        lanes.append(
            Lane(
                tuple(bars),
                bubble=max(1 - _worked([row]) / timeline.span, 0.0) if timeline.span else 0.0,
                peak=max((amount for _, amount in curve), default=0.0),
                curve=curve,
                carried=tuple((at(start), at(end), what) for start, end, what in link),
            )
        )
    bars_of = [lane.bars for lane in lanes]
    lanes = [
        lane._replace(gaps=tuple(gaps(bars_of, rank, at(last)))) for rank, lane in enumerate(lanes)
    ]
    in_bytes = max((lane.peak for lane in lanes), default=0.0) >= 4096  # or activations
    return Scene(
        timeline.name,
        tuple(lanes),
        total=at(last),
        span=timeline.span * factor,
        bubble=timeline.bubble,
        unit=unit,
        memory_unit="bytes" if in_bytes else "",
        shades=shades,
        one=one,
    )


def without_dips(curve: Points) -> Points:
    """A curve without dips of no length, where one action frees memory at the moment at which the
    next one takes it.
    """
    points = [one for one, then in pairwise(curve) if one[0] < then[0] or one[1] > then[1]]
    return [*points, *curve[-1:]]


def _colouring(rows: Sequence[Row]) -> tuple[_KeyOf, int]:
    """The colour of each action, and how many shades there are. The shade is the number of its
    stage among the chunks of its rank, counted for each path. A measured timeline may lack actions;
    then the number is counted among the stages that the rank ran.
    """
    try:
        placement = Placement.from_rows(rows)
    except ScheduleError:
        stages = [sorted({part.stage for action in row for part in action.parts}) for row in rows]
        return (lambda rank, part: f"{part.op}{stages[rank].index(part.stage)}"), max(
            1, *map(len, stages)
        )
    shades: list[dict[tuple[int, int], int]] = []  # by path: (rank, stage) -> shade
    count = 0
    for path in placement.paths:
        shades.append(
            {(rank, stage): count + path[:stage].count(rank) for stage, rank in enumerate(path)}
        )
        count += max(map(path.count, path))

    def key_of(rank: int, part: Action) -> str:
        path = shades[placement.path_index(part.microbatch)]
        return f"{part.op}{path.get((rank, part.stage), 0)}"

    return key_of, count


# ---- differences ----
def _against(first: Scene, second: Scene) -> Scene:
    """``second`` in the colours of how much earlier or later its actions end than in ``first``.

    An action is compared with the one that provides the same there: B with W, and I and W with B,
    if the other timeline has only those.
    """
    ends = {
        (fact, *_place(part)): bar.end
        for bar in first.bars
        for part in bar.action.parts
        for fact in KINDS[part.op].provides
    }

    def shifted(bar: Bar) -> Bar:
        part = bar.action.parts[0]
        there = ends.get((KINDS[part.op].provides[-1], *_place(part)))
        return bar._replace(shift=None if there is None else bar.end - there)

    rows = [[shifted(bar) for bar in lane.bars] for lane in second.lanes]
    most = max(
        (abs(bar.shift) for row in rows for bar in row if bar.shift is not None), default=0.0
    )
    lanes = tuple(
        lane._replace(bars=tuple(bar._replace(tint=f"t{tint(bar.shift, most)}") for bar in row))
        for lane, row in zip(second.lanes, rows, strict=True)
    )
    return replace(second, lanes=lanes, against=first)


def _place(part: Action) -> tuple[int, int, int]:
    return part.stage, part.whole, part.slice


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
