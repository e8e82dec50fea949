# SPDX-License-Identifier: Apache-2.0
"""Local search: passes change places in their ranks' orders, one at a time or in all microbatches
from one on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

from ...generators.fill import Filled, Setting, fill
from ...generators.problem import Orders, Problem


def anneal(
    problem: Problem,
    orders: Orders,
    setting: Setting,
    random: Random,
    share: Callable[[], float],
    found: Callable[[Filled, Setting], None],
) -> None:
    """Simulated annealing until ``share()``, the share of the time that has passed, is 1; ``found``
    gets what is better than all before.
    """
    begun = fill(problem, orders, *setting)
    if begun is None:
        return
    orders, (target, tolerance) = [list(order) for order in orders], setting
    target = min(target, 2 * begun.span)
    value, best = _value(begun), begun.span
    warmth = 0.03 * max(problem.work) / problem.microbatches
    while (passed := share()) < 1:
        rank = random.randrange(problem.ranks)
        old, aims = orders[rank], (target, tolerance)
        if random.random() < 0.05:
            target *= random.choice((0.99, 0.995, 1.005, 1.01))
            tolerance = random.choice((0.0, 0.5, 1.0))
        elif random.random() < 0.6:
            orders[rank] = _moved(old, random)
        else:
            orders[rank] = _moved_all(old, random, problem.microbatches)
        tried = fill(problem, orders, target, tolerance)
        change = _value(tried) - value if tried else 0.0
        if tried is None or (
            change > 0 and random.random() >= exp(-change / (warmth * (1 - passed) ** 2 + 1e-12))
        ):
            orders[rank], (target, tolerance) = old, aims
            continue
        value += change
        if tried.span < best * (1 - 1e-12):
            best = tried.span
            found(tried, Setting(target, tolerance))


def _value(filled: Filled) -> float:
    """The span, and a little of what the other ranks take, so that there is a slope."""
    return filled.span + 0.3 * sum(filled.windows) / len(filled.windows)


def _moved(order: list[tuple[int, int]], random: Random) -> list[tuple[int, int]]:
    """One pass some places further."""
    order = list(order)
    one = order.pop(at := random.randrange(len(order)))
    by = random.choice((1, 1, 1, 2, 3, 5)) * random.choice((-1, 1))
    order.insert(min(len(order), max(0, at + by)), one)
    return order


def _moved_all(
    order: list[tuple[int, int]], random: Random, microbatches: int
) -> list[tuple[int, int]]:
    """A pass of all microbatches from one on, one place further."""
    order, (which, start) = list(order), random.choice(order)
    by = random.choice((-1, 1))
    stop = random.choice((microbatches, random.randrange(start, microbatches) + 1))
    places = [at for at, (one, k) in enumerate(order) if one == which and start <= k < stop]
    for at in places if by < 0 else reversed(places):
        if 0 <= at + by < len(order) and order[at + by][0] != which:
            order[at], order[at + by] = order[at + by], order[at]
    return order
