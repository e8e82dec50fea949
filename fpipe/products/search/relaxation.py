# SPDX-License-Identifier: Apache-2.0
"""A lower bound on the span by linear programming, with GLOP of OR-tools
(``pip install '.[solve]'``).

The program has the starts of all actions, and of each rank its first start and last end.
Constraints that every schedule satisfies: an action starts after those it needs; of the actions of
a rank no two run at once, so that the sum of length times start, for all actions and for those of
one kind, is at least that of running them back to back, from the first start and from the last end
(Queyranne 1993); the next forward waits for a W where no more microbatches fit in memory; and what
a rank holds, times how long, fits in its memory.

It exceeds the other bounds where memory for one to three microbatches is the limit. Times are those
of split backwards.
"""

from __future__ import annotations

from math import floor, inf
from typing import Any, NamedTuple

from ...generators.problem import ALMOST, Problem

#: Actions of problems of which it is computed: it takes about a second then.
MOST = 700
_KINDS = ((0, 1, 2), (0,), (1,), (0, 1), (1, 2))  #: of actions that do not run at once: F, I, W
_Name = tuple[int, int, int]  #: op, stage and microbatch


class _Program(NamedTuple):
    """The program, and the variables of starts."""

    solver: Any
    problem: Problem
    start: dict[_Name, Any]

    def after(self, name: _Name, before: _Name, wait: float = 0.0) -> None:
        """One action starts after the end of another and the wait of its message."""
        self.solver.Add(self.start[name] >= self.start[before] + self.problem.time(*before) + wait)


def relaxed(problem: Problem) -> float:
    """The least span of the linear program; 0 where the solver finds none.

    >>> from fpipe.actions.costs import Costs
    >>> from . import exact
    >>> p = Problem.of(Costs(), (0, 1), 2, 4, (1.0, 1.0))  # one microbatch after another: 5 each
    >>> round(relaxed(p), 6) if exact.available() else 20.0
    20.0
    """
    from ortools.linear_solver import pywraplp  # optional, and slow to load

    solver = pywraplp.Solver.CreateSolver("GLOP")
    names = [
        (op, s, k)
        for op in range(3)
        for s in range(problem.stages)
        for k in range(problem.microbatches)
    ]

    def anywhere():
        return solver.NumVar(-solver.infinity(), solver.infinity(), "")

    program = _Program(solver, problem, {name: anywhere() for name in names})
    _order(program)
    span = solver.NumVar(0, solver.infinity(), "")
    for rank, stages in enumerate(problem.of_rank):
        first, last = anywhere(), anywhere()
        solver.Add(span >= last - first)
        row = [name for name in names if name[1] in stages]
        _one_at_a_time(program, row, first, last)
        if problem.limit[rank] < inf:
            _memory(program, row, problem.limit[rank] * ALMOST, last - first)
    solver.Minimize(span)
    return span.solution_value() if solver.Solve() == pywraplp.Solver.OPTIMAL else 0.0


def _order(program: _Program) -> None:
    p, last = program.problem, program.problem.stages - 1
    for op, s, k in program.start:
        if op == 0 and s:
            program.after((0, s, k), (0, s - 1, k), p.link[s - 1])
        elif op == 1:
            program.after(
                (1, s, k), *(((1, s + 1, k), p.link[s]) if s < last else ((0, s, k), 0.0))
            )
        elif op == 2:
            program.after((2, s, k), (1, s, k))
        if k and p.even:  # as in the exact solver
            program.after((op, s, k), (op, s, k - 1))


def _one_at_a_time(program: _Program, row: list[_Name], first: Any, last: Any) -> None:
    solver, start, time = program.solver, program.start, program.problem.time
    for name in row:
        solver.Add(start[name] >= first)
        solver.Add(start[name] + time(*name) <= last)
    for kinds in _KINDS:
        some = [(start[name], time(*name)) for name in row if name[0] in kinds]
        least = (sum(t for _, t in some) ** 2 - sum(t * t for _, t in some)) / 2
        solver.Add(sum(t * (s - first) for s, t in some) >= least)
        solver.Add(sum(t * (last - s - t) for s, t in some) >= least)


def _memory(program: _Program, row: list[_Name], limit: float, window: Any) -> None:
    solver, p, start, area = program.solver, program.problem, program.start, []
    for _, s, k in (name for name in row if name[0] == 0):
        turn = start[1, s, k] + (0.0 if p.kept[s] > p.saved[s] else p.time(1, s, k))
        end, size = start[2, s, k] + p.time(2, s, k), min(p.saved[s], p.kept[s]) * p.size[k]
        area.append(p.size[k] * (p.saved[s] * (turn - start[0, s, k]) + p.kept[s] * (end - turn)))
        room = floor(limit / size) if size > 0 else k + 1
        if p.even and k >= room:
            program.after((0, s, k), (2, s, k - room))
    solver.Add(sum(area) <= limit * window)
