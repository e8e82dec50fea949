# SPDX-License-Identifier: Apache-2.0
"""Exact search of small problems by the solver CP-SAT of OR-tools (``pip install '.[solve]'``).

Every action is an interval of integer length. Microbatches that cost the same run in ascending
order on every stage: in any schedule they can be numbered anew so, stage by stage, and keep all
times and all memory. Where a rank begins later than it could, it waits for another microbatch, and
the numbers of the result say so. Times are scaled to integers and rounded down, and so is memory,
so that what is proved for the integers holds for the true costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, floor, inf
from typing import Any, NamedTuple

from .problem import ALMOST, Problem, Rows

MOST = 400  #: actions of problems that are solved
WORKERS = 8  #: of CP-SAT: each searches in another way, so more than cores help
_UNITS = 10**6  #: the longest span, in integers
Name = tuple[int, int, int]


def available() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


@dataclass(frozen=True)
class Answer:
    """What the solver found: rows, or None, and a lower bound on the span; and whether Ctrl-C ended
    it.
    """

    rows: Rows | None
    bound: float
    interrupted: bool = False


def solve_exactly(problem: Problem, span: float, bound: float, seconds: float) -> Answer:
    """Rows of a shorter span than this one, if there are any, and a bound that is not less than the
    one given.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (9.0, 9.0))
    >>> solve_exactly(p, 9.0, 6.0, 10.0).bound if available() else 7.0
    7.0
    """
    from ortools.sat.python import cp_model  # optional, and slow to load

    scale = _scale(problem, span)
    most = ceil(span * scale * (1 - 1e-9)) - 1
    names = _names(problem)
    model = _model(cp_model.CpModel(), problem, names, scale, bound, most)
    if problem.even:
        for stages in problem.of_rank:
            _begins(model, stages[0])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, seconds)
    solver.parameters.num_workers = WORKERS
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Answer(None, min(span, (most + 1) / scale))
    proved = max(bound, solver.best_objective_bound / scale)
    # OR-tools catches the signal, and ends early with what it has
    interrupted = status != cp_model.OPTIMAL and solver.wall_time < 0.9 * seconds
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, proved, interrupted)

    def when(name):
        return (solver.value(model.start[name]), problem.time(*name))

    first = {
        stage: list(map(solver.value, choice)).index(1) for stage, choice in model.first.items()
    }
    found = _numbered(
        [sorted(row, key=when) for row in names], problem.stages, problem.microbatches, first
    )
    return Answer(found, proved, interrupted)


def _names(problem: Problem) -> Rows:
    """The actions of each rank."""
    counts = range(problem.microbatches)
    return [
        [(op, s, k) for s in stages for op in range(3) for k in counts]
        for stages in problem.of_rank
    ]


def _scale(problem: Problem, span: float) -> float:
    """Integers by unit of time: a power of ten at which the costs are exact, if there is one, else
    a large one.
    """
    times = {*problem.F, *problem.I, *problem.W, *problem.link}
    times = {time * load for time in times for load in set(problem.load)} | set(problem.link)
    for power in range(7):
        if (
            all(abs(time * 10**power - round(time * 10**power)) < 1e-7 for time in times)
            and span * 10**power < 1e8
        ):
            return 10.0**power
    return _UNITS / span


class _Model(NamedTuple):
    """The variables: when each action starts, by name, and how long it takes."""

    model: Any
    problem: Problem
    scale: float
    start: dict[Name, Any]
    length: dict[Name, int]
    first: dict[
        int, list[Any]
    ]  #: by a rank's first stage, for which forward of the stage before it waits


def _model(
    model: Any, problem: Problem, rows: Rows, scale: float, bound: float, most: int
) -> _Model:
    """The whole model: its variables and constraints."""
    length = {name: floor(problem.time(*name) * scale + 1e-6) for row in rows for name in row}
    latest = most + sum(floor(link * scale) for link in problem.link) + sum(length.values())
    m = _Model(
        model,
        problem,
        scale,
        {name: model.new_int_var(0, latest, "") for name in length},
        length,
        {},
    )
    _precedences(m)
    if problem.even:
        _ascending(m)
    for rank, row in enumerate(rows):
        model.add_no_overlap([_interval(m, name) for name in row])
        _memory(m, rank, row)
    _span(m, rows, model.new_int_var(floor(bound * scale * (1 - 1e-9)), most, ""))
    return m


def _after(m: _Model, name: Name, before: Name, wait: float = 0.0) -> None:
    wait = m.length[before] + floor(wait * m.scale + 1e-6)
    m.model.add(m.start[name] >= m.start[before] + wait)


def _precedences(m: _Model) -> None:
    for name in m.start:
        if (needed := m.problem.needed(*name)) is not None:
            _after(m, name, *needed)


def _ascending(m: _Model) -> None:
    for op, s, k in m.start:
        if k:
            _after(m, (op, s, k), (op, s, k - 1))


def _interval(m: _Model, name: Name) -> Any:
    length = m.length[name]
    return m.model.new_interval_var(m.start[name], length, m.start[name] + length, "")


def _memory(m: _Model, rank: int, row: list[Name]) -> None:
    """What is held from the start of F to the end of I, and from there to the end of W."""
    p, limit = m.problem, m.problem.limit[rank]
    held = sum(max(p.saved[s], p.kept[s]) * p.size[k] for op, s, k in row if op == 0)
    if limit >= held or limit == inf:
        return
    if p.even:
        _rooms(m, row, limit / p.size[0] * ALMOST)
    whole = all(float(x).is_integer() for x in (*p.saved, *p.kept, *p.size)) and held < 1e9
    unit = 1.0 if whole else 1e6 / limit
    intervals, demands = [], []
    for _, s, k in (name for name in row if name[0] == 0):
        first, end = m.start[0, s, k], m.start[2, s, k] + m.length[2, s, k]
        turn = m.start[1, s, k] + (0 if p.kept[s] > p.saved[s] else m.length[1, s, k])
        parts = [(first, turn, p.saved[s]), (turn, end, p.kept[s])]
        for begin, stop, size in parts if p.saved[s] != p.kept[s] else [(first, end, p.kept[s])]:
            if size > 0:
                held_for = m.model.new_int_var(0, 10**9, "")
                intervals.append(m.model.new_interval_var(begin, held_for, stop, ""))
                demands.append(floor(size * p.size[k] * unit * ALMOST))
    m.model.add_cumulative(intervals, demands, ceil(limit * unit))


def _rooms(m: _Model, row: list[Name], limit: float) -> None:
    """Only so many microbatches of a stage fit in memory: the next F waits for a W."""
    p = m.problem
    for s in {s for _, s, _ in row}:
        size = min(p.saved[s], p.kept[s])
        room = floor(limit / size) if size > 0 else p.microbatches
        for k in range(room, p.microbatches):
            _after(m, (0, s, k), (2, s, k - room))


def _span(m: _Model, rows: Rows, span: Any) -> None:
    even = m.problem.even
    for row in rows:
        first = row[0][1]
        begin = m.start[0, first, 0] if even else m.model.new_int_var(0, 10**9, "")
        for name in row:
            if name[:2] == (0, first) and not even:
                m.model.add(begin <= m.start[name])
            if name[0] == 2:
                m.model.add(span >= m.start[name] + m.length[name] - begin)
    if even:
        m.model.add(m.start[0, 0, 0] == 0)
    m.model.minimize(span)


def _begins(m: _Model, stage: int) -> None:
    """A rank begins when a forward arrives, not in between: rows express no other delay than to
    wait for a later one.

    Microbatches are numbered anew then: see ``_numbered``.
    """
    if not stage:
        return
    before, link = (0, stage - 1), m.problem.link[stage - 1]
    m.first[stage] = [m.model.new_bool_var("") for _ in m.problem.load]
    m.model.add_exactly_one(m.first[stage])
    for k, chosen in enumerate(m.first[stage]):
        wait = (m.problem.time(*before, k) + link) * m.scale
        least, most = m.length[*before, k] + floor(link * m.scale + 1e-6), ceil(wait - 1e-6)
        m.model.add(m.start[0, stage, 0] >= m.start[*before, k] + least).only_enforce_if(chosen)
        m.model.add(m.start[0, stage, 0] <= m.start[*before, k] + most).only_enforce_if(chosen)


def _numbered(rows: Rows, stages: int, microbatches: int, first: dict[int, int]) -> Rows:
    """Rows in which each of these stages runs that forward first which is there the so-manieth of
    the stage before.

    >>> _numbered([[(0, 0, 0), (0, 0, 1), (1, 0, 0)], [(0, 1, 0), (1, 1, 0), (0, 1, 1)]], 2, 2,
    ...     {1: 1})
    [[(0, 0, 0), (0, 0, 1), (1, 0, 1)], [(0, 1, 1), (1, 1, 1), (0, 1, 0)]]
    """
    numbers = [list(range(microbatches))]
    for stage in range(1, stages):
        order = list(numbers[-1])
        order.insert(0, order.pop(first.get(stage, 0)))
        numbers.append(order)
    return [[(op, s, numbers[-1 if op else s][k]) for op, s, k in row] for row in rows]
