# SPDX-License-Identifier: Apache-2.0
"""V: the V of ZBV with any memory between that of V-Min and that of ZBV, and the least idle time at
unit cost.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362), has the
frontier; ``v_lines`` has the orders that reach it. Each pass runs as soon as it can, and a W where
there is nothing else to do, or where a forward must wait for its memory. 4 ranks that hold 6 of
ZBV's 8 chunks (small letters are a rank's second chunk):

    rank 0   F F F F F . . f i w f i w f i I w F W f i I w F W f i I w F W f
    rank 1   . F F F F . f . f i w f i w I i W w f F I i W w f F I i W w f F
    rank 2   . . F F F f . f . f i w F I i W w f i I F w W f i I F w W f i I
    rank 3   . . . F f F f F f . . i I w F W f i I w W F f i I w W F f i I w

The memory is a share of that of 1F1B, p microbatches.
"""

from __future__ import annotations

from ..actions.costs import Costs
from ..actions.placement import Placement
from ..errors import ScheduleError
from ..schedule import Schedule
from .bounds import lower_bound
from .fill import fill
from .problem import Problem
from .v_lines import line_orders
from .zbv import make_zbv


def make_v(ranks: int, microbatches: int, stages: int, memory: float = 1.0) -> Schedule:
    """Any memory between V-Min and ZBV, as a share of that of 1F1B; two stages a rank.

    >>> for share in (0.5, 0.75, 1.0):
    ...     t = make_v(4, 8, 8, share).simulate()
    ...     print(max(t.peak), t.span)
    4 59.0
    6 53.0
    8 48.0
    """
    chunks, least = int(memory * stages + 1e-9), 2 * ((ranks + 4) // 3)
    if chunks < min(least, stages):
        what = f"memory={memory} of {ranks} microbatches is less than V-Min holds"
        raise ScheduleError(f"{what}; give at least {least / stages:.3g}", rule="memory")
    if chunks >= stages:
        made = make_zbv(ranks, microbatches, stages)
        return Schedule(made.rows, made.placement, microbatches, "V")
    problem = Problem.of(
        Costs(), Placement.v(ranks).paths[0], ranks, microbatches, (float(chunks),) * ranks
    )
    filled = fill(problem, line_orders(ranks, microbatches, chunks), lower_bound(problem, Costs()))
    assert filled is not None, "lines fit in the memory"
    return problem.schedule(filled.rows, "V")
