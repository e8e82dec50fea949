# SPDX-License-Identifier: Apache-2.0
"""ZBV: zero bubble on a V, with the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), section 6. The model goes
down the ranks and up again, so rank 0 holds the first chunk (capitals) and the last one (small
letters). Three ranks, six microbatches:

    rank 0   F F F F F f i w f i w f i w F I W f i w I W f i w I W f i w I W I W I W
    rank 1   F F F f F f i w f i w F I W f i w F I W f i w I W f i w I i I W I W w W
    rank 2   F f F f F f i w F I W f i w F I W f i w F I W f i w I i I i I W w w W W

At unit cost no rank is idle between its first action and its last. A rank holds p activations. The
rows are made for at least 2p - 1 microbatches. For fewer, the last microbatches are left out.
"""

from __future__ import annotations

from ..actions.action import Placement
from .patterns import Made, keep_microbatches, two_chunks


def make_zbv(ranks: int, microbatches: int, stages: int) -> Made:
    """Zero bubble on a V, for the memory of 1F1B.

    Also called ZBV. At equal F, I and W and twice as many microbatches as ranks no rank is idle
    within its span.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("ZBVZeroBubble", 1, 2, 2))
    [0F0, 1F0, 1I0, 1W0, 0F1, 0I0, 0W0, 1F1, 1I1, 1W1, 0I1, 0W1]
    """
    made_for = max(2 * ranks - 1, microbatches)
    rows = two_chunks([_pattern(ranks, rank, made_for) for rank in range(ranks)], made_for)
    return keep_microbatches(rows, made_for, range(microbatches)), Placement.v(ranks)


def _pattern(p: int, r: int, m: int) -> str:
    """The row of rank ``r`` of ``p``; small letters are the second stage of the rank. The further
    down, the later it begins, and the fewer F of the first stage come before the steady state.
    """
    warm_up = "F" * (2 * (p - r) - 1) + "fF" * r + "fiw" * (p - r)
    steady = "FIWfiw" * (m - 2 * p + 1 + r) + "IWfiw" * (p - 1 - r)
    return warm_up + steady + "Ii" * r + "IW" * (p - r) + "w" * r + "W" * r
