# SPDX-License-Identifier: Apache-2.0
"""Schedules over slices of sequences: 1F1B and ZB-H1 whose units are slices.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", 2024 (arXiv:2406.03488).

A microbatch is cut into k slices of its sequence, and slices run as microbatches do elsewhere:

    rank 0   F0.0 F0.1 F1.0 F1.1 .... .... B0.1 ...        p = 3, k = 2
    rank 1   .... F0.0 F0.1 F1.0 .... B0.1 F1.1 B0.0 ...
    rank 2   .... .... F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 ...

The state of a sequence, such as the keys and values of causal attention, goes from each slice to
the next one on the same rank. So the backward of the last slice is the first that can run. The last
rank begins with k forwards, and rank r with p - r + k - 1.

Idle (p - 1)(F + B)/k on each rank, which holds (p - r + k - 1)/k activations of a whole microbatch.
With one slice this is 1F1B.

The form with I and W in place of B follows ZB-H1: idle (p - 1)(F + I - W)/k for the same
activations.
"""

from __future__ import annotations

from ..schedule import Schedule
from .one_f_one_b import one_forward_one_backward
from .shapes import one_chunk_a_rank
from .zero_bubble import zero_bubble


def make_seq_one_f_one_b(ranks: int, microbatches: int, stages: int, slices: int = 1) -> Schedule:
    """1F1B over slices of sequences; backwards run from the last slice.

    >>> print(make_seq_one_f_one_b(2, 2, 2, slices=2))
    [0F0.0, 0F0.1, 0F1.0, 0B0.1, 0F1.1, 0B0.0, 0B1.1, 0B1.0]
    [1F0.0, 1F0.1, 1B0.1, 1F1.0, 1B0.0, 1F1.1, 1B1.1, 1B1.0]
    """
    warm_ups = [ranks - rank + slices - 1 for rank in range(ranks)]
    patterns = [one_forward_one_backward(microbatches * slices, warm_up) for warm_up in warm_ups]
    return one_chunk_a_rank("Seq1F1B", patterns, microbatches, stages, slices)


def make_seq_zb_h1(ranks: int, microbatches: int, stages: int, slices: int = 1) -> Schedule:
    """ZB-H1 over slices of sequences; backwards run from the last slice.

    >>> print(make_seq_zb_h1(2, 1, 2, slices=2))
    [0F0.0, 0F0.1, 0I0.1, 0W0.1, 0I0.0, 0W0.0]
    [1F0.0, 1F0.1, 1I0.1, 1I0.0, 1W0.1, 1W0.0]
    """
    warm_ups = [ranks - rank + slices - 1 for rank in range(ranks)]
    patterns = [
        zero_bubble(microbatches * slices, warm_up, rank) for rank, warm_up in enumerate(warm_ups)
    ]
    return one_chunk_a_rank("SeqZBH1", patterns, microbatches, stages, slices)
