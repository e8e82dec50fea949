# SPDX-License-Identifier: Apache-2.0
"""A timeline against another: its actions in the colours of how much earlier or later they end than
there.

An action is compared with the same action of the other one; I and W with B where the other has only
that, and B with W. Knows no colours: a bar's shade becomes the number of a tint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .lanes import Bar
from .scene import Scene

SAME, ABSENT = (
    4,
    9,
)  #: tints: 0 to 3 earlier, from much to little; 5 to 8 later, from little to much
TINTS = 10
_ALSO = {"I": "B", "W": "B", "B": "W"}


def against(first: Scene, second: Scene) -> Scene:
    """``second`` with a tint for each bar, by when the same action ends in ``first``."""
    ends = dict(_ends(first))
    shifts = {
        (rank, k): _shift(bar, ends)
        for rank, lane in enumerate(second.lanes)
        for k, bar in enumerate(lane.bars)
    }
    most = max((abs(shift) for shift in shifts.values() if shift is not None), default=0.0)
    lanes = tuple(
        lane._replace(
            bars=tuple(
                bar._replace(
                    shades=(tint(shifts[rank, k], most),) * len(bar.shades), shift=shifts[rank, k]
                )
                for k, bar in enumerate(lane.bars)
            )
        )
        for rank, lane in enumerate(second.lanes)
    )
    return replace(second, lanes=lanes, against=first)


def _ends(scene: Scene) -> Iterator[tuple[tuple[str, str], float]]:
    """((stage, microbatch), op) as text -> when the action ends."""
    for lane in scene.lanes:
        for bar in lane.bars:
            yield from ((_key(str(part)), bar.end) for part in bar.action.parts)


def _key(text: str) -> tuple[str, str]:
    op = text.lstrip("0123456789")[0]
    return text.replace(op, " "), op


def _shift(bar: Bar, ends: dict[tuple[str, str], float]) -> float | None:
    """How much later the bar ends than its first part does there; None if that has no such
    action.
    """
    where, op = _key(str(bar.action.parts[0]))
    there = ends.get((where, op), ends.get((where, _ALSO.get(op, op))))
    return None if there is None else bar.end - there


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
