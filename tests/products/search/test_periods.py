"""The proof of ``benchmarks/trial_periods.py`` agrees with what is known of V-Min at unit cost."""

from __future__ import annotations

import pytest

from benchmarks.trial_periods import UNIT, model
from fpipe import Costs, Placement
from fpipe.products.search.problem import Problem

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


@pytest.mark.parametrize(("memory", "status"), [(3, "INFEASIBLE"), (4, "OPTIMAL")])
def test_a_v_of_four_ranks_needs_four_chunks_to_repeat_without_waits(memory, status):
    problem = Problem.of(Costs(), Placement.v(4).paths[0], 4, 1, (memory,) * 4)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.status_name(solver.solve(model(problem, 6 * UNIT, memory)[0])) == status
