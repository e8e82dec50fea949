# SPDX-License-Identifier: Apache-2.0
"""Local search on complete rows: actions on a critical path change places, those of W as well.

``fill`` places W by a rule, and the best rows of small problems may not follow it. Here the span is
the longest window of a rank, from its first start to its last end. Going back from that end, each
action starts when the one before it in its row ends, or when the message that it needs arrives.
Only a change among the first kind of pairs can shorten the span: an action goes to one end of a
block of such actions, where the memory of its rank allows it.

Van Laarhoven, Aarts and Lenstra, "Job Shop Scheduling by Simulated Annealing", 1992.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import exp
from random import Random

from .fill import Filled
from .problem import ALMOST, Problem, Rows


def anneal(
    problem: Problem,
    rows: Rows,
    random: Random,
    shares: Iterable[float],
) -> Iterator[Filled]:
    """Simulated annealing, with a move for each of ``shares``, those of the time that have passed;
    yields what is better than all before.
    """
    end = first_ends(problem, rows)
    assert end is not None, "complete rows do not block each other"
    windows = _windows(problem, rows, end)
    value = _value(windows)
    best = max(windows)
    warmth = max(0.01 * best, sum(problem.length) / len(problem.length))
    blocks = _blocks(problem, rows, end, windows)
    for passed in shares:
        if not blocks:
            return
        rank, first, last = random.choice(blocks)
        row = moved(rows[rank], first, last, random)
        peak = max(accumulate([problem.adds[action] for action in row]))
        if row == rows[rank] or peak > problem.limit[rank] * ALMOST:
            continue
        changed = [*rows[:rank], row, *rows[rank + 1 :]]
        changed_at = end[rows[rank][first]] - problem.length[rows[rank][first]]
        now = ends(problem, changed, rows, end, changed_at)
        if now is None:
            continue
        windows = _windows(problem, changed, now)
        change = _value(windows) - value
        if change > 0 and random.random() >= exp(-change / (warmth * (1 - passed) ** 2 + 1e-12)):
            continue
        rows = changed
        end = now
        value += change
        blocks = _blocks(problem, rows, end, windows)
        if max(windows) < best * (1 - 1e-12):
            best = max(windows)
            yield Filled(rows, best)


def first_ends(problem: Problem, rows: Rows) -> list[float] | None:
    """When each action ends; None where the rows block each other."""
    # the last of the zeros is that of -1, which nothing waits for
    return ends(problem, rows, rows, [0.0] * (len(problem.length) + 1), 0.0)


def ends(
    problem: Problem,
    rows: Rows,
    before: Rows,
    old: Sequence[float],
    since: float,
) -> list[float] | None:
    """When each action ends; None where the rows block each other. What ended in the rows
    ``before`` earlier than ``since`` does so now; ``old`` are all their ends.
    """
    length = problem.length
    needs = problem.needs
    travel = problem.travel
    at = [bisect_left(row, since, key=old.__getitem__) for row in before]
    clock = [old[row[done - 1]] if done else 0.0 for row, done in zip(before, at, strict=True)]
    end = list(old)
    for row, done in zip(rows, at, strict=True):
        for action in row[done:]:
            end[action] = -1.0
    ready = [*range(len(rows))][::-1]
    waiting = dict[int, int]()
    while ready:
        rank = ready.pop()
        row = rows[rank]
        position = at[rank]
        time = clock[rank]
        while position < len(row):
            action = row[position]
            arrival = end[needs[action]]
            if arrival < 0.0:
                waiting[needs[action]] = rank
                break
            arrival += travel[action]
            if arrival > time:
                time = arrival
            time += length[action]
            end[action] = time
            position += 1
            if action in waiting:
                ready.append(waiting.pop(action))
        at[rank] = position
        clock[rank] = time
    return None if waiting else end


def _windows(problem: Problem, rows: Rows, end: Sequence[float]) -> list[float]:
    """How long each rank is busy or waits."""
    return [end[row[-1]] - end[row[0]] + problem.length[row[0]] for row in rows]


def _value(windows: Sequence[float]) -> float:
    """The span, and a little of what the other ranks take, so that there is a slope."""
    return max(windows) + 0.05 * sum(windows) / len(windows)


def moved(row: Sequence[int], first: int, last: int, random: Random) -> list[int]:
    """A row in which an action between two positions goes to one of them."""
    row = list(row)
    at = random.randint(first, last)
    row.insert(random.choice((first, last)), row.pop(at))
    return row


def _blocks(
    problem: Problem,
    rows: Rows,
    end: Sequence[float],
    windows: Sequence[float],
) -> list[tuple[int, int, int]]:
    """(rank, first position, last position) of actions on a critical path that follow each other
    without a wait.
    """
    place = {action: at for row in rows for at, action in enumerate(row)}
    rank = windows.index(max(windows))
    blocks = []
    at = last = len(rows[rank]) - 1
    while True:
        action = rows[rank][at]
        start = end[action] - problem.length[action]
        if at and end[rows[rank][at - 1]] >= start / ALMOST:
            at -= 1
            continue
        if last > at:
            blocks.append((rank, at, last))
        needed = problem.needs[action]
        if needed < 0:
            return blocks
        rank = problem.path[needed // problem.microbatches % problem.stages]
        at = last = place[needed]
