# SPDX-License-Identifier: Apache-2.0
"""Leaves repetitions of the steady state out of a still picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from .scene import Bar, Fold, Look, Scenes
from .shapes import LEAST_CELL, WIDEST

MOST_CELLS = 150  # short bars side by side whose names can be read
KEPT = 2  # periods that stay on either side
FEWEST = 4  # periods that are left out
MOST_BARS = 8000


def shortened(scenes: Scenes, look: Look) -> Scenes:
    """A single scene without the middle of its steady state, if it is too long to be read and is
    exactly periodic there. Several scenes have one axis, and stay whole.

    A period is a time after which all ranks do the same for later microbatches.
    """
    scene = scenes[0]
    if look.full or len(scenes) > 1 or scene.total <= MOST_CELLS * scene.cell:
        return scenes
    starts = {_key(bar, 0): bar.start for bar in scene.bars}
    for later in range(1, min(2 * len(scene.lanes), scene.microbatches // 4) + 1):
        shifts = [
            (bar.start, starts.get(_key(bar, later)), starts.get(_key(bar, -later)))
            for bar in scene.bars
        ]
        near = Counter(round(b - a, 9) for a, b, _ in shifts if b is not None)
        period, _ = near.most_common(1)[0]
        if not period > 0:
            continue
        slack = 1e-6 * period
        # times at which a repetition cannot begin: what starts there does not start again, or what
        # starts a period later did not start before
        breaks = [a for a, b, _ in shifts if b is None or abs(b - a - period) > slack]
        breaks += [a - period for a, _, b in shifts if b is None or abs(a - b - period) > slack]
        begin, end = max(pairwise(sorted(breaks)), key=lambda ends: ends[1] - ends[0])
        count = int((end - begin) / period) - 2 * KEPT
        if count >= FEWEST:
            start = begin + (KEPT + 0.5) * period
            hidden = Fold(start, start + count * period, count * later, 2 * scene.cell)
            short = replace(scene, fold=hidden)
            drawn = [bar for bar in scene.bars if not short.is_hidden(bar.start)]
            narrow = (look.width or WIDEST) * scene.cell < LEAST_CELL * short.length
            if narrow or len(drawn) > MOST_BARS:
                return scenes  # shares of the time are drawn instead of actions
            return [short]
    return scenes


def _key(bar: Bar, later: int) -> tuple[object, ...]:
    parts = bar.action.parts
    return tuple((part.op, part.stage, part.whole + later, part.slice) for part in parts)
