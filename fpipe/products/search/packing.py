# SPDX-License-Identifier: Apache-2.0
"""Packs sequences of different lengths into microbatches that cost alike. Knows numbers alone, no
tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import product
from math import inf

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
    for length, value in zip(lengths, costs, strict=True):
        if not 0 <= value < inf:
            raise BatchError(f"cost({length}) is {value}; a cost is a number of 0 or more")
    # each sequence, the dearest first, joins the cheapest microbatch; none stays empty
    heap = [(0.0, 0, n) for n in range(microbatches)]  # cost, number of sequences, microbatch
    packed: list[list[int]] = [[] for _ in range(microbatches)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        total, members, n = heapq.heappop(heap)
        packed[n].append(index)
        heapq.heappush(heap, (total + costs[index], members + 1, n))
    return sorted(sorted(members) for members in _exchanged(packed, costs))


def _exchanged(packed: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Exchanges between the dearest microbatch and another one, as long as the dearer of both gets
    cheaper.
    """

    def total(members: Sequence[int]) -> float:
        return sum(costs[index] for index in members)

    def evened(dear: Sequence[int], cheap: Sequence[int]) -> tuple[list[int], list[int]]:
        """Both microbatches after the exchange that makes them most alike: a sequence for another
        one, or for none.
        """
        half = (total(dear) - total(cheap)) / 2
        backs: list[tuple[int, ...]] = [(index,) for index in cheap]
        exchanges = list(product(dear, backs))
        if len(dear) > 1:
            exchanges += product(dear, [()])
        out, back = min(exchanges, key=lambda one: abs(half - costs[one[0]] + total(one[1])))
        return (
            [*(index for index in dear if index != out), *back],
            [*(index for index in cheap if index not in back), out],
        )

    for _ in range(ROUNDS):
        packed = sorted(packed, key=total)
        dearest = packed[-1]
        limit = total(dearest) * (1 - 1e-12)
        for at, other in enumerate(packed[:-1]):
            both = evened(dearest, other)
            if max(map(total, both)) < limit:
                packed[-1], packed[at] = both
                break
        else:
            return packed
    return packed
