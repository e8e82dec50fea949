# SPDX-License-Identifier: Apache-2.0
"""Several chunks of the model on each rank, in a loop: stage s is on rank s % p.

**Interleaved 1F1B.** Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", 2021 (arXiv:2104.04473). Microbatches run in groups of g, about p each.
A group runs through the first chunk, then through the next one. Its backwards begin with the last
chunk. For v = 2 and p = 2, with capitals for the first chunk and small letters for the second:

    rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 ...
    rank 1   .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 ...

A rank warms up with 2(p - r - 1) + (v - 1) g forwards, runs F, B, F, B, ..., and then the backwards
that are left. Idle (p - 1)(F + B)/v on each rank, which holds p + (p - 1)/v activations.

**Looped BFS.** Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023 (arXiv:2211.05953). All
microbatches run through a chunk, then through the next one. Backwards run in the opposite order.

    rank 0   F0 F1 f0 f1 b1 b0 B1 B0

The idle time is the same, and a rank holds m activations. The parameters of a chunk are needed only
twice, which suits sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..actions.action import Placement
from ..actions.action_kinds import Op
from .one_f_one_b import one_forward_one_backward
from .patterns import Made, Tape, rows_of
from .shapes import even_parts

_Order: TypeAlias = Sequence[tuple[int, int]]  #: of (chunk, microbatch)


def by_groups(
    pattern: Callable[[int, int, int], str],
    ranks: int,
    microbatches: int,
    stages: int,
) -> Made:
    """Rows of microbatches in groups, each of which runs through every chunk.

    Each group has ``ranks`` microbatches or a little more. Backwards begin with the last chunk.
    ``pattern(rank, total, ahead)`` is the pattern of a rank with ``total`` forwards, of which
    ``ahead`` come before the last chunk of the first group.

    >>> by_groups(lambda rank, total, ahead: "F" * total + "B" * total, 1, 2, 2)
    ([(0F0, 1F0, 0F1, 1F1, 1B0, 0B0, 1B1, 0B1)], Placement(0: [0, 1]))
    """
    chunks = stages // ranks
    parts = even_parts(range(microbatches), max(1, microbatches // ranks))
    order = [(chunk, m) for part in parts for chunk in range(chunks) for m in part]
    back = [(chunks - 1 - chunk, m) for chunk, m in order]
    ahead = (chunks - 1) * len(parts[0])
    patterns = [pattern(rank, len(order), ahead) for rank in range(ranks)]
    return _looped(patterns, order, back, microbatches)


def _looped(
    patterns: Sequence[str],
    order: _Order,
    back: _Order,
    microbatches: int,
) -> Made:
    """The rows of patterns, with forwards in ``order`` and backwards in the order ``back``."""
    ranks = len(patterns)
    orders: dict[Op, _Order] = {"F": order, "B": back, "I": back, "W": back}

    def tapes(rank: int) -> dict[str, Tape]:
        return {
            op: ([chunk * ranks + rank for chunk, _ in units], op, [m for _, m in units])
            for op, units in orders.items()
        }

    rows = rows_of([(pattern, tapes(rank)) for rank, pattern in enumerate(patterns)])
    chunks = len(order) // microbatches
    return rows, Placement.loop(ranks, chunks)


def make_interleaved_one_f_one_b(ranks: int, microbatches: int, stages: int) -> Made:
    """1F1B over several stages a rank: less idle time.

    For any number of microbatches; with more microbatches than ranks it takes more memory.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Interleaved1F1B", 2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2B0, 2B1, 0B0, 0B1]
    [1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1]
    """

    def pattern(rank, total, ahead):
        return one_forward_one_backward(total, 2 * (ranks - rank) - 1 + ahead)

    return by_groups(pattern, ranks, microbatches, stages)


def make_looped_bfs(ranks: int, microbatches: int, stages: int) -> Made:
    """All microbatches through one chunk after another.

    Breadth first, and back in reverse.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("LoopedBFS", 2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2B1, 2B0, 0B1, 0B0]
    [1F0, 1F1, 3F0, 3F1, 3B1, 3B0, 1B1, 1B0]
    """
    order = [(chunk, m) for chunk in range(stages // ranks) for m in range(microbatches)]
    patterns = ["F" * len(order) + "B" * len(order)] * ranks
    return _looped(patterns, order, order[::-1], microbatches)
