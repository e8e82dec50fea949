"""Whether a V with uneven costs can repeat each microbatch after a given period, within the memory
of V-Min.

Every rank runs its six actions (F, I and W of two stages) once a period. CP-SAT
(``pip install '.[solve]'``) places them: of two actions of a rank, one starts after the end of the
other and ends before the next one of that, modulo the period, with the least time from a rank's
first start to its last end for one microbatch that it finds. The table has the bubble of 32
microbatches in the order of these periods, in the simulator.

    python -m benchmarks.trial_periods [--memory 8] [--seconds 60] [--periods 294 310 316]

Periods are in tenths; a rank works 27.39 for a microbatch.
"""

from __future__ import annotations

from typing import Any

from benchmarks.bench_solver import UNEVEN
from benchmarks.command import options
from fpipe import Placement
from fpipe.products.search.problem import Problem

UNIT, RANKS, MICROBATCHES = 1000, 8, 32
PERIODS = (274, 280, 285, 290, 294, 298, 300, 304, 306, 310, 316, 320)


def model(p: Problem, period: int, memory: int) -> tuple[Any, dict[tuple[int, int], Any]]:
    """The model, and the starts of actions of a microbatch by op and stage."""
    from ortools.sat.python import cp_model  # optional

    m, whole = cp_model.CpModel(), lambda time: round(time * UNIT)
    names = [(op, s) for op in range(3) for s in range(p.stages)]
    length = {(op, s): whole(p.time(op, s, 0)) for op, s in names}
    start = {name: m.new_int_var(0, 12 * period, "") for name in names}
    window = m.new_int_var(0, 12 * period, "")
    m.add(start[0, 0] == 0)
    for op, s in names:
        if (needed := p.needed(op, s, 0)) is not None:
            before, link = needed[0][:2], needed[1]
            m.add(start[op, s] >= start[before] + length[before] + whole(link))
    for stages in p.of_rank:
        row = [name for name in names if name[1] in stages]
        apart = {}  # how many whole periods one action starts after another
        for a in row:
            for b in row[row.index(a) + 1 :]:
                apart[a, b] = k = m.new_int_var(-14, 14, "")
                apart[b, a] = -k - 1
                m.add_linear_constraint(
                    start[b] - start[a] - k * period, length[a], period - length[b]
                )
        for s in stages:
            now, there = (0, s), [((0, other), (2, other)) for other in stages]
            m.add(
                sum((0 if f == now else apart[f, now]) - apart[w, now] for f, w in there) <= memory
            )
            m.add(window >= start[2, s] + length[2, s] - start[0, stages[0]])
    m.minimize(window)
    return m, start


def bubble(p: Problem, start: dict[tuple[int, int], int], period: int) -> float:
    """The bubble of the microbatches of a problem that run in the order of a period, each a period
    later.
    """
    names = [
        [(*name, k) for name in start if name[1] in stages for k in range(p.microbatches)]
        for stages in p.of_rank
    ]
    rows = [sorted(row, key=lambda name: start[name[:2]] + period * name[2]) for row in names]
    timeline = p.schedule(rows).check().simulate(UNEVEN)
    assert max(timeline.peak_bytes) <= p.limit[0]
    return timeline.bubble


def main() -> None:
    """Print the table."""
    from ortools.sat.python import cp_model

    parser = options(__doc__, memory=8, seconds=60)
    parser.add_argument("--periods", type=int, nargs="+", default=PERIODS, metavar="TENTHS")
    given = parser.parse_args()
    path = Placement.v(RANKS).paths[0]
    problem = Problem.of(UNEVEN, path, RANKS, MICROBATCHES, (float(given.memory),) * RANKS)
    print(f"{'period':>8} {'answer':>12} {'bubble':>8}")
    for period in (tenths * UNIT // 10 for tenths in given.periods):
        m, start = model(problem, period, given.memory)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = (
            float(given.seconds),
            1,
        )
        status = solver.solve(m)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        reached = (
            bubble(problem, {name: solver.value(at) for name, at in start.items()}, period)
            if found
            else None
        )
        shown = "" if reached is None else f"{reached:8.4f}"
        print(f"{period / UNIT:8.1f} {solver.status_name(status).lower():>12} {shown}", flush=True)


if __name__ == "__main__":
    main()
