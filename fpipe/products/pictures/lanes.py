# SPDX-License-Identifier: Apache-2.0
"""The rows of a picture: bars and idle times of a rank, in order. Plain data that knows no
timeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from ...actions.action import AnyAction
from ...actions.action_kinds import Op


class Gap(NamedTuple):
    """A time in which a rank is idle."""

    start: float
    end: float
    cause: str  # a key of ``idle.CAUSES``


class Bar(NamedTuple):
    """An action as it is drawn. ``shades`` has one number per part, 0 for a rank's first chunk."""

    action: AnyAction
    start: float
    end: float
    shades: tuple[int, ...]
    cause: tuple[int, int] | None  # (lane, index in its bars) of what it waited for
    wait: float  # how long the rank stood idle before it
    shift: float | None = (
        None  # how much later it ends than in a timeline that it is compared with, if it is there
    )


class Lane(NamedTuple):
    """One rank: its bars in order, and its figures."""

    bars: tuple[Bar, ...]
    bubble: float
    peak: float
    curve: tuple[tuple[float, float], ...]  # (time, held from then on)
    carried: tuple[
        tuple[float, float, str], ...
    ] = ()  # (start, end, what) of what its link carries, if it is known
    gaps: tuple[Gap, ...] = ()  # when the rank is idle, and why

    def columns(
        self, count: int, scale: float
    ) -> Iterator[tuple[float, float, list[tuple[Op, int, float]]]]:
        """Columns of ``1 / scale`` time: for each the length, the idle time, and (op, shade, time)
        of what runs.
        """
        ends = [bar.end for bar in self.bars]
        for column in range(count):
            low, high = column / scale, (column + 1) / scale
            idle, running = high - low, []
            for bar in self.bars[bisect_right(ends, low) : bisect_right(ends, high) + 1]:
                time = min(bar.end, high) - max(bar.start, low)
                if time > 0:
                    idle -= time
                    parts = zip(bar.action.parts, bar.shades, strict=True)
                    running += [(part.op, shade, time / len(bar.shades)) for part, shade in parts]
            yield high - low, idle, running
