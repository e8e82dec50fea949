# SPDX-License-Identifier: Apache-2.0
"""Several chunks of the model on each rank, dealt in a loop: stage s on rank s % p.

Interleaved 1F1B: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", 2021 (arXiv:2104.04473). Microbatches go in groups of about p: the first chunk
for the whole group, then the next chunk; backwards take the chunks from the last. For v = 2 and p =
2 (capitals the first chunk, small ones the second):

    rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 ...        warm-up: 2(p - r - 1) + (v - 1) g
    forwards rank 1   .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 ...        then F, B, F, B, then the
    backwards that are left

Idle (p - 1)(F + B)/v a rank; p + (p - 1)/v activations.

Looped BFS: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023 (arXiv:2211.05953). All
microbatches of a chunk, then the next chunk, and the way back in exactly the opposite order. The
same idle time, m activations; a chunk's parameters are needed only twice, which suits sharded ones.

    rank 0   F0 F1 f0 f1 b1 b0 B1 B0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..actions.action import Placement, Row
from ..actions.action_kinds import Op
from ..schedule import Schedule
from .one_f_one_b import one_forward_one_backward
from .patterns import deal, tape
from .shapes import evenly

_Order: TypeAlias = Sequence[tuple[int, int]]  #: of (chunk, microbatch)


def by_groups(
    name: str,
    pattern: Callable[[int, int, int], str],
    ranks: int,
    microbatches: int,
    stages: int,
    groups: int = 0,
) -> Schedule:
    """Microbatches in even groups, by default of ``ranks`` or a little more: each group through
    every chunk, backwards from the last.

    ``pattern(rank, total, ahead)`` is a rank's row of ``total`` forwards; the first group has
    ``ahead`` of them before its last chunk.

    >>> print(by_groups("GPipe", lambda rank, total, ahead: "F" * total + "B" * total, 2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2B0, 2B1, 0B0, 0B1]
    [1F0, 1F1, 3F0, 3F1, 3B0, 3B1, 1B0, 1B1]
    """
    chunks = stages // ranks
    parts = evenly(range(microbatches), groups or max(1, microbatches // ranks))
    order = [(c, m) for part in parts for c in range(chunks) for m in part]
    back = [(chunks - 1 - c, m) for c, m in order]
    ahead = (chunks - 1) * len(parts[0])
    rows = [
        _row(pattern(rank, len(order), ahead), rank, ranks, order, back) for rank in range(ranks)
    ]
    return Schedule(tuple(rows), Placement.loop(ranks, chunks), microbatches, name)


def _row(pattern: str, rank: int, ranks: int, order: _Order, back: _Order) -> Row:
    """A rank's row: forwards in one order of (chunk, microbatch), backwards in another."""
    orders: dict[Op, _Order] = {"F": order, "B": back, "I": back, "W": back}
    tapes = {
        op: tape([c * ranks + rank for c, _ in o], op, [m for _, m in o])
        for op, o in orders.items()
    }
    return deal(pattern, tapes)


def make_interleaved_one_f_one_b(ranks: int, microbatches: int, stages: int) -> Schedule:
    """Interleaved 1F1B, for any number of microbatches.

    >>> print(make_interleaved_one_f_one_b(2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2B0, 2B1, 0B0, 0B1]
    [1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1]
    """

    def pattern(rank, total, ahead):
        return one_forward_one_backward(total, 2 * (ranks - rank) - 1 + ahead)

    return by_groups("Interleaved1F1B", pattern, ranks, microbatches, stages)


def make_looped_bfs(ranks: int, microbatches: int, stages: int) -> Schedule:
    """Breadth first: chunk by chunk down, and back the way it came.

    >>> print(make_looped_bfs(2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2B1, 2B0, 0B1, 0B0]
    [1F0, 1F1, 3F0, 3F1, 3B1, 3B0, 1B1, 1B0]
    """
    chunks = stages // ranks
    order = [(c, m) for c in range(chunks) for m in range(microbatches)]
    pattern = "F" * len(order) + "B" * len(order)
    rows = [_row(pattern, rank, ranks, order, order[::-1]) for rank in range(ranks)]
    return Schedule(tuple(rows), Placement.loop(ranks, chunks), microbatches, "LoopedBFS")
