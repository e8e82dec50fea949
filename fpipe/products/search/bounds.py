# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on the span: no schedule of these costs on these ranks, within this memory, has a
shorter one.

Four are computed for each rank, and the largest counts; each names its reason:

* *work*: a rank is busy for its own work. Until its first backward can be there it has only
  forwards to run, and only as many as fit in memory; after its last forward it has only the
  backwards of what it holds. What is left of both times is idle (the *head* and the *tail*).
* *passage*: between a rank's first forward and its last backward a microbatch goes to a later rank,
  that one works and waits, and the last microbatch comes back. Only the Ws that the later rank
  still holds then can come after that.
* *path*: from a rank's first forward to its last backward a microbatch passes all later stages and
  comes back. It is the largest of few microbatches.
* *memory*: what a rank holds lies there from its forward to its backward; that much area must fit
  under the limit. It is the largest within little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from operator import add
from typing import NamedTuple

from ... import Costs
from .problem import ALMOST, Problem


class Bound(float):
    """A lower bound on a span: a number with its ``reason``.

    >>> Bound(3, "rank 0 works that long")
    Bound(3, 'rank 0 works that long')
    """

    reason: str

    def __new__(cls, span: float, reason: str = "") -> Bound:
        self = super().__new__(cls, span)
        self.reason = reason
        return self

    def __repr__(self) -> str:
        return f"Bound({float(self):g}, {self.reason!r})"


def lower_bound(problem: Problem, costs: Costs) -> Bound:
    """The largest of the bounds that need no search.

    >>> lower_bound(Problem.of(Costs(), (0, 1), 2, 4, (9.0, 9.0)), Costs())
    Bound(12, 'rank 0: its work')
    """
    return max(_bounds(problem, _least(problem, costs)))


class _Least(NamedTuple):
    """Times of actions, by stage, so that no schedule has less to do, whether backwards are split
    or fused or not.
    """

    F: tuple[float, ...]
    W: tuple[float, ...]
    both: list[float]  #: I and W, or B
    every: list[float]  #: F, I and W
    forward: list[float]  #: until the next stage can go on
    inward: list[float]

    def way(self, out: int, back: int, end: int | None = None) -> float:
        """Forwards from stage ``out`` up to an end, and back from there to stage ``back``."""
        return sum(self.forward[out:end]) + sum(self.inward[back:end])


def _least(p: Problem, costs: Costs) -> _Least:
    """From the costs; what messages take of a rank's time is left out."""
    times = costs.times(p.stages)
    F = times["F"]
    W = times["W"]
    split = map(sum, zip(times["I"], W, strict=True))
    both = list(map(min, split, times["B"]))
    every = list(map(max if callable(costs.overlap) else add, F, both))
    inward = map(min, times["I"], times["B"])
    overlap = times.get("overlap", (inf,) * p.stages)
    uneven = min(p.load) / (max(p.load) or 1.0) or 1e-9  # a fused one has its first part's load
    fused = [min(overlap[s] for s in p.of_rank[rank]) * uneven for rank in p.path]
    shorter = [list(map(min, numbers, fused)) for numbers in (every, F, inward)]
    return _Least(F, W, both, *shorter)


def _bounds(p: Problem, least: _Least) -> Iterator[Bound]:
    ends = [_ends(p, least, rank) for rank in range(p.ranks)]
    short = min(p.load)
    for rank, stages in enumerate(p.of_rank):
        waits = ", and its waits before its first and after its last forwards"
        reason = f"rank {rank}: its work{waits if ends[rank].waits > 0 else ''}"
        yield Bound(ends[rank].work + ends[rank].waits, reason)
        first = stages[0]
        last = least.both[first] - least.inward[first]
        passes = least.way(first, first) + last
        yield Bound(
            passes * max(p.load) + 2 * sum(p.link[first:]),
            f"rank {rank}: the way of a microbatch through all later stages and back",
        )
        if 0 < p.limit[rank] < inf:
            area = 0.0
            for s in stages:  # what its microbatches hold from F to I, times how long at least
                passes = least.way(s, s)
                links = 2 * sum(p.link[s:])
                sizes = zip(p.size, p.load, strict=True)
                area += p.saved[s] * sum(size * (load * passes + links) for size, load in sizes)
            reason = f"rank {rank}: how much it holds for how long, within its memory"
            yield Bound(area / p.limit[rank], reason)
        for other, (there, *_) in enumerate(p.of_rank):
            if first < there:
                passes = least.way(first, first, there) + last
                way = passes * short + 2 * sum(p.link[first:there])
                yield Bound(
                    way + ends[other].until,
                    f"rank {rank}: the way to rank {other}, the work and the waits there, and the "
                    "way back",
                )


class _Ends(NamedTuple):
    """How long a rank works, waits, and is not done with the backwards of its first stage, at
    least.
    """

    work: float
    waits: float  #: before its first backward and after its last forward
    until: float  #: from its first forward to the end of the last backward of its first stage


def _ends(p: Problem, least: _Least, rank: int) -> _Ends:
    stages = p.of_rank[rank]
    short = min(p.load)
    first = stages[0]
    last = stages[-1]
    work = sum(p.load) * sum(least.every[s] for s in stages)
    room = p.limit[rank] / min(p.size) if min(p.size) > 0 else inf

    def most(items: list[tuple[float, float]]) -> float:
        return max(p.load) * _knapsack(items, p.microbatches, room)

    forwards = [(least.F[s], p.saved[s]) for s in stages]
    backwards = [(least.both[s], p.saved[s]) for s in stages]
    weights = [(least.W[s], p.kept[s]) for s in stages]
    links = sum(p.link[first:]) + sum(p.link[last:])
    head = max(0.0, least.way(first, last + 1) * short + links - most(forwards))
    # the last forward is one of the last stage; until its gradient has come back to the first
    # stage, there is only the work of what is held
    back = least.way(last + 1, first + 1) * short + links
    held = most(backwards + weights)
    tail = max(0.0, back - max(0.0, held - least.both[first] * short))
    until = work - held + back + least.inward[first] * short
    waits = max(head, tail)
    if sum(p.size) * sum(p.saved[s] for s in stages) > p.limit[rank] * ALMOST:
        # not all fit in memory, so that a backward comes before the last forward
        until += head
        waits = head + tail
    return _Ends(work, waits, max(until, work - most(weights) + head))


def _knapsack(items: list[tuple[float, float]], most: int, room: float) -> float:
    """The most time of items (time, bytes), each at most ``most`` times and in parts too, that fit
    in ``room``.
    """
    sizes = {size for _, size in items}
    if len(sizes) == 1 and (size := sizes.pop()) > 0 and room < inf:
        room = room * ALMOST // size * size  # no parts
    total = 0.0
    for time, size in sorted(items, key=lambda item: item[1] / item[0] if item[0] > 0 else inf):
        count = most if size <= 0 else min(most, room / size)
        total += count * time
        room -= count * max(size, 0.0)
    return total
