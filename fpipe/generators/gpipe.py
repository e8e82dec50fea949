# SPDX-License-Identifier: Apache-2.0
"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019
(arXiv:1811.06965).

    rank 0   0 1 2 3 . . . . . . 0 0 1 1 2 2 3 3
    rank 1   . 0 1 2 3 . . . 0 0 1 1 2 2 3 3          a forward takes one place, a backward two
    rank 2   . . 0 1 2 3 0 0 1 1 2 2 3 3

Idle (p - 1)(F + B) on each rank. A rank holds the activations of all m microbatches.
"""

from __future__ import annotations

from .patterns import Made
from .shapes import one_chunk_a_rank


def make_gpipe(ranks: int, microbatches: int, stages: int) -> Made:
    """All forwards, then all backwards.

    Both are in ascending order of microbatches.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("GPipe", 2, 2, 2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1F1, 1B0, 1B1]
    """
    pattern = "F" * microbatches + "B" * microbatches
    return one_chunk_a_rank([pattern] * ranks, microbatches, stages)
