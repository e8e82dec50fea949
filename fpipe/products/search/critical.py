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

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import NamedTuple

from ...generators.fill import Filled
from ...generators.problem import ALMOST, Problem, Rows


class _Times(NamedTuple):
    """When the actions of rows end, and how long each rank is busy or waits."""

    end: list[float]
    by_rank: list[list[float]]
    windows: list[float]


class _Graph(NamedTuple):
    """A problem by action, which is a number: how long it takes, what it needs and how long that
    travels, its bytes.
    """

    problem: Problem
    length: list[float]
    needs: list[int]  #: -1 for none
    travel: list[float]
    adds: list[float]

    @classmethod
    def of(cls, p: Problem) -> _Graph:
        """The graph of a problem."""
        stages, count = p.stages, p.microbatches

        def number(op, s, k):
            return (op * stages + s) * count + k

        graph = cls(p, [], [], [], [])
        for op in range(3):
            for s in range(stages):
                for k in range(count):
                    needs = [(number(*before), travel) for before, travel in p.needed(op, s, k)]
                    before, travel = needs[0] if needs else (-1, 0.0)
                    graph.length.append(p.time(op, s, k))
                    graph.needs.append(before)
                    graph.travel.append(travel)
                    graph.adds.append(p.adds[op][s] * p.size[k])
        return graph

    def numbered(self, rows: Rows) -> list[list[int]]:
        """Rows as numbers."""
        stages, count = self.problem.stages, self.problem.microbatches
        return [[(op * stages + s) * count + k for op, s, k in row] for row in rows]

    def named(self, rows: Sequence[Sequence[int]]) -> Rows:
        """Rows of numbers as rows."""
        stages, count = self.problem.stages, self.problem.microbatches
        return [
            [(a // count // stages, a // count % stages, a % count) for a in row] for row in rows
        ]

    def fitting(self, row: list[int], rank: int) -> list[int] | None:
        """A row that keeps to the memory of its rank: before an action that does not fit runs what
        frees memory.

        These are the Ws that come next in the row and whose Is have run. None where they do not
        suffice.
        """
        held, limit, adds, needs = 0.0, self.problem.limit[rank] * ALMOST, self.adds, self.needs
        fitting, begun = list[int](), set[int]()
        for at, action in enumerate(row):
            if action in begun:
                continue
            while held + adds[action] > limit:
                for freeing in row[at + 1 :]:
                    if adds[freeing] < 0 and freeing not in begun and needs[freeing] in begun:
                        break
                else:
                    return None
                fitting.append(freeing)
                begun.add(freeing)
                held += adds[freeing]
            fitting.append(action)
            begun.add(action)
            held += adds[action]
        return fitting

    def ends(
        self, rows: Sequence[Sequence[int]], before: _Times | None = None, since: float = 0.0
    ) -> list[float] | None:
        """When each action ends; None where the rows block each other. What ended until ``since``
        is as ``before``.
        """
        length, needs, travel = self.length, self.needs, self.travel
        if before is None:
            end, at, clock = [-1.0] * len(length), [0] * len(rows), [0.0] * len(rows)
        else:
            end = before.end[:]
            at = [bisect_right(ends, since) for ends in before.by_rank]
            clock = [
                ends[position - 1] if position else 0.0
                for ends, position in zip(before.by_rank, at, strict=True)
            ]
            for row, position in zip(rows, at, strict=True):
                for action in row[position:]:
                    end[action] = -1.0
        left = sum(map(len, rows)) - sum(at)
        ready, waiting = list(range(len(rows)))[::-1], dict[int, int]()
        while ready:
            rank = ready.pop()
            row, position, time = rows[rank], at[rank], clock[rank]
            while position < len(row):
                action = row[position]
                needed = needs[action]
                if needed >= 0:
                    arrival = end[needed]
                    if arrival < 0.0:
                        waiting[needed] = rank
                        break
                    arrival += travel[action]
                    if arrival > time:
                        time = arrival
                time += length[action]
                end[action] = time
                position, left = position + 1, left - 1
                if action in waiting:
                    ready.append(waiting.pop(action))
            at[rank], clock[rank] = position, time
        return None if left else end

    def times(self, rows: Sequence[Sequence[int]], end: list[float]) -> _Times:
        """The times of rows whose actions end so."""
        return _Times(
            end, [[end[action] for action in row] for row in rows], self.windows(rows, end)
        )

    def windows(self, rows: Sequence[Sequence[int]], end: Sequence[float]) -> list[float]:
        """How long each rank is busy or waits."""
        return [end[row[-1]] - end[row[0]] + self.length[row[0]] for row in rows]


def anneal_rows(
    problem: Problem,
    rows: Rows,
    random: Random,
    share: Callable[[], float],
    found: Callable[[Filled], object],
) -> None:
    """Simulated annealing until ``share()``, the share of the time that has passed, is 1; ``found``
    gets what is better than all before.
    """
    graph = _Graph.of(problem)
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
    graph: _Graph, rows: Sequence[Sequence[int]], times: _Times
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
