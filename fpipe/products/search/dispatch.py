# SPDX-License-Identifier: Apache-2.0
"""List scheduling: ranks run, in the order of time, the pass that is first in a repeated block.

A block gives each pass of a microbatch its place in time; the next microbatch has the same places a
period later. A rank runs the passes in the order of these places, each I with its W. While the one
whose turn it is has not arrived, a later one may come early: an F only if the memory suffices for
all passes between now and its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import ceil

from .problem import ALMOST, Problem, Rows


def dispatch(problem: Problem, places: Sequence[float]) -> Rows:
    """The Fs and Is of this block in order; some are missing where memory does not suffice.

    ``places`` are by pass, for microbatch 0. The period is the work of the busiest rank.

    >>> from fpipe import Costs
    >>> p = Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0))
    >>> dispatch(p, [0, 1, 3, 2])
    [[0, 1, 4, 5], [2, 6, 3, 7]]
    """
    p = problem
    stages = problem.stages
    count = problem.microbatches
    period = max(p.work) / count or 1.0
    passes = [[*held, *(stages + s for s in held)] for held in p.of_rank]
    following = dict(pairwise([*range(stages), *range(2 * stages - 1, stages - 1, -1)]))
    done = [0] * 2 * stages
    arrived = [count, *done[1:]]
    clock = [0.0] * p.ranks
    held = [0.0] * p.ranks
    weights: list[deque[int]] = [deque() for _ in range(p.ranks)]
    rows: Rows = [[] for _ in range(p.ranks)]
    events = [(0.0, True, rank) for rank in range(p.ranks)]  # time, whether a rank may go on
    while events:
        time, decides, at = heappop(events)
        if not decides:
            arrived[at] += 1
            heappush(events, (time, True, p.path[at % stages]))
            continue
        if clock[at] > time:
            continue
        turns = {one: places[one] + done[one] * period for one in passes[at] if done[one] < count}
        for one in sorted(turns, key=turns.__getitem__):
            ready = done[one] < arrived[one]
            if ready and (one >= stages or _fits(p, one, turns, period, done, held[at])):
                action = one * count + done[one]
                break
        else:
            if not weights[at]:
                continue
            one = -1
            action = weights[at].popleft()
        clock[at] = time + p.length[action]
        held[at] += p.adds[action]
        heappush(events, (clock[at], True, at))
        if one >= 0:
            rows[at].append(action)
            done[one] += 1
        if one >= stages:
            weights[at].append(action + stages * count)
        if one in following:
            then = following[one]
            heappush(events, (clock[at] + p.travel[then * count], False, then))
    return rows


def _fits(
    p: Problem,
    early: int,
    turns: Mapping[int, float],
    period: float,
    done: Sequence[int],
    held: float,
) -> bool:
    """Whether an F can run before its turn, and leave enough memory for all passes before that.

    ``turns`` are those of the next microbatches of all passes of a rank, which holds ``held``.
    """
    changes: list[tuple[float, float]] = []
    for one, turn in turns.items():
        before = min(ceil((turns[early] - turn) / period), p.microbatches - done[one])
        if one < p.stages:
            changed = p.saved[one]
        else:
            changed = -p.saved[one - p.stages]
        for later in range(before):
            changes.append((turn + later * period, changed * p.size[done[one] + later]))
    first = held + p.saved[early] * p.size[done[early]]
    memory = accumulate((change for _, change in sorted(changes)), initial=first)
    return max(memory) <= p.limit[p.path[early]] * ALMOST


def block(problem: Problem, forward: float, backward: float) -> list[float]:
    """Places of a microbatch that takes so many times as long from pass to pass.

    >>> from fpipe import Costs
    >>> block(Problem.of(Costs(), (0, 1), 2, 2, (2.0, 1.0)), 1.0, 2.0)
    [0.0, 1.0, 4.0, 2.0]
    """
    p = problem
    last = p.stages - 1
    ways = [
        *((f + link) * forward for f, link in zip(p.F, (*p.link, 0.0), strict=True)),
        *((i + link) * backward for i, link in zip(p.I[:0:-1], p.link[::-1], strict=True)),
    ]
    places = list(accumulate(ways, initial=0.0))
    return [*places[: last + 1], *places[:last:-1]]
