# SPDX-License-Identifier: Apache-2.0
"""Complete rows as a graph of numbered actions: when each one ends, and what fits in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

from .fill import Filled
from .problem import ALMOST, Problem, Rows


class Times(NamedTuple):
    """When the actions of rows end, and how long each rank is busy or waits."""

    end: list[float]
    by_rank: list[list[float]]
    windows: list[float]


class Graph(NamedTuple):
    """By number of an action: how long it takes, what it needs, how long that travels, bytes."""

    problem: Problem
    length: list[float]
    needs: list[int]  #: -1 for none
    travel: list[float]
    adds: list[float]

    @classmethod
    def of(cls, p: Problem) -> Graph:
        """The graph of a problem."""
        stages, count = p.stages, p.microbatches

        def number(op, s, k):
            return (op * stages + s) * count + k

        graph = cls(p, [], [], [], [])
        for op, s, k in product(range(3), range(stages), range(count)):
            needed = p.needed(op, s, k)
            graph.length.append(p.time(op, s, k))
            graph.needs.append(number(*needed[0]) if needed else -1)
            graph.travel.append(needed[1] if needed else 0.0)
            graph.adds.append(p.adds[op][s] * p.size[k])
        return graph

    def filled(self, rows: Rows) -> Filled | None:
        """Rows with their windows; None where they block each other or do not fit in memory."""
        numbers = self.numbered(rows)
        for row, limit in zip(numbers, self.problem.limit, strict=True):
            if max(accumulate(self.adds[action] for action in row)) > limit * ALMOST:
                return None
        end = self.ends(numbers)
        return None if end is None else Filled(rows, self.windows(numbers, end))

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
        self, rows: Sequence[Sequence[int]], before: Times | None = None, since: float = 0.0
    ) -> list[float] | None:
        """When each action ends; None where the rows block each other. What ended before ``since``
        is as ``before``.
        """
        length, needs, travel = self.length, self.needs, self.travel
        if before is None:
            end, at, clock = [-1.0] * len(length), [0] * len(rows), [0.0] * len(rows)
        else:
            end = before.end[:]
            at = [bisect_left(ends, since) for ends in before.by_rank]
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

    def times(self, rows: Sequence[Sequence[int]], end: list[float]) -> Times:
        """The times of rows whose actions end so."""
        return Times(
            end, [[end[action] for action in row] for row in rows], self.windows(rows, end)
        )

    def windows(self, rows: Sequence[Sequence[int]], end: Sequence[float]) -> list[float]:
        """How long each rank is busy or waits."""
        return [end[row[-1]] - end[row[0]] + self.length[row[0]] for row in rows]
