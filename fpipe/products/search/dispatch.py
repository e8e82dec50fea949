# SPDX-License-Identifier: Apache-2.0
"""List scheduling: ranks run, in the order of time, the pass that is first in a repeated block.

A block gives each pass of a microbatch its place in time; the next microbatch has the same places a
period later. A rank runs the passes in the order of these places, each I with its W. While the one
whose turn it is has not arrived, a later one may come early: an F only if the memory suffices for
all passes between now and its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
    p, stages, count = problem, problem.stages, problem.microbatches
    period = max(p.work) / count or 1.0
    way = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    following = dict(pairwise(way))
    place, done, arrived = list(places), [0] * len(way), [0] * len(way)
    arrived[0] = count
    weights: list[deque[int]] = [deque() for _ in range(p.ranks)]
    clock, held = [0.0] * p.ranks, [0.0] * p.ranks
    rows: Rows = [[] for _ in range(p.ranks)]

    def adds(one: int, k: int) -> float:
        return p.saved[one] * p.size[k] if one < stages else -p.saved[one - stages] * p.size[k]

    def fits(early: int, others: Sequence[int], rank: int) -> bool:
        """Whether an F can run before its turn, and leave enough memory for all passes before
        that.
        """
        changes: list[tuple[float, float]] = []
        for one in others:
            before = ceil((place[early] - place[one]) / period)
            microbatches = range(done[one], min(done[one] + before, count))
            for turn, k in enumerate(microbatches):
                changes.append((place[one] + turn * period, adds(one, k)))
        memory = [adds(early, done[early]), *(change for _, change in sorted(changes))]
        return max(accumulate(memory, initial=held[rank])) <= p.limit[rank] * ALMOST

    events = [(0.0, True, rank) for rank in range(p.ranks)]  # time, whether a rank may go on
    while events:
        time, decides, at = heappop(events)
        if not decides:
            arrived[at] += 1
            heappush(events, (time, True, p.path[at % stages]))
            continue
        if clock[at] > time:
            continue
        passes = [one for s in p.of_rank[at] for one in (s, stages + s) if done[one] < count]
        for one in sorted(passes, key=place.__getitem__):
            if done[one] < arrived[one] and (one >= stages or fits(one, passes, at)):
                break
        else:
            if weights[at]:
                weight = weights[at].popleft()
                clock[at] = time + p.length[weight]
                held[at] += p.adds[weight]
                heappush(events, (clock[at], True, at))
            continue
        k = done[one]
        action = one * count + k
        rows[at].append(action)
        done[one], place[one], held[at] = k + 1, place[one] + period, held[at] + p.adds[action]
        end = clock[at] = time + p.length[action]
        if one in following:
            then = following[one]
            heappush(events, (end + p.travel[then * count], False, then))
        if one >= stages:
            weights[at].append(action + stages * count)
        heappush(events, (clock[at], True, at))
    return rows


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
