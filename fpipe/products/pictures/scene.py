# SPDX-License-Identifier: Apache-2.0
"""A timeline as it is drawn: bars and idle times in lanes, and the figures beside them.

This is plain data that every format reads. It knows nothing of where the times come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ...actions import KINDS, Action, AnyAction

#: cause of idle time -> its name in the legend
CAUSES = {
    "warmup": "warm-up",
    "message": "message on the way",
    "imbalance": "another rank computes",
    "tail": "tail",
    "other": "other, or not known",
}
Points: TypeAlias = Sequence[tuple[float, float]]  #: (time, something)


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
    """A rank: its bars in order, and its figures."""

    bars: tuple[Bar, ...]
    bubble: float
    peak: float
    curve: Points  # (time, held from then on)
    carried: tuple[tuple[float, float, str], ...]  # (start, end, what) that its link carries
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A timeline, ready to be drawn."""

    name: str
    lanes: tuple[Lane, ...]
    total: float
    span: float
    bubble: float
    unit: str  # of time, "" for that of the cost model
    memory_unit: str  # of what is held
    shades: int  # how many shades there are: a rank's chunks, or chunks times directions
    one: float  # the drawn length of one unit of the cost model, if it was stretched; else 0
    against: Scene | None = None  # what it is compared with

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all lanes."""
        return tuple(bar for lane in self.lanes for bar in lane.bars)

    @cached_property
    def parts(self) -> tuple[Action, ...]:
        """The parts of all bars."""
        return tuple(part for bar in self.bars for part in bar.action.parts)

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The ops that occur, in the order of the legend."""
        seen = {part.op for part in self.parts}
        return tuple(op for op in KINDS if op in seen)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches in the bars."""
        return max((part.whole for part in self.parts), default=-1) + 1

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return max((part.slice for part in self.parts), default=0) + 1

    @cached_property
    def cell(self) -> float:
        """The length of a short bar: the shortest without the shortest twentieth; 1 if no bar has a
        length, so that a scale always exists.
        """
        lengths = sorted(bar.end - bar.start for bar in self.bars if bar.end > bar.start)
        return lengths[len(lengths) // 20] if lengths else 1.0

    @cached_property
    def work(self) -> float:
        """The time that a rank is busy, on average."""
        return sum(bar.end - bar.start for bar in self.bars) / max(len(self.lanes), 1)

    @cached_property
    def peak(self) -> float:
        """The most that a rank holds."""
        return max((lane.peak for lane in self.lanes), default=0.0)

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
