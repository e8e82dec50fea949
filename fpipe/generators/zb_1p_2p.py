# SPDX-License-Identifier: Apache-2.0
"""ZB-1p and ZB-2p: F and I in the order of 1F1B, and W where a rank would wait.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), section 3. ZB-2p on 4 ranks:

    rank 0   F F F F F F F I F I W F I W F I W F I W ...
    rank 1   . F F F F F I F I F I W F I W F I W ...
    rank 2   . . F F F I F I F I F I F I W F I W ...
    rank 3   . . . F I F I F I F I F I F I F I W ...

ZB-1p warms up as 1F1B and holds p activations. ZB-2p warms up as the eager form and holds 2p.

``fpipe.solve`` finds schedules for measured costs and any memory, also with several stages a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from .one_f_one_b import patterns
from .patterns import Made
from .shapes import one_chunk_a_rank


def make_zb_1p(ranks: int, microbatches: int, stages: int) -> Made:
    """As ZBH1, with weight gradients where a rank waits.

    Its time and memory are those of ZBH1.

    >>> from fpipe import make_schedule
    >>> make_schedule("ZB1P", 4, 8, 4).simulate().span
    27.0
    """
    return _made(ranks, microbatches, stages, 1)


def make_zb_2p(ranks: int, microbatches: int, stages: int) -> Made:
    """As ZBH2, with weight gradients where a rank waits.

    For twice the memory of 1F1B. With enough microbatches no rank is idle within its span.

    >>> from fpipe import make_schedule
    >>> make_schedule("ZB2P", 4, 8, 4).simulate().span
    24.0
    """
    return _made(ranks, microbatches, stages, 2)


def _made(ranks: int, microbatches: int, stages: int, step: int) -> Made:
    """The rows of ranks that hold at most ``step * ranks`` activations."""
    split = split_backwards(patterns(ranks, microbatches, step), step * ranks)
    return one_chunk_a_rank(split, microbatches, stages)


def split_backwards(whole: Sequence[str], limit: int) -> list[str]:
    """The patterns of ranks with I in place of B, and W where a rank would wait or lack memory.

    Each pass takes one slot, and a rank holds at most ``limit`` activations from F to W.

    >>> split_backwards(["FFBB", "FBFB"], 2)
    ['FFIWIW', 'FIFIWW']
    """
    left = [list(pattern.replace("B", "I"))[::-1] for pattern in whole]
    done = [{"F": 0, "I": 0, "W": 0} for _ in whole]
    rows = ["" for _ in whole]
    while any(left):
        before = [dict(counts) for counts in done]
        for rank, counts in enumerate(before):
            op = left[rank][-1] if left[rank] else "W"
            source = rank - 1 if op == "F" else rank + 1
            arrived = not 0 <= source < len(before) or before[source][op] > counts[op]
            held = counts["F"] - counts["W"] + (op == "F")
            if op != "W" and arrived and held <= limit:
                left[rank].pop()
            elif counts["I"] > counts["W"]:
                op = "W"
            else:
                continue
            rows[rank] += op
            done[rank][op] += 1
    return [row + "W" * (d["I"] - d["W"]) for row, d in zip(rows, done, strict=True)]
