# SPDX-License-Identifier: Apache-2.0
"""From rows that may lack Ws to complete ones: every pass as early as it can, and Ws where they
cost least.

A W runs before a pass that does not fit in memory without it, in a wait that is long enough for it,
and in a shorter one where waiting would cost the rank more idle time than ``target`` leaves it. The
others come last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .problem import ALMOST, Problem, Rows


class Filled(NamedTuple):
    """Complete rows, and the longest time from a rank's first start to its last end."""

    rows: Rows
    span: float


def fill(problem: Problem, rows: Sequence[Sequence[int]], target: float) -> Filled | None:
    """These rows with the Ws that they lack; None where they block each other or do not fit in
    memory.

    ``target`` is the span that is aimed at: a rank may idle as long as it leaves it.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (9.0, 9.0))
    >>> filled = fill(p, [[0, 1, 4, 5], [2, 6, 3, 7]], 0)
    >>> print(p.schedule(filled.rows), filled.span)
    [0F0, 0F1, 0I0, 0W0, 0I1, 0W1]
    [1F0, 1I0, 1F1, 1I1, 1W0, 1W1] 7.0
    """
    length = problem.length
    needs = problem.needs
    travel = problem.travel
    adds = problem.adds
    passes = problem.stages * problem.microbatches
    end = [*[-1.0] * len(length), 0.0]  # the last is that of -1, which nothing waits for
    complete: Rows = [[] for _ in rows]
    spans = [0.0] * len(rows)

    def run(rank: int) -> Iterator[None]:
        """Run a rank; yields where it waits for another one, and ends where it is full."""
        row = complete[rank]
        given = set(rows[rank])
        weights: deque[int] = deque()
        limit = problem.limit[rank] * ALMOST
        budget = target - problem.work[rank]
        clock = held = idle = begin = 0.0
        for action in rows[rank]:
            while end[needs[action]] < 0.0:
                yield
            arrival = end[needs[action]] + travel[action]
            if not row:
                clock = begin = arrival
            while weights:
                then = clock + length[weights[0]]
                late = idle + arrival - clock > budget
                useful = arrival > clock and (late or then <= arrival * ALMOST)
                if held + adds[action] <= limit and not useful:
                    break
                held += adds[weights[0]]
                row.append(weights.popleft())
                clock = then
            held += adds[action]
            if held > limit:
                return
            idle += max(0.0, arrival - clock)
            clock = end[action] = max(clock, arrival) + length[action]
            row.append(action)
            if passes <= action < 2 * passes and action + passes not in given:
                weights.append(action + passes)
        row.extend(weights)
        spans[rank] = clock + sum([length[weight] for weight in weights]) - begin

    ranks = [run(rank) for rank in range(len(rows))]
    before = -1
    now = 0
    while now > before:
        for rank in (*ranks, *ranks[::-1]):
            next(rank, None)
        before = now
        now = sum(map(len, complete))
    lengths = [3 * problem.microbatches * len(stages) for stages in problem.of_rank]
    if list(map(len, complete)) == lengths:
        return Filled(complete, max(spans))
    return None
