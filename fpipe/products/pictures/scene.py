# SPDX-License-Identifier: Apache-2.0
"""The contents of a picture: bars in lanes, their shades, and the figures beside them.

``Drawable`` is the interface of a timeline, simulated or measured; :func:`scenes` turns timelines
into ``Scene``, plain data that every format reads. Nothing here depends on the source of the times,
or on schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeAlias

from ...actions import Action, Row, Span, Wait, plain
from ...actions.action_kinds import OPS
from ...actions.placement import Placement
from ...errors import FpipeError, ScheduleError
from .idle import CAUSES, critical, gaps
from .lanes import Bar, Lane
from .text_width import text_width


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

    def curve(self, rank: int, /) -> Sequence[tuple[float, float]]:
        """(time, amount that the rank holds from then on)."""
        ...

    def waited_for(self, rank: int, position: int, /) -> Wait | None:
        """What a span waited for."""
        ...


@dataclass(frozen=True)
class Scene:
    """One timeline, ready to be drawn."""

    name: str
    lanes: tuple[Lane, ...]
    total: float
    span: float
    bubble: float
    unit: str  # of time, "" for that of the cost model
    memory_unit: str  # of what is held
    shades: int  # how many shades there are: a rank's chunks, or chunks times directions
    against: Scene | None = None  # what it is compared with: then ``shades`` of bars are tints
    one: float = 0.0  # the drawn length of one unit of the cost model, if it was stretched; else 0

    @cached_property
    def bars(self) -> int:
        """How many bars there are in all."""
        return sum(len(lane.bars) for lane in self.lanes)

    def key(self, op: str, shade: int) -> str:
        """The colour of a part of a bar, a key of ``colours.palette``."""
        return f"t{shade}" if self.against else f"{op}{shade}"

    def _parts(self) -> Iterator[Action]:
        return (part for lane in self.lanes for bar in lane.bars for part in bar.action.parts)

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The ops that occur, in the order of the legend."""
        seen = {part.op for part in self._parts()}
        return tuple(op for op in OPS if op in seen)

    @cached_property
    def fused(self) -> bool:
        """Whether any action is fused."""
        return any(len(bar.shades) > 1 for lane in self.lanes for bar in lane.bars)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches in the bars."""
        return max((part.whole for part in self._parts()), default=-1) + 1

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return max((part.slice for part in self._parts()), default=0) + 1

    @cached_property
    def cell(self) -> float:
        """The length of a short bar: the shortest without the shortest twentieth; 1 if no bar has a
        length, so that a scale always exists.
        """
        lengths = sorted(
            bar.end - bar.start for lane in self.lanes for bar in lane.bars if bar.end > bar.start
        )
        return lengths[len(lengths) // 20] if lengths else 1.0

    @cached_property
    def work(self) -> float:
        """The time that a rank is busy, on average."""
        return sum(bar.end - bar.start for lane in self.lanes for bar in lane.bars) / max(
            len(self.lanes), 1
        )

    @cached_property
    def stages(self) -> int:
        """The most stages that a rank has."""
        return max(
            len({part.stage for bar in lane.bars for part in bar.action.parts})
            for lane in self.lanes
        )

    @cached_property
    def lengths(self) -> dict[str, tuple[float, float]]:
        """op -> the least and the greatest time of an action of it alone."""
        found: dict[str, tuple[float, float]] = {}
        for lane in self.lanes:
            for bar in lane.bars:
                if len(bar.shades) == 1:
                    op, time = bar.action.parts[0].op, bar.end - bar.start
                    low, high = found.get(op, (time, time))
                    found[op] = min(low, time), max(high, time)
        return {op: found[op] for op in OPS if op in found}

    @cached_property
    def holds(self) -> tuple[float, float]:
        """The least and the greatest amount by which what a rank holds grows at once."""
        steps = [
            b - a
            for lane in self.lanes
            for a, b in pairwise([0.0, *(held for _, held in lane.curve)])
            if b > a
        ]
        return (min(steps), max(steps)) if steps else (0.0, 0.0)

    @cached_property
    def idle(self) -> dict[str, float]:
        """cause -> the share of the time of all ranks, from the first start of all to the last end
        of all.
        """
        whole = self.total * len(self.lanes) or 1.0
        found = {
            cause: sum(
                g.end - g.start for lane in self.lanes for g in lane.gaps if g.cause == cause
            )
            / whole
            for cause in CAUSES
        }
        return {cause: share for cause, share in found.items() if share > 5e-4}

    @cached_property
    def critical(self) -> list[tuple[int, int]]:
        """(rank, index) of the actions on which the total depends."""
        return critical(self.lanes)

    @cached_property
    def _short(self) -> set[str]:
        """The texts of the actions that are about as short as ``cell``, with all digits alike."""
        short = (
            bar.action.parts
            for lane in self.lanes
            for bar in lane.bars
            if bar.end - bar.start < 1.5 * self.cell
        )
        return {str(part).translate(_ALIKE) for parts in short for part in parts}

    def widest_name(self, detail: int) -> float:
        """The width of the widest of :meth:`short_names`, in units of the size of its letters."""
        return max(text_width(name, 1.0) for name in self.short_names(detail))

    def short_names(self, detail: int) -> set[str]:
        """Names as long as those of the short bars, to see whether they fit; at least one."""
        return {name(text, detail) for text in self._short} or {""}


_ALIKE = str.maketrans("0123456789", "8888888888")


def name(part: Action | str, detail: int) -> str:
    """An action's name: 3 in full (``3F2``), 2 without its stage (``F2``), 1 what follows its
    letter, 0 nothing.

    >>> [name(Action(3, "F", 2), detail) for detail in (3, 2, 1, 0)]
    ['3F2', 'F2', '2', '']
    """
    text = str(part)
    short = text.lstrip("0123456789")
    return (text, short, short[1:], "")[3 - detail]


def scenes(timelines: Drawable | Sequence[Drawable]) -> tuple[Scene, ...]:
    """One timeline or several, to be drawn one over the other on one axis of time.

    Short times in seconds become milliseconds or microseconds. A timeline without a unit, such as
    one simulated with costs of 1, is stretched beside those with a unit until both have worked as
    long; ``one`` is the factor.
    """
    drawn = [*timelines] if isinstance(timelines, Sequence) else [timelines]
    if not drawn:
        raise FpipeError("there is no timeline to draw; give at least one")
    units = {timeline.unit for timeline in drawn} - {""}
    if len(units) > 1:
        raise FpipeError(
            f"timelines in {' and in '.join(sorted(units))} have no common axis; give them one unit"
        )
    lanes = [[timeline.of_rank(rank) for rank in range(timeline.ranks)] for timeline in drawn]
    measured = [spans for timeline, spans in zip(drawn, lanes, strict=True) if timeline.unit]
    unit, factor = units.pop() if units else "", 1.0
    if unit == "s":
        longest = max(last - first for first, last in map(_extent, measured))
        unit, factor = next((u, f) for u, f, least in _SECONDS if longest >= least)
    worked = _worked(measured[0]) if measured else 0.0
    result = []
    for timeline, spans in zip(drawn, lanes, strict=True):
        stretch = worked / _worked(spans) if unit and not timeline.unit and _worked(spans) else 1.0
        result.append(
            _scene(
                timeline, spans, unit, factor * stretch, factor * stretch if stretch != 1.0 else 0.0
            )
        )
    return tuple(result)


#: unit, how many of it are a second, and the least total in seconds that is shown in it
_SECONDS = (("s", 1.0, 2.0), ("ms", 1e3, 2e-3), ("us", 1e6, 0.0))


def _worked(lanes: Sequence[Sequence[Span]]) -> float:
    return sum(span.end - span.start for lane in lanes for span in lane)


def _extent(lanes: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """The first start and the last end."""
    starts = (span.start for lane in lanes for span in lane)
    ends = (span.end for lane in lanes for span in lane)
    return min(starts, default=0.0), max(ends, default=0.0)


def _scene(
    timeline: Drawable, spans: Sequence[Sequence[Span]], unit: str, factor: float, one: float
) -> Scene:
    """The scene of a timeline, its times multiplied by ``factor`` and counted from the first
    start.
    """
    first, last = _extent(spans)
    shade_of, shades = _shading([tuple(span.action for span in lane) for lane in spans])
    curves = [_steps(timeline.curve(rank)) for rank in range(timeline.ranks)]
    links: Sequence[Sequence[tuple[float, float, str]]] = (
        getattr(timeline, "carried", ()) or [()] * timeline.ranks
    )
    lanes = []
    for lane, curve, link in zip(spans, curves, links, strict=True):
        bubble = 1 - _worked([lane]) / timeline.span if timeline.span else 0.0
        held = tuple(((time - first) * factor, amount) for time, amount in curve)
        peak = max((amount for _, amount in curve), default=0.0)
        carried = tuple(
            ((start - first) * factor, (end - first) * factor, what) for start, end, what in link
        )
        bars = tuple(_bars(timeline, lane, first, factor, shade_of))
        lanes.append(Lane(bars, max(bubble, 0.0), peak, held, carried))
    total = (last - first) * factor
    rows = [lane.bars for lane in lanes]
    lanes = [lane._replace(gaps=tuple(gaps(rows, rank, total))) for rank, lane in enumerate(lanes)]
    return Scene(
        name=timeline.name,
        lanes=tuple(lanes),
        total=total,
        span=timeline.span * factor,
        bubble=timeline.bubble,
        unit=unit,
        memory_unit="bytes"
        if max((lane.peak for lane in lanes), default=0.0) >= 4096
        else "",  # or activations
        shades=shades,
        one=one,
    )


def _bars(
    timeline: Drawable, spans: Sequence[Span], zero: float, factor: float, shade_of: _ShadeOf
) -> Iterator[Bar]:
    for span in spans:
        waited = timeline.waited_for(span.rank, span.position)
        cause, wait = (
            (None, 0.0) if waited is None else ((waited.rank, waited.position), waited.time)
        )
        shades = tuple(shade_of(span.rank, part) for part in span.action.parts)
        start, end = (span.start - zero) * factor, (span.end - zero) * factor
        yield Bar(span.action, start, end, shades, cause, max(wait, 0.0) * factor)


def _steps(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without dips of no length, where one action frees memory at the moment at which the next one
    takes it.
    """
    return [
        point for point, then in pairwise(curve) if point[0] < then[0] or point[1] > then[1]
    ] + list(curve[-1:])


# ---- shades ----
_ShadeOf: TypeAlias = Callable[[int, Action], int]


def _shading(rows: Sequence[Row]) -> tuple[_ShadeOf, int]:
    """A shade for each action: the number of its stage among the chunks of its rank, counted for
    each path. A measured timeline may lack actions; then the number is counted among the stages
    that the rank ran.
    """
    try:
        placement = Placement.from_rows(rows)
    except ScheduleError:
        stages = [sorted({part.stage for part in plain(row)}) for row in rows]
        return (lambda rank, a: stages[rank].index(a.stage)), max(1, *map(len, stages))
    shades: list[dict[tuple[int, int], int]] = []  # by path: (rank, stage) -> shade
    base = 0
    for path in placement.paths:
        shades.append(
            {(rank, stage): base + path[:stage].count(rank) for stage, rank in enumerate(path)}
        )
        base += max(map(path.count, path))
    return (
        lambda rank, a: shades[placement.path_index(a.microbatch)].get((rank, a.stage), 0)
    ), base
