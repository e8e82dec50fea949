# SPDX-License-Identifier: Apache-2.0
"""Layers move between stages in the same search: cuts are tried with short searches, the best with
a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from time import monotonic
from typing import Any, TypeVar

from ... import Costs
from ...errors import ScheduleError
from .balancing import spread

_SUMMED = ("F", "I", "W", "B", "saved", "kept")
S = TypeVar("S", bound=Any)


def count_of(layers: Costs) -> int:
    """How many layers these costs have numbers for."""
    counts = {len(value) for name in _SUMMED if isinstance(value := getattr(layers, name), tuple)}
    if len(counts) != 1:
        what = (
            f"numbers for {' and '.join(map(str, sorted(counts)))} layers"
            if counts
            else "no number for each layer"
        )
        raise ScheduleError(
            f"layers= has {what}; give F, I and W one number for each layer", rule="costs"
        )
    return counts.pop()


def costs_of(costs: Costs, layers: Costs, starts: Sequence[int]) -> Costs:
    """The costs of stages that begin with these layers: sums over layers; messages and microbatches
    as in ``costs``.

    >>> costs_of(Costs(comm=2), Costs(F=[1, 2, 3]), [0, 2]).F
    (3.0, 3.0)
    """
    count = count_of(layers)
    given = {
        name: layers.spread(name, count) for name in _SUMMED if getattr(layers, name) is not None
    }
    ends = [*starts[1:], count]
    sums = {
        name: tuple(sum(values[a:b]) for a, b in zip(starts, ends, strict=True))
        for name, values in given.items()
    }
    return replace(costs, **{"B": None, "kept": None, **sums})


def layers_work(layers: Costs) -> float:
    """The time of all layers, of one microbatch."""
    times = layers.times(count_of(layers))
    whole = [min(i + w, b) for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)]
    return sum(times["F"]) + sum(whole)


def best_cut(
    costs: Costs, layers: Costs, stages: int, run: Callable[[Costs, float], S], seconds: float
) -> tuple[tuple[int, ...], S]:
    """Where stages begin, and what ``run(costs, seconds)`` gives for them. Single layers move while
    that helps.
    """
    begin, count, times = monotonic(), count_of(layers), layers.times(count_of(layers))
    if count < stages:
        raise ScheduleError(
            f"{count} layers cannot fill {stages} stages; give fewer stages or finer layers",
            rule="stages",
        )
    each = [sum(of) for of in zip(times["F"], times["I"], times["W"], strict=True)]
    starts, even = spread(each, stages), tuple(count * s // stages for s in range(stages))
    tried: dict[tuple[int, ...], float] = {}

    def span(starts: tuple[int, ...]) -> float:
        if starts not in tried:
            try:
                tried[starts] = run(costs_of(costs, layers, starts), seconds / 100).timeline.span
            except ScheduleError:  # it does not fit in memory
                tried[starts] = inf
        return tried[starts]

    best, better = min((starts, even), key=span), True
    while better and monotonic() - begin < seconds / 2:
        better = False
        for index, by in product(range(1, stages), (-1, 1)):
            moved = (*best[:index], best[index] + by, *best[index + 1 :])
            inside = all(a < b for a, b in zip(moved, (*moved[1:], count), strict=True))
            if inside and monotonic() - begin < seconds / 2 and span(moved) < span(best):
                best, better = moved, True
    return best, run(
        costs_of(costs, layers, best), max(seconds - (monotonic() - begin), seconds / 10)
    )
