# SPDX-License-Identifier: Apache-2.0
"""ZB-1p and ZB-2p with several chunks on each rank: zero bubble from costs, stage s on rank s % p.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), have one stage a rank; the
placement is that of Narayanan et al., 2021 (arXiv:2104.04473). They have names apart from ZB1P and
ZB2P, since several stages a rank are neighbours there, as in 1F1B, and a loop here. InterleavedZB2P
on 3 ranks, two chunks each (small letters are a rank's second chunk):

    rank 0   F F F f f f F F i F i w f i f I f I I w i w i W i I I I W W w w w
    rank 1   . F F F f f f i F i F i F I f I f I f i w i w i I I I w W W W w w
    rank 2   . . F F F f i f i f i F I F I F I f i f i f i I I I w w w W W W w

The passes have the order of Interleaved 1F1B, with groups of p microbatches or more, and a warm-up
that is shorter by one, two or three forwards from rank to rank. Ws run where a rank would idle or
where memory would not do. The settings whose warm-up fits in memory are tried, then repeated blocks
(as in V) that need no groups; the shortest span wins, and one that no schedule could shorten ends
the search.

At unit cost, if p divides m, a rank idles for p - 1 chunk passes with p activations
(InterleavedZB1P, the time of InterleavedZeroBubble), and for none with 2p (InterleavedZB2P, from 2p
microbatches on). The names are for unit costs without communication. With measured ones::

    from fpipe.generators.automatic_loop import automatic_loop
    automatic_loop(8, 24, 16, Costs(F=9.3, I=9.1, W=4.7, comm=0.6), limit=32)

``fpipe.solve(..., placement="loop")`` searches longer, and finds shorter ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ..actions.costs import Costs
from ..actions.placement import Placement
from ..errors import ScheduleError
from ..schedule import Schedule
from .bounds import lower_bound
from .dispatch import dispatch
from .fill import fill
from .interleaved import by_groups
from .one_f_one_b import one_forward_one_backward
from .problem import ALMOST, Orders, Problem, orders_of

#: Microbatches of a group, in multiples of p, and by how many forwards a rank's warm-up exceeds the
#: next one's.
_CHOICES = (
    (1.125, 2),
    (1, 2),
    (1.25, 2),
    (1.5, 2),
    (1.5, 3),
    (1.25, 3),
    (1.125, 3),
    (1, 1.5),
    (1, 1),
)
#: Steps from rank to rank in a block, forwards and backwards, in multiples of a pass.
_STEPS = ((2.0, 2.0), (0.5, 0.5))


def make_interleaved_zb_1p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-1p with several chunks a rank: the memory of 1F1B.

    >>> make_interleaved_zb_1p(4, 8, 8).simulate().span
    51.0
    """
    return automatic_loop(
        ranks, microbatches, stages, Costs(), limit=stages, name="InterleavedZB1P"
    )


def make_interleaved_zb_2p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-2p with several chunks a rank: at most twice that, and no idle time within a rank's span.

    >>> make_interleaved_zb_2p(4, 8, 8).simulate().span
    48.0
    """
    return automatic_loop(
        ranks, microbatches, stages, Costs(), limit=2 * stages, name="InterleavedZB2P"
    )


def automatic_loop(
    ranks: int,
    microbatches: int,
    stages: int,
    costs: Costs,
    *,
    limit: float,
    name: str = "AutomaticLoop",
) -> Schedule:
    """The shortest of these schedules for these costs of stages, ``stages / ranks`` chunks a rank.

    ``limit`` is what a rank may hold, in the bytes of ``costs.saved`` and ``costs.kept``; as these
    are 1 by default, it then counts chunks.

    >>> costs = Costs(F=2, comm=0.5)
    >>> automatic_loop(2, 8, 4, costs, limit=8).simulate(costs).span
    64.0
    """
    path = Placement.loop(ranks, stages // ranks).paths[0]
    problem = Problem.of(costs, path, ranks, microbatches, (float(limit),) * ranks)
    least, best = lower_bound(problem, costs), None
    for orders in _orders(problem):
        for target in (least, inf):
            filled = fill(problem, orders, target)
            if filled is not None and (best is None or filled.span < best.span):
                best = filled
            if best is not None and best.span <= least * ALMOST:
                return problem.schedule(best.rows, name)
    if best is None:
        what = (
            problem.lacks
            or f"{stages} stages on {ranks} ranks start more forwards than that before a backward"
        )
        raise ScheduleError(f"limit={limit} is too little: {what}; give more", rule="limit")
    return problem.schedule(best.rows, name)


def _orders(problem: Problem) -> Iterator[Orders]:
    """Those whose warm-up fits in the first rank's memory, the longest first."""
    p, chunks = problem.ranks, problem.stages // problem.ranks
    room = problem.limit[0] * ALMOST
    for size, step in _CHOICES:
        group = max(p, min(round(size * p), problem.microbatches))

        def warm_up(rank, step=step):
            return int(step * (p - rank - 1)) + 1

        held = min(warm_up(0) + (chunks - 1) * group, problem.microbatches * chunks)
        if held * min(problem.saved) <= room:

            def pattern(rank, total, ahead, warm_up=warm_up):
                return one_forward_one_backward(total, warm_up(rank) + ahead)

            yield orders_of(by_groups("", pattern, p, problem.microbatches, problem.stages, group))
    work = max(problem.work)
    for steps in _STEPS if problem.lacks is None else ():
        orders = dispatch(
            problem, _places(problem, *steps), work / problem.microbatches, work, early=True
        )
        if orders is not None:
            yield orders


def _places(problem: Problem, forward: float, backward: float) -> list[float]:
    """When the passes of a block start, by pass."""
    p, time = problem, 0.0
    places = [0.0] * (2 * p.stages)
    for s in range(p.stages):
        places[s] = time
        time += (p.F[s] + (p.link[s] if s + 1 < p.stages else 0.0)) * forward
    for s in reversed(range(p.stages)):
        places[p.stages + s] = time
        time += (p.I[s] + (p.link[s - 1] if s else 0.0)) * backward
    return places
