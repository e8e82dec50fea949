# SPDX-License-Identifier: Apache-2.0
"""1F1B: a rank runs one backward for each forward as soon as it can, and so holds few activations.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021
(arXiv:2006.09503); Fan et al., "DAPPLE", 2021 (arXiv:2007.01045).

    rank 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 ...      warm-up: p - r forwards
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 ...      then B, F, B, F
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 ...      then the backwards that are left

Idle (p - 1)(F + B) on each rank, as in GPipe. Rank r holds p - r activations.

The eager form warms up with 2(p - r) - 1 forwards ("Eager 1F1B": Zhuang et al., "On Optimizing the
Communication of Model Parallelism", 2022, arXiv:2211.05322). It has the same idle time and about
twice the activations, and a message has the time of a forward and a backward to arrive.

The overlapped form warms up as the eager one. It fuses each further forward with a backward that
does not need it, so that the communication of one can run beside the computation of the other:

    rank 0   F0 F1 F2 .. .. F3B0 F4B1 F5B2 B3 ...
    rank 1   .. F0 .. F1B0 F2B1 F3B2 ...

When its first backward ends, the last rank has run one more forward than in 1F1B, and the rank
before it two more.

The form over slices of sequences: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline
Parallelism", 2024 (arXiv:2406.03488). A microbatch is cut into k slices of its sequence, and slices
run as microbatches do elsewhere:

    rank 0   F0.0 F0.1 F1.0 F1.1 .... .... B0.1 ...        p = 3, k = 2
    rank 1   .... F0.0 F0.1 F1.0 .... B0.1 F1.1 B0.0 ...
    rank 2   .... .... F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 ...

The state of a sequence, such as the keys and values of causal attention, goes from each slice to
the next one on the same rank. So the backward of the last slice is the first that can run. The last
rank begins with k forwards, and rank r with p - r + k - 1.

Idle (p - 1)(F + B)/k on each rank, which holds (p - r + k - 1)/k activations of a whole microbatch.
With one slice this is 1F1B.
"""

from __future__ import annotations

from ..actions.action import Placement, Row
from .patterns import Made, actions, fused
from .shapes import one_chunk_a_rank


def make_one_f_one_b(ranks: int, microbatches: int, stages: int) -> Made:
    """One forward, one backward in turn.

    Before them a forward for each rank from this one to the last; a rank holds at most as many
    microbatches.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("1F1B", 2, 3, 2))
    [0F0, 0F1, 0B0, 0F2, 0B1, 0B2]
    [1F0, 1B0, 1F1, 1B1, 1F2, 1B2]
    """
    return one_chunk_a_rank(patterns(ranks, microbatches, 1), microbatches, stages)


def make_eager_one_f_one_b(ranks: int, microbatches: int, stages: int) -> Made:
    """1F1B with more forwards ahead, to hide messages.

    Up to twice as many as in 1F1B.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Eager1F1B", 2, 4, 2))
    [0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3]
    [1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3, 1B3]
    """
    return one_chunk_a_rank(patterns(ranks, microbatches, 2), microbatches, stages)


def make_seq_one_f_one_b(ranks: int, microbatches: int, stages: int, slices: int = 1) -> Made:
    """1F1B over slices of sequences.

    Backwards run from the last slice.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Seq1F1B", 2, 2, 2, slices=2))
    [0F0.0, 0F0.1, 0F1.0, 0B0.1, 0F1.1, 0B0.0, 0B1.1, 0B1.0]
    [1F0.0, 1F0.1, 1B0.1, 1F1.0, 1B0.0, 1F1.1, 1B1.1, 1B1.0]
    """
    rows = patterns(ranks, microbatches * slices, 1, slices)
    return one_chunk_a_rank(rows, microbatches, stages, slices)


def make_overlapped_one_f_one_b(ranks: int, microbatches: int, stages: int) -> Made:
    """1F1B whose forwards and backwards run as one.

    Before them up to twice as many forwards as in 1F1B.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Overlapped1F1B", 2, 4, 2))
    [0F0, 0F1, 0F2, (0F3;0B0)OVERLAP_F_B, 0B1, 0B2, 0B3]
    [1F0, (1F1;1B0)OVERLAP_F_B, (1F2;1B1)OVERLAP_F_B, (1F3;1B2)OVERLAP_F_B, 1B3]
    """
    rows: list[Row] = []
    for rank, pattern in enumerate(patterns(ranks, microbatches, 2)):
        forwards = actions(rank, "F", range(microbatches))
        backwards = actions(rank, "B", range(microbatches))
        tapes = {"F": forwards, "B": backwards, "X": fused(forwards, backwards)}
        rows.append(tuple([next(tapes[letter]) for letter in pattern.replace("BF", "X")]))
    return rows, Placement.loop(ranks)


def patterns(ranks: int, microbatches: int, step: int, last: int = 1) -> list[str]:
    """Those of ranks of which the last one runs ``last`` forwards first, and each one before it
    ``step`` more.

    >>> patterns(2, 3, step=1)
    ['FFBFBB', 'FBFBFB']
    """
    warm_ups = [step * after + last for after in reversed(range(ranks))]
    return [one_forward_one_backward(microbatches, warm_up) for warm_up in warm_ups]


def one_forward_one_backward(microbatches: int, warm_up: int) -> str:
    """The pattern of a rank that runs B, F, B, F, ... after its first forwards.

    >>> one_forward_one_backward(4, warm_up=2)
    'FFBFBFBB'
    """
    first = min(microbatches, warm_up)
    return "F" * first + "BF" * (microbatches - first) + "B" * first
