# SPDX-License-Identifier: Apache-2.0
"""The search for one or several placements: starts, and annealing of the best rows for the rest of
the time. Of what is found, variants are tried with whole backwards, and with fused forwards and
backwards, where these cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, repeat
from math import inf
from random import Random
from typing import TypeAlias

from ... import Action, Costs, Fused, Schedule
from ...actions import AnyAction, Row, unfused
from ...errors import ScheduleError
from .annealing import anneal
from .bounds import Bound
from .fill import Filled
from .memory_limit import is_within
from .problem import ALMOST, Problem
from .starts import named, starts

#: span, total and the most that a rank holds: what is less, the first first, is better
Figures: TypeAlias = tuple[float, float, float]
_DESCENT = 300_000  #: moves of the descent times actions: less than a tenth of a second
_COLD = 0.99  #: the share of the time at which annealing is a descent


def search(
    problems: Sequence[Problem],
    bounds: Sequence[Bound],
    costs: Costs,
    share: Callable[[], float],
    seed: int,
) -> Iterator[tuple[Figures, Schedule]]:
    """Schedules with their figures, until ``share()``, the share of the time that has passed, is 1.
    Each placement comes to its bound, since of equal spans the total and the memory count.

    They are not in order, since the caller may stop at any time and take the best so far.
    """
    best: dict[tuple[int, ...], tuple[Problem, Filled]] = {}
    span = inf
    for problem in problems:
        for rows in () if problem.large else named(problem):  # which may need less memory than
            yield from _schedules(problem, Filled(rows, inf), costs)  # with other places of Ws
    for place, (problem, bound) in enumerate(zip(problems, bounds, strict=True), 1):
        until = place / len(problems)
        least = inf
        for variant in _variants(problem, costs):
            if span * ALMOST < bound or least <= bound * ALMOST:
                break
            for filled in starts(variant, bound, lambda until=until: share() >= until):
                yield from _schedules(variant, filled, costs, filled.span <= span * ALMOST)
                span = min(span, filled.span)
                if filled.span < least:
                    least = filled.span
                    best[problem.path] = variant, filled
                if least <= bound * ALMOST:
                    break
    assert best, "one microbatch after another fits"
    if problems[0].large:
        return
    with suppress(KeyboardInterrupt):  # what was found until then counts
        for path, (problem, filled) in best.items():
            moves = repeat(_COLD, _DESCENT // len(problem.length))
            for better in anneal(problem, filled.rows, Random(seed), moves):
                best[path] = problem, better
            yield from _schedules(*best[path], costs)
    path, (problem, filled) = min(best.items(), key=lambda one: one[1][1].span)
    with suppress(KeyboardInterrupt):
        for better in anneal(problem, filled.rows, Random(seed), _passing(share)):
            best[path] = problem, better
            if better.span <= min(bounds) * ALMOST:
                break
    yield from _schedules(*best[path], costs)


def _passing(share: Callable[[], float]) -> Iterator[float]:
    """The shares of the time that have passed, until it has."""
    while (passed := share()) < 1:
        yield passed


def _variants(p: Problem, costs: Costs) -> Iterator[Problem]:
    """The problem with its microbatches in several orders, and without split backwards where these
    are cheaper.
    """
    yield p
    times = costs.times(p.stages)
    if any(b < i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)):
        cheaper = replace(costs, I=times["B"], W=0.0, kept=0.0)
        unsplit = Problem.of(cheaper, p.path, p.ranks, p.microbatches, p.limit)
        yield replace(unsplit, whole=True)
    if len(set(p.load)) > 1 or len(set(p.size)) > 1:
        up = sorted(range(p.microbatches), key=lambda k: (p.load[k], p.size[k]))
        for order in (up, up[::-1], up[::2] + up[1::2][::-1], up[::2][::-1] + up[1::2]):
            yield p.reordered(order)


def _schedules(
    problem: Problem,
    filled: Filled,
    costs: Costs,
    plain: bool = True,
) -> Iterator[tuple[Figures, Schedule]]:
    """A solution as a schedule, where that is wanted, and with whole and fused backwards; without
    those that do not fit in memory or whose ranks block each other.
    """
    schedule = problem.schedule(filled.rows)
    candidates = [schedule] if plain else []
    if costs.B is not None or costs.overlap is not None:
        candidates += variants(schedule, costs)
    for candidate in candidates:
        try:
            timeline = candidate.simulate(costs)
        except ScheduleError:
            continue
        if is_within(problem.limit, timeline):
            figures = round(timeline.span, 9), round(timeline.total, 9), max(timeline.peak_bytes)
            yield figures, candidate


def variants(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """The schedule with I and W of one microbatch as B where they follow each other, also if these
    of two stages are in turn; and that with F and B fused, whose ranks may block each other.

    >>> s = Schedule.parse("[0F0, 0F1, 0I0, 0W0, 0I1, 0W1]")
    >>> print(*variants(s, Costs(B=1, overlap=1)), sep="\\n")
    [0F0, 0F1, 0B0, 0B1]
    [0F0, (0F1;0B0)OVERLAP_F_B, 0B1]
    """
    times = costs.times(schedule.stages)
    mergeable = [b <= i + w for i, w, b in zip(times["I"], times["W"], times["B"], strict=True)]

    def whole(before: AnyAction, action: Action) -> AnyAction | None:
        if action.op == "W" and mergeable[action.stage] and before == action._replace(op="I"):
            return action._replace(op="B")
        return None

    def fused(before: AnyAction, action: Action) -> AnyAction | None:
        if isinstance(before, Fused) or (before.op, action.op) != ("F", "B"):
            return None
        if before.microbatch != action.microbatch:
            return Fused((before, action))
        return None

    for rows in dict.fromkeys((schedule.rows, tuple(map(_by_stage, schedule.rows)))):
        merged = replace(schedule, rows=tuple(_joined(row, whole) for row in rows))
        yield merged
        if costs.overlap is not None:
            yield replace(merged, rows=tuple(_joined(row, fused) for row in merged.rows))


def _by_stage(row: Row) -> Row:
    """A row in which Is and Ws of one microbatch that follow each other are stage by stage."""
    runs = groupby(unfused(row), lambda action: (action.op in "IW", action.microbatch))
    return tuple(
        a for (weighs, _), run in runs for a in sorted(run, key=lambda a: -a.stage * weighs)
    )


def _joined(row: Row, join: Callable[[AnyAction, Action], AnyAction | None]) -> Row:
    """A row in which two actions that follow each other are one where ``join`` returns it."""
    result: list[AnyAction] = []
    for action in unfused(row):
        both = join(result[-1], action) if result else None
        if both is None:
            result.append(action)
        else:
            result[-1] = both
    return tuple(result)
