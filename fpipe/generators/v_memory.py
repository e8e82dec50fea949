# SPDX-License-Identifier: Apache-2.0
"""V: the V of ZBV with any memory between that of V-Min and that of ZBV.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362). Up to about 3p / 2 chunks of ZBV's
2p the lines of ``v_lines`` idle for the least time that the memory allows. With more chunks blocks are repeated: a
microbatch goes down the ranks, up, down and up again; how many slots a rank it takes on each way, and how many it waits
at the first rank, decides how long activations live. With one slot a rank and a wait of 3k - 2p slots all ranks hold
about k chunks. Blocks with these steps and waits are tried under the limit, and the shortest span at unit cost wins;
each rank runs the passes in the order of the repeated blocks, each as soon as it can, and W where there is nothing else
to do. 4 ranks that hold 6 of ZBV's 8 chunks (small letters are a rank's second chunk):

    rank 0   F F F F F . . f i w f i w . f I i W F w f I i W F w f I i W
    rank 1   . F F F F . f . f i w . i f I w F i W f I w F i W f I w F i
    rank 2   . . F F F f F f . . i w f I i W w f F I i W w f F I i W w f
    rank 3   . . . F f F f F f . . i I w F W f i I w F W f i I w F W f i

The memory is a share of that of 1F1B, p microbatches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from ..errors import ScheduleError
from ..schedule import Schedule
from ..schedules.costs import Costs
from ..schedules.placement import Placement
from .solver.bounds import lower_bound
from .solver.dispatch import dispatch
from .solver.fill import Filled, fill
from .solver.problem import Problem
from .v_family import make_v_half, make_v_min
from .v_lines import line_orders
from .zbv import make_zbv

#: Slots a rank on the four ways; each is the best one for some number of ranks and some limit.
STEPS = (
    (1, 1, 1, 1), (1, 1, 1, 4), (1, 1, 2, 2), (1, 2, 2, 2), (1, 2, 4, 1), (1, 2, 4, 2), (1, 3, 3, 1), (1, 3, 3, 3),
    (1, 4, 2, 1), (2, 4, 2, 3),
)  # fmt: skip
#: By how many slots the wait at the first rank is shorter than 3k - 2p, where steps are of one slot.
LESS = range(9)
_Choice: TypeAlias = tuple[tuple[int, ...], int, bool]  #: steps; ``LESS``, or -1 for no wait; whether passes come early
_MOST = 16  #: ranks up to which all steps are tried; for more those are taken that are the best for this number
_PERIOD = 6


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
    problem = _problem(ranks, microbatches, chunks)
    bound = lower_bound(problem, Costs())
    found = []
    if (filled := fill(problem, line_orders(ranks, microbatches, chunks), bound)) is not None:
        found.append(problem.schedule(filled.rows, "V"))
        if filled.span == bound:
            return found[0]
    found += [
        made for limit, make in ((least, make_v_min), (2 * ((ranks + 2) // 2), make_v_half))
        if limit <= chunks and max((made := make(ranks, microbatches, stages)).simulate().peak) <= chunks
    ]  # fmt: skip
    for choice in _best_choices(ranks, microbatches, chunks):
        if (filled := _filled(problem, choice)) is not None:
            found.append(problem.schedule(filled.rows))
    best = min(found, key=lambda schedule: schedule.simulate().span)
    return Schedule(best.rows, best.placement, microbatches, "V")


def _problem(ranks: int, microbatches: int, chunks: int) -> Problem:
    return Problem.of(Costs(), Placement.v(ranks).paths[0], ranks, microbatches, (float(chunks),) * ranks)


def _best_choices(ranks: int, microbatches: int, chunks: int) -> tuple[_Choice, ...]:
    every = (*((steps, -1, early) for steps in STEPS for early in (True, False)), *((STEPS[0], n, True) for n in LESS))
    if ranks <= _MOST:
        return every
    few = min(microbatches, 4 * _MOST)
    return _of_few(_MOST, few, max(12, round(chunks * _MOST / ranks)), every)


@lru_cache(maxsize=64)
def _of_few(ranks: int, microbatches: int, chunks: int, every: tuple[_Choice, ...]) -> tuple[_Choice, ...]:
    problem = _problem(ranks, microbatches, chunks)
    spans = [(filled.span, one) for one in every if (filled := _filled(problem, one)) is not None]
    return tuple(one for _, one in sorted(spans, key=lambda pair: pair[0])[:2])


def _filled(problem: Problem, choice: _Choice) -> Filled | None:
    steps, less, early = choice
    target = max(problem.work) + 3.0 * problem.ranks
    wait = max(0.0, 3 * problem.limit[0] - 2 * problem.ranks - less) if less >= 0 else 0.0
    orders = dispatch(problem, _places(problem.ranks, steps, wait), _PERIOD, target, early)
    return None if orders is None else fill(problem, orders, target)


def _places(ranks: int, steps: tuple[int, ...], wait: float) -> list[float]:
    """Where the four passes of a block stand on each rank, by pass."""
    places, time = [0.0] * (4 * ranks), 0.0
    down, up = range(ranks), range(2 * ranks - 1, ranks - 1, -1)
    ways = (down, reversed(up), (2 * ranks + s for s in up), (2 * ranks + s for s in reversed(down)))
    for at, (step, way) in enumerate(zip(steps, ways, strict=True)):
        time += wait if at == 2 else 0.0
        for one in way:
            places[one] = time
            time += step
        time += 1 - step
    return places
