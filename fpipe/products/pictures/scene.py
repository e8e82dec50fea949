# SPDX-License-Identifier: Apache-2.0
"""A timeline as it is drawn: bars and idle times in lanes, which every format reads.

A rank warms up until its first backward begins, and is in its tail after its last forward. An idle
time before the first backward is the warm-up, one after the last forward the tail. Between them, it
is the time in which a message was on the way, after the action that sent it had ended, or
imbalance, while another rank was still computing that action. A time on the way counts as a message
in every phase.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, inf, log10
from typing import NamedTuple, TypeAlias

from ...actions import KINDS, AnyAction, Placement, Timeline, Wait, readable
from ...errors import FpipeError

#: cause of idle time -> its name in the legend
CAUSES = {
    "warmup": "warm-up",
    "message": "message on the way",
    "imbalance": "another rank computes",
    "tail": "tail",
    "other": "sending and between actions",
}
#: tints: 0 to 3 earlier, from much to little; 5 to 8 later, from little to much
SAME = 4
ABSENT = 9
DIGITS = (1, 2, 3, 4, 5, 6, 8, 10)  #: of their steps
BYTES = 4096  #: what ranks hold is in bytes from here on, or else in microbatches

#: name, memory, total, and whether no other has less of one and not more of the other
TimeAndMemory: TypeAlias = tuple[str, float, float, bool]
Points: TypeAlias = Sequence[tuple[float, float]]  #: (time, something)
Timelines: TypeAlias = Timeline | Sequence[Timeline]


@dataclass(frozen=True)
class Look:
    """What a picture shows beside the actions, and for which paper and width it is drawn.

    ``difference`` colours the actions of all timelines but the first by how much earlier or later
    they end than there.

    ``dark`` is None for a picture that follows its reader, or light where a format cannot.
    ``width`` is in pixels; by default it follows from the length of the timeline. ``paper`` is for
    the column of a paper: no header, no memory unless it is asked for, and letters of 7 points or
    more.
    """

    memory: bool | None = None
    difference: bool = False
    dark: bool | None = None
    width: float | None = None
    paper: bool = False
    full: bool = False  # the whole steady state, however long
    titled: bool = True  # not so where a page of HTML has the title


class Gap(NamedTuple):
    """A time in which a rank is idle."""

    start: float
    end: float
    cause: str  # a key of ``CAUSES``


class Bar(NamedTuple):
    """An action."""

    action: AnyAction
    start: float
    end: float
    kinds: tuple[str, ...]  # of each part: op and chunk, a key of ``colours.palette``
    wait: Wait | None
    colours: tuple[str, ...]  # the kinds, or tints in a scene that is compared with another one
    shift: float | None = None  # how much later it ends than there


class Fold(NamedTuple):
    """A time that is not drawn, in which all ranks do the same again and again."""

    start: float
    end: float
    microbatches: int  # how many are not drawn
    gap: float  # the time whose space is left for it

    def place(self, time: float) -> float:
        """Where a time is drawn."""
        left_out = min(max(time - self.start, 0.0), self.end - self.start)
        return time - left_out * (1 - self.gap / (self.end - self.start))


class Lane(NamedTuple):
    """A rank: its bars in order, its idle times, and its figures."""

    bars: tuple[Bar, ...]
    gaps: tuple[Gap, ...]
    bubble: float
    curve: Points  # (time, held from then on)
    peak: float  # the most that is held


@dataclass(frozen=True)
class Scene:
    """A timeline that starts at time 0, ready to be drawn."""

    timeline: Timeline
    lanes: tuple[Lane, ...]
    shades: int  # how many shades there are: a rank's chunks, or chunks times directions
    unit: str  # of what ranks hold
    against: Scene | None = None  # what it is compared with
    reach: float = 0.0  # four steps of shifts, round numbers, the same in all that are compared
    fold: Fold | None = None

    @property
    def name(self) -> str:
        """The name of the timeline, for titles."""
        return self.timeline.name or "schedule"

    @property
    def total(self) -> float:
        """From the first start to the last end."""
        return self.timeline.total

    @property
    def length(self) -> float:
        """Where the last end is drawn."""
        return self.place(self.total)

    def place(self, time: float) -> float:
        """Where a time is drawn."""
        return self.fold.place(time) if self.fold else time

    def is_hidden(self, *times: float) -> bool:
        """Whether none of these times is drawn."""
        fold = self.fold
        return bool(fold and all(fold.start < time < fold.end for time in times))

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.timeline.microbatches // self.timeline.slices

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all lanes."""
        return tuple(bar for lane in self.lanes for bar in lane.bars)

    @cached_property
    def colours(self) -> set[str]:
        """The colours of the bars."""
        return {colour for bar in self.bars for colour in bar.colours}

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The ops that occur, in the order of the legend."""
        seen = {part.op for bar in self.bars for part in bar.action.parts}
        return tuple(op for op in KINDS if op in seen)

    @cached_property
    def cell(self) -> float:
        """The length of a short bar: the shortest without the shortest twentieth; 1 if no bar has a
        length, so that a scale always exists.
        """
        lengths = sorted(bar.end - bar.start for bar in self.bars if bar.end > bar.start)
        if lengths:
            return lengths[len(lengths) // 20]
        return 1.0

    @property
    def mean(self) -> float:
        """The mean length of bars; in a measured step many are much shorter."""
        return sum(self.timeline.busy) / (len(self.bars) or 1) or 1.0

    @cached_property
    def peak(self) -> float:
        """The most that a rank holds."""
        return max(lane.peak for lane in self.lanes)

    @cached_property
    def idle(self) -> dict[str, float]:
        """cause -> its share of the bubble, for each that is drawn. Of the idle time before a rank
        starts and after it ends, what is left of the longest span is part of the bubble.
        """
        t = self.timeline
        whole = t.span * t.ranks or 1.0
        times: defaultdict[str, float] = defaultdict(float)
        for lane, window in zip(self.lanes, t.windows, strict=True):
            outside = (t.span - window) / (t.total - window or 1.0)
            for gap in lane.gaps:
                is_inside = lane.bars and lane.bars[0].start <= gap.start < lane.bars[-1].end
                times[gap.cause] += (gap.end - gap.start) / whole * (1 if is_inside else outside)
        return {cause: times[cause] for cause in CAUSES if cause in times}


Scenes: TypeAlias = Sequence[Scene]


def has_fused(scenes: Scenes) -> bool:
    """Whether bars have parts one over the other."""
    return any(len(bar.kinds) > 1 for scene in scenes for bar in scene.bars)


def has_curves(scenes: Scenes, look: Look) -> bool:
    """Whether memory curves are drawn."""
    shown = not look.paper if look.memory is None else look.memory
    return shown and any(scene.peak for scene in scenes)


def scenes(timelines: Timelines, difference: bool = False) -> Scenes:
    """One timeline or several, to be drawn one over the other on one axis of time.

    Times are shown in seconds, milliseconds or microseconds, by the longest. With ``difference``,
    all but the first are compared with that.
    """
    drawn = [timelines] if isinstance(timelines, Timeline) else timelines
    if not drawn:
        raise FpipeError("there is no timeline to draw; give at least one")
    unit, *others = sorted({timeline.unit for timeline in drawn})
    if others:
        named = " and in ".join(unit or "units of the costs" for unit in [unit, *others])
        raise FpipeError(f"timelines in {named} have no common axis; give them one unit")
    unit, scale = readable(max(timeline.total for timeline in drawn), unit)
    first, *rest = (_scene(_from_zero(timeline, unit, scale)) for timeline in drawn)
    if difference:
        rest = [_against(first, scene) for scene in rest]
        most = max((abs(bar.shift or 0.0) for scene in rest for bar in scene.bars), default=0.0)
        reach = 4 * step_of(most / 4, DIGITS) if most else 0.0
        rest = [_tinted(scene, reach) for scene in rest]
    return first, *rest


def _from_zero(timeline: Timeline, unit: str, scale: float) -> Timeline:
    """A timeline that starts at 0, in another unit."""

    def times(rows: Iterable[Iterable[float]]) -> tuple[array[float], ...]:
        return tuple(array("d", [(t - timeline.start) * scale for t in row]) for row in rows)

    starts = times(timeline.starts)
    return replace(timeline, starts=starts, ends=times(timeline.ends), unit=unit)


def _scene(timeline: Timeline) -> Scene:
    shades = _shades(timeline.placement)
    unit, amount = _unit(timeline)
    lanes: list[Lane] = []
    brief = sum(timeline.busy) / (len(timeline) or 1) / 2
    for rank in range(timeline.ranks):
        bars: list[Bar] = []
        for _, position, action, start, end in timeline.of_rank(rank):
            kinds = tuple(f"{part.op}{shades[rank][part.stage]}" for part in action.parts)
            wait = timeline.waited_for(rank, position)
            bars.append(Bar(action, start, end, kinds, wait, colours=kinds))
        busy = timeline.busy[rank] / timeline.span if timeline.span else 1.0
        curve = without_dips([(time, held / amount) for time, held in timeline.curve(rank)], brief)
        peak = max((held for _, held in curve), default=0.0)
        short = 1e-9 * timeline.total
        gaps = tuple(gap for gap in _gaps(timeline, bars) if gap.end - gap.start > short)
        lanes.append(Lane(tuple(bars), gaps, max(1 - busy, 0.0), curve, peak))
    return Scene(timeline, tuple(lanes), max(map(len, shades.values())), unit)


def _unit(timeline: Timeline) -> tuple[str, float]:
    """The unit of what ranks hold, and how much of the costs' memory it is: a microbatch is what
    all stages of a rank save of it, where each saves 1 or all together do.
    """
    if max(timeline.peak_bytes) >= BYTES:
        return "bytes", 1.0
    saved = {*timeline.memory.get("F", [1.0])}
    count = max(max(Counter(path).values()) for path in timeline.placement.paths)
    whole = count * max(saved)
    sizes = {round(size * timeline.slices, 9) for size in timeline.sizes}
    if len(saved) == 1 and sizes <= {1.0} and 1.0 in (*saved, round(whole, 9)):
        return "microbatches", whole if timeline.sizes else whole * timeline.slices
    return "units of saved=", 1.0


def _shades(placement: Placement) -> Mapping[int, dict[int, int]]:
    """By rank, the shade of each of its stages: their order along all paths."""
    shades: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for path in placement.paths:
        for stage, rank in enumerate(path):
            shades[rank].setdefault(stage, len(shades[rank]))
    return shades


def without_dips(curve: Points, brief: float) -> Points:
    """A curve without dips that are not longer than ``brief``, where one action frees memory
    shortly before the next one takes it.

    >>> without_dips([(0, 1), (4, 0), (4.1, 1), (7, 0)], 0.5)
    [(0, 1), (4.1, 1), (7, 0)]
    """
    inner = [
        point
        for before, point, after in zip(curve, curve[1:], curve[2:], strict=False)
        if after[0] - point[0] > brief or point[1] >= min(before[1], after[1])
    ]
    return [*curve[:1], *inner, *curve[1:][-1:]]


# ---- idle times ----
def _gaps(timeline: Timeline, bars: Sequence[Bar]) -> Iterator[Gap]:
    """The idle times of a rank in order, also those of no length."""
    warm = next((bar.start for bar in bars if _provides(bar, "I")), 0.0)
    last = next((bar.end for bar in reversed(bars) if _provides(bar, "F")), inf)
    free = 0.0
    for bar in bars:
        if not free or bar.start <= warm:
            cause = "warmup"
        elif bar.start > last:
            cause = "tail"
        else:
            cause = "imbalance" if bar.wait else "other"
        sent = bar.start
        if bar.wait:
            sent = min(max(timeline.ends[bar.wait.rank][bar.wait.position], free), bar.start)
        yield Gap(free, sent, cause)
        yield Gap(sent, bar.start, "message")
        free = max(free, bar.end)
    yield Gap(free, timeline.total, "tail" if bars else "other")


def _provides(bar: Bar, fact: str) -> bool:
    return any(fact in KINDS[part.op].provides for part in bar.action.parts)


# ---- differences ----
def step_of(least: float, starts: Iterable[int] = (1, 2, 5, 10)) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, ...) that is at least ``least``, or of
    numbers with other first digits.

    >>> step_of(3), step_of(0.04), step_of(51), step_of(3, range(1, 11))
    (5.0, 0.05, 100.0, 3.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(power * k for k in starts if power * k >= least * (1 - 1e-9))


def _against(first: Scene, second: Scene) -> Scene:
    """``second`` with how much earlier or later its actions end than in ``first``.

    An action is compared with the one that provides the same there: B with W, and I and W with B,
    if the other timeline has only those. Where the other one has another number of stages, it is
    compared with the time at which the same layers are done there, if the layers of a stage take
    equal times.
    """
    count = first.timeline.placement.stages
    counted = second.timeline.placement.stages
    spans = {
        (fact, part.stage, part.whole, part.slice): bar
        for bar in first.bars
        for part in bar.action.parts
        for fact in KINDS[part.op].provides
    }

    def compared(bar: Bar) -> Bar:
        part = bar.action.parts[0]
        fact = KINDS[part.op].provides[-1]
        if fact == "F":  # ends with its last layer
            done = (part.stage + 1) * count
            stage = (done - 1) // counted
            share = done / counted - stage
        else:  # ends with its first layer
            done = part.stage * count
            stage = done // counted
            share = stage + 1 - done / counted
        there = spans.get((fact, stage, part.whole, part.slice))
        if there is None:
            return bar
        return bar._replace(shift=bar.end - there.start - share * (there.end - there.start))

    lanes = [lane._replace(bars=tuple(map(compared, lane.bars))) for lane in second.lanes]
    return replace(second, lanes=tuple(lanes), against=first)


def _tinted(scene: Scene, reach: float) -> Scene:
    """The scene in the colours of its shifts, of which the last tint begins at 3/4 of ``reach``."""
    lanes = [
        lane._replace(
            bars=tuple(
                bar._replace(colours=(f"t{tint(bar.shift, reach)}",) * len(bar.kinds))
                for bar in lane.bars
            )
        )
        for lane in scene.lanes
    ]
    return replace(scene, lanes=tuple(lanes), reach=reach)


def tint(shift: float | None, reach: float) -> int:
    """The tint of a shift, where four steps are ``reach``.

    >>> [tint(shift, 8) for shift in (-8, -1, 0, 0.5, 8, None)]
    [0, 3, 4, 5, 8, 9]
    """
    if shift is None:
        return ABSENT
    if abs(shift) <= 1e-9 * reach:
        return SAME
    step = min(int(4 * abs(shift) / reach + 1e-9), 3) + 1
    return SAME + (step if shift > 0 else -step)
