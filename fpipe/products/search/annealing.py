# SPDX-License-Identifier: Apache-2.0
"""Local search on complete rows: actions on a critical path change places, those of W as well.

``fill`` places W by a rule, and the best rows of small problems may not follow it. Here the span is
the longest window of a rank, from its first start to its last end. Going back from that end, each
action starts when the one before it in its row ends, or when the message that it needs arrives.
Only a change among the first kind of pairs can shorten the span: an action changes places with its
neighbour, or goes to one end of a block of such actions. Where the row then exceeds the memory of
its rank, Ws come earlier: with memory full, most single changes would do that.

Van Laarhoven, Aarts and Lenstra, "Job Shop Scheduling by Simulated Annealing", 1992.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random

from .fill import Filled
from .graph import Graph, Times
from .problem import ALMOST, Problem, Rows


def anneal(
    problem: Problem,
    rows: Rows,
    random: Random,
    share: Callable[[], float],
    found: Callable[[Filled], object],
) -> None:
    """Simulated annealing until ``share()``, the share of the time that has passed, is 1; ``found``
    gets what is better than all before.
    """
    graph = Graph.of(problem)
    now = graph.numbered(rows)
    end = graph.ends(now)
    if end is None:
        return
    times = graph.times(now, end)
    value, best = _value(times.windows), max(times.windows)
    warmth = max(0.01 * best, sum(graph.length) / len(graph.length))
    blocks = _blocks(graph, now, times)
    while blocks and (passed := share()) < 1:
        rank, first, last = random.choice(blocks)
        old = now[rank]
        row = graph.fitting(_moved(old, first, last, random), rank)
        if row is None or row == old:
            continue
        now[rank] = row
        end = graph.ends(now, times, times.end[old[first]] - graph.length[old[first]])
        if end is not None:
            windows = graph.windows(now, end)
            change = _value(windows) - value
            if change <= 0 or random.random() < exp(-change / (warmth * (1 - passed) ** 2 + 1e-12)):
                times, value = graph.times(now, end), value + change
                blocks = _blocks(graph, now, times)
                if max(windows) < best * (1 - 1e-12):
                    best = max(windows)
                    found(Filled(graph.named(now), windows))
                continue
        now[rank] = old


def _value(windows: Sequence[float]) -> float:
    """The span, and a little of what the other ranks take, so that there is a slope."""
    return max(windows) + 0.05 * sum(windows) / len(windows)


def _moved(row: Sequence[int], first: int, last: int, random: Random) -> list[int]:
    """A row after a change between two positions: neighbours change places, or an action goes to
    one of the ends.
    """
    row = list(row)
    if random.random() < 0.5:
        at = random.randrange(first, last)
        row[at], row[at + 1] = row[at + 1], row[at]
    else:
        at = random.randint(first, last)
        row.insert(random.choice((first, last)), row.pop(at))
    return row


def _blocks(
    graph: Graph, rows: Sequence[Sequence[int]], times: Times
) -> list[tuple[int, int, int]]:
    """(rank, first position, last position) of actions on a critical path that follow each other
    without a wait.
    """
    count, stages, path = graph.problem.microbatches, graph.problem.stages, graph.problem.path
    place = {action: at for row in rows for at, action in enumerate(row)}
    end, rank = times.end, times.windows.index(max(times.windows))
    blocks, at = [], len(rows[rank]) - 1
    last = at
    while True:
        row = rows[rank]
        action = row[at]
        start = end[action] - graph.length[action]
        if at and end[row[at - 1]] >= start / ALMOST:
            at -= 1
            continue
        if last > at:
            blocks.append((rank, at, last))
        before = graph.needs[action]
        if before < 0:
            return blocks
        rank, at = path[before // count % stages], place[before]
        last = at
