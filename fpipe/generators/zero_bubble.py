# SPDX-License-Identifier: Apache-2.0
"""Zero bubble: a backward in two parts, I and W. Nothing waits for W, so it fills idle time.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241).

ZB-H1 keeps the memory of 1F1B. A rank runs p - r forwards first, then I, W, F, I, W, F, .... On
rank r the Ws are r microbatches behind the Is:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 ...
    rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 ...      idle (p - 1)(F + I - W)
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 ...

ZB-H2 warms up with 2(p - r) - 1 forwards, and its Ws are 2r behind. At unit cost a rank is not idle
between its first action and its last. It holds 2p - 1 activations.

The interleaved form does the same with several chunks on each rank, in the order of Interleaved
1F1B. It warms up with (p - r) + (v - 1) g forwards, since I is half as long as B.

The form over slices of sequences warms up as Seq1F1B: idle (p - 1)(F + I - W)/k with k slices, for
the same activations.
"""

from __future__ import annotations

from .interleaved import by_groups
from .patterns import Made
from .shapes import one_chunk_a_rank


def make_zb_h1(ranks: int, microbatches: int, stages: int) -> Made:
    """The memory of 1F1B, and a third of its idle time.

    At equal F, I and W; weight gradients are a fixed number of microbatches late.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("ZBH1", 2, 3, 2))
    [0F0, 0F1, 0I0, 0W0, 0F2, 0I1, 0W1, 0I2, 0W2]
    [1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2]
    """
    return _made(ranks, microbatches, stages, 1)


def make_zb_h2(ranks: int, microbatches: int, stages: int) -> Made:
    """Zero bubble for up to twice the memory of 1F1B.

    At equal F, I and W and twice as many microbatches as ranks no rank is idle within its span.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("ZBH2", 2, 3, 2))
    [0F0, 0F1, 0F2, 0I0, 0W0, 0I1, 0W1, 0I2, 0W2]
    [1F0, 1I0, 1F1, 1I1, 1F2, 1I2, 1W0, 1W1, 1W2]
    """
    return _made(ranks, microbatches, stages, 2)


def make_seq_zb_h1(ranks: int, microbatches: int, stages: int, slices: int = 1) -> Made:
    """ZBH1 over slices of sequences.

    Backwards run from the last slice.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("SeqZBH1", 2, 1, 2, slices=2))
    [0F0.0, 0F0.1, 0I0.1, 0W0.1, 0I0.0, 0W0.0]
    [1F0.0, 1F0.1, 1I0.1, 1I0.0, 1W0.1, 1W0.0]
    """
    return _made(ranks, microbatches, stages, 1, slices)


def _made(ranks: int, microbatches: int, stages: int, step: int, slices: int = 1) -> Made:
    """Each rank warms up with ``step`` forwards fewer than the rank before it, and its Ws are as
    many further behind.
    """
    patterns = [
        zero_bubble(microbatches * slices, step * (ranks - 1 - rank) + slices, lag=step * rank)
        for rank in range(ranks)
    ]
    return one_chunk_a_rank(patterns, microbatches, stages, slices)


def zero_bubble(microbatches: int, warm_up: int, lag: int) -> str:
    """The pattern of a rank that runs I, W, F, I, W, F, ... after its first forwards.

    The first ``lag`` Ws are left out there and run at the end of the row.

    >>> zero_bubble(3, warm_up=2, lag=1)
    'FFIFIWIWW'
    """
    first = min(microbatches, warm_up)
    pattern = "F" * first
    for backward in range(microbatches):
        pattern += "I" + "W" * (backward >= lag) + "F" * (backward < microbatches - first)
    return pattern + "W" * min(lag, microbatches)


def make_interleaved_zero_bubble(ranks: int, microbatches: int, stages: int) -> Made:
    """ZBH1 over several stages a rank: less idle time.

    For about the memory of ZBH1.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("InterleavedZeroBubble", 2, 2, 4))
    [0F0, 0F1, 2F0, 2F1, 2I0, 2W0, 2I1, 2W1, 0I0, 0W0, 0I1, 0W1]
    [1F0, 1F1, 3F0, 3I0, 3F1, 3I1, 3W0, 1I0, 3W1, 1I1, 1W0, 1W1]
    """

    def pattern(rank, total, ahead):
        return zero_bubble(total, ranks - rank + ahead, lag=rank)

    return by_groups(pattern, ranks, microbatches, stages)
