# SPDX-License-Identifier: Apache-2.0
"""Packs sequences of different lengths into microbatches that cost alike. Knows numbers alone, no
tensors.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence

from ...errors import BatchError

#: How many exchanges between the dearest microbatch and another one are made at most.
ROUNDS = 200


def pack(
    lengths: Sequence[int], *, microbatches: int, cost: Callable[[int], float] = lambda n: float(n)
) -> list[list[int]]:
    """Distribute sequences over microbatches whose costs are alike: the dearest one is as cheap as
    can be found.

    A pipeline waits for its dearest microbatch. Attention costs grow with the square of a length,
    so equal numbers of tokens are not equal costs.

    Args:
        lengths: of the sequences.
        microbatches: how many lists are returned; each has at least one sequence.
        cost: what a sequence of a length costs, in any unit; by default its length.

    Returns:
        For each microbatch the indices of its sequences, ascending.

    Raises:
        BatchError: if there are fewer sequences than microbatches, or a cost is negative or no
        number.

    >>> pack([8, 1, 4, 3, 2, 6], microbatches=3)
    [[0], [1, 2, 3], [4, 5]]
    >>> pack([8, 1, 4, 3, 2, 6], microbatches=2, cost=lambda n: n + n * n / 4)
    [[0, 1, 4], [2, 3, 5]]
    """
    if microbatches < 1 or len(lengths) < microbatches:
        raise BatchError(
            f"{len(lengths)} sequences cannot fill microbatches={microbatches}; give between 1 "
            f"and {len(lengths)}"
        )
    costs = [float(cost(length)) for length in lengths]
    for length, found in zip(lengths, costs, strict=True):
        if not 0 <= found < float("inf"):
            raise BatchError(f"cost({length}) is {found}; a cost is a number of 0 or more")
    packed = _exchanged(_largest_first(costs, microbatches), costs)
    return sorted(sorted(members) for members in packed)


def _largest_first(costs: Sequence[float], count: int) -> list[list[int]]:
    """Each sequence, the dearest first, joins the cheapest microbatch; no microbatch stays
    empty.
    """
    heap = [(0.0, 0, n) for n in range(count)]  # cost, number of sequences, microbatch
    packed: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, members, n = heapq.heappop(heap)
        packed[n].append(index)
        heapq.heappush(heap, (total + costs[index], members + 1, n))
    return packed


def _exchanged(packed: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Exchanges between the dearest microbatch and another one, as long as the dearer of both gets
    cheaper.
    """

    def key(i):
        return (costs[i], i)

    packed = [sorted(members, key=key) for members in packed]
    totals = [sum(costs[i] for i in members) for members in packed]
    for _ in range(ROUNDS):
        dearest = max(range(len(packed)), key=totals.__getitem__)
        found = _best_exchange(packed, totals, costs, dearest)
        if found is None:
            return packed
        other, out, into = found
        packed[dearest] = sorted(
            [i for i in packed[dearest] if i != out] + ([] if into is None else [into]), key=key
        )
        packed[other] = sorted([i for i in packed[other] if i != into] + [out], key=key)
        moved = costs[out] - (0.0 if into is None else costs[into])
        totals[dearest], totals[other] = totals[dearest] - moved, totals[other] + moved
    return packed


def _best_exchange(
    packed: Sequence[Sequence[int]], totals: Sequence[float], costs: Sequence[float], dearest: int
) -> tuple[int, int, int | None] | None:
    """The other microbatch, the sequence that leaves the dearest one, and the one that it gets for
    it, if any.

    Between two microbatches half the difference of their costs should move, so only the sequences
    whose costs are next to the cost that this asks for are tried.
    """
    best, limit = None, totals[dearest] * (1 - 1e-12)
    for other in (n for n in range(len(packed)) if n != dearest):
        members = packed[other]
        half = (totals[dearest] - totals[other]) / 2
        for out in packed[dearest]:
            place = bisect_left(members, costs[out] - half, key=costs.__getitem__)
            near: list[int | None] = list(members[max(0, place - 1) : place + 1])
            for into in [*near, None] if len(packed[dearest]) > 1 else near:
                moved = costs[out] - (0.0 if into is None else costs[into])
                dearer = max(totals[dearest] - moved, totals[other] + moved)
                if dearer < limit:
                    best, limit = (other, out, into), dearer
    return best
