# SPDX-License-Identifier: Apache-2.0
"""A timeline as it is drawn: bars and idle times in lanes, and the figures beside them.

This is plain data that every format reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ...actions import KINDS, AnyAction, Timeline

#: cause of idle time -> its name in the legend
CAUSES = {
    "warmup": "warm-up",
    "message": "message on the way",
    "imbalance": "another rank computes",
    "tail": "tail",
    "other": "other, or not known",
}
Points: TypeAlias = Sequence[tuple[float, float]]  #: (time, something)


@dataclass(frozen=True)
class Look:
    """What a picture shows beside the actions, and for which paper and width it is drawn.

    ``difference`` colours the actions of all timelines but the first by how much earlier or later
    they end than there.

    ``dark`` is None for a picture that follows its reader, or light where a format cannot.
    ``width`` is in pixels; by default it follows from the length of the timeline.
    """

    memory: bool = True
    difference: bool = False
    dark: bool | None = None
    width: float | None = None


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
    colours: tuple[str, ...]  # of each part by kind and chunk, a key of ``colours.palette``
    cause: tuple[int, int] | None  # (lane, index in its bars) of what it waited for
    wait: float  # how long the rank was idle before it
    shift: float | None = None  # how much later it ends than in the timeline it is compared with
    tint: str = ""  # the colour of that

    @property
    def painted(self) -> tuple[str, ...]:
        """The colours of the parts in a picture."""
        return (self.tint,) * len(self.colours) if self.tint else self.colours


class Lane(NamedTuple):
    """A rank: its bars in order, its idle times, and its figures."""

    bars: tuple[Bar, ...]
    gaps: tuple[Gap, ...]
    bubble: float
    curve: Points  # (time, held from then on)

    @property
    def peak(self) -> float:
        """The most that the rank holds."""
        return max((amount for _, amount in self.curve), default=0.0)


@dataclass(frozen=True)
class Scene:
    """A timeline, ready to be drawn."""

    timeline: Timeline
    lanes: tuple[Lane, ...]
    unit: str  # of time, "" for that of the cost model
    scale: float  # how many of it are a unit of the timeline
    shades: int  # how many shades there are: a rank's chunks, or chunks times directions
    against: Scene | None = None  # what it is compared with

    @property
    def name(self) -> str:
        """The name of the timeline, for titles."""
        return self.timeline.name or "schedule"

    @property
    def total(self) -> float:
        """From the first start to the last end."""
        return self.timeline.total * self.scale

    @property
    def span(self) -> float:
        """The longest time between a rank's first start and its last end."""
        return self.timeline.span * self.scale

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.timeline.microbatches // self.slices

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return self.timeline.slices

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all lanes."""
        return tuple(bar for lane in self.lanes for bar in lane.bars)

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
        return lengths[len(lengths) // 20] if lengths else 1.0

    @cached_property
    def peak(self) -> float:
        """The most that a rank holds."""
        return max((lane.peak for lane in self.lanes), default=0.0)

    @property
    def in_bytes(self) -> bool:
        """Whether ranks hold bytes; small numbers are activations."""
        return self.peak >= 4096

    @cached_property
    def lengths(self) -> dict[str, tuple[float, float]]:
        """op -> the least and the greatest time of an action of it alone."""
        times: defaultdict[str, list[float]] = defaultdict(list)
        for bar in self.bars:
            if len(bar.colours) == 1:
                times[bar.action.parts[0].op].append(bar.end - bar.start)
        return {op: (min(times[op]), max(times[op])) for op in self.ops if op in times}

    @cached_property
    def holds(self) -> tuple[float, float]:
        """The least and the greatest amount by which what a rank holds grows at once."""
        amounts = ([0.0, *(held for _, held in lane.curve)] for lane in self.lanes)
        steps = [b - a for lane in amounts for a, b in pairwise(lane) if b > a] or [0.0]
        return min(steps), max(steps)

    @cached_property
    def idle(self) -> dict[str, float]:
        """cause -> the share of the time of all ranks, if it is not negligible."""
        times: defaultdict[str, float] = defaultdict(float)
        for gap in (gap for lane in self.lanes for gap in lane.gaps):
            times[gap.cause] += gap.end - gap.start
        whole = self.total * len(self.lanes) or 1.0
        return {cause: times[cause] / whole for cause in CAUSES if times[cause] > 5e-4 * whole}


Scenes: TypeAlias = Sequence[Scene]
