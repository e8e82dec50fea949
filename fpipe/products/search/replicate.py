# SPDX-License-Identifier: Apache-2.0
"""The partition problem of PipeDream: which neighbouring stages share ranks, and on how many ranks
they are, so that the busiest rank works least.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018
(arXiv:1806.03377). Stages i to j on k ranks take ceil(m / k) times their work for one microbatch on
one of them. The least bound that the ranks suffice for is found by bisection among all such
numbers; for one bound, dynamic programming over stages and ranks finds whether the ranks suffice,
and of all partitions within it one with few copies of parameters. Both are exact. Messages, also
those of gradients, cost nothing here; the schedule is simulated with the messages of activations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, combinations
from math import ceil
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from ... import Costs, Schedule
from ...actions import load_pass
from ...errors import ScheduleError
from .bounds import Bound
from .memory_limit import is_within
from .problem import ALMOST

#: The schedules that are tried.
NAMES = ("1F1B", "ZB1P", "Eager1F1B", "ZB2P")
#: By number of ranks: how many stages they hold, and the groups from stage i to j on k ranks.
_Groups: TypeAlias = dict[int, tuple[int, tuple[tuple[int, int, int], ...]]]


class Partition(NamedTuple):
    """Groups of neighbouring stages, and the ranks of each; ``load`` is the work of the busiest
    rank.
    """

    groups: tuple[tuple[int, ...], ...]
    copies: tuple[int, ...]
    load: float


def partition(work: Sequence[float], ranks: int, microbatches: int) -> Partition:
    """The partition whose busiest rank works least; of those the one whose ranks hold the fewest
    stages before ranks that are left are given away. ``work`` is that of each stage for one
    microbatch.

    >>> partition([3.0, 1.0], ranks=4, microbatches=12)
    Partition(groups=((0,), (1,)), copies=(3, 1), load=12.0)
    """
    if ranks > microbatches:
        raise ScheduleError(
            f"{ranks} ranks for {microbatches} microbatches: copies of a stage need a microbatch "
            f"each; give microbatches={ranks} or more, or fewer ranks",
            rule="ranks",
        )
    sums = [0.0, *accumulate(work)]
    shares = {ceil(microbatches / k) for k in range(1, ranks + 1)}
    loads = sorted({share * (b - a) for a, b in combinations(sums, 2) for share in shares})

    def within(load: float) -> _Groups:
        """By number of ranks within a load, up to ``ranks``: the fewest stages that ranks hold,
        each counted as often as it is held, and the groups from stage i to j on k ranks.
        """
        best: list[_Groups] = [{0: (0, ())}]
        for j in range(1, len(sums)):
            here: _Groups = {}
            for i, before in enumerate(best):
                time = sums[j] - sums[i]
                # the microbatches that a rank can take
                share = int(load * ALMOST / time) if time > 0 else microbatches
                if not share:
                    continue
                k = ceil(microbatches / share)
                for used, (held, cuts) in before.items():
                    if used + k <= ranks:
                        found = held + (j - i) * k, (*cuts, (i, j, k))
                        here[used + k] = min(here.get(used + k, found), found, key=itemgetter(0))
            best.append(here)
        return best[-1]

    load = loads[bisect_left(loads, True, key=lambda load: bool(within(load)))]
    _, cuts = min(within(load).values())
    copies = [k for *_, k in cuts]

    def load_of(group: int) -> float:
        i, j, _ = cuts[group]
        return ceil(microbatches / copies[group]) * (sums[j] - sums[i])

    groups = range(len(cuts))
    for _ in range(ranks - sum(copies)):  # each rank that is left goes to the group that works most
        copies[max(groups, key=load_of)] += 1
    stages = tuple(tuple(range(i, j)) for i, j, _ in cuts)
    return Partition(stages, tuple(copies), max(map(load_of, groups)))


def solve_replicated(
    costs: Costs,
    ranks: int,
    microbatches: int,
    stages: int,
    limit: Sequence[float],
) -> tuple[Schedule, Bound]:
    """The named schedule of the least span on the best partition that fits the memory, and the load
    of its busiest rank as a bound on the span of any partition.
    """
    times = costs.times(stages)
    work = [f + min(b, i + w) for f, b, i, w in zip(*(times[op] for op in "FBIW"), strict=True)]
    groups, copies, load = partition(work, ranks, microbatches)
    passes = [sum(work[s] for s in group) / 3 for group in groups]
    fitting: list[tuple[float, Schedule]] = []
    for name in NAMES:
        schedule = load_pass("replicas").replicated(name, groups, copies, microbatches, passes)
        line = schedule.simulate(costs)
        if is_within(limit, line):
            fitting.append((line.span, schedule))
    if not fitting:
        raise ScheduleError(
            f"no schedule of {len(groups)} groups of stages on {copies} ranks fits "
            f"memory={min(limit):g}; give more memory, more ranks or smaller microbatches",
            rule="memory",
        )
    pairs = zip(groups, copies, strict=True)
    parts = ", ".join(f"{g[0]} to {g[-1]} on {k}" for g, k in pairs)
    reason = f"the busiest rank of the best partition: stages {parts} ranks"
    return min(fitting, key=itemgetter(0))[1], Bound(load, reason)
