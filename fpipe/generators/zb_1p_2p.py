# SPDX-License-Identifier: Apache-2.0
"""ZB-1p and ZB-2p: the passes of 1F1B, and W wherever a rank would wait.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), section 3. ZB-2p on 4 ranks:

    rank 0   F F F F F F F I F I W F I W F I W F I W ...
    rank 1   . F F F F F I F I F I W F I W F I W ...
    rank 2   . . F F F I F I F I F I F I W F I W ...
    rank 3   . . . F I F I F I F I F I F I F I W ...

ZB-1p warms up as 1F1B does and holds p activations, ZB-2p as its eager form and holds 2p.

``fpipe.solve`` finds schedules for measured costs and any memory, also with several stages a rank.
"""

from __future__ import annotations

from ..actions.action import plain
from ..schedule import Schedule
from .greedy import split_backwards
from .one_f_one_b import one_forward_one_backward
from .shapes import one_a_rank


def make_zb_1p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-1p: the memory of 1F1B.

    >>> make_zb_1p(4, 8, 4).simulate().span
    27.0
    """
    return _made("ZB1P", ranks, microbatches, stages, 1)


def make_zb_2p(ranks: int, microbatches: int, stages: int) -> Schedule:
    """ZB-2p: twice that, and no idle time within a rank's span if there are enough microbatches.

    >>> make_zb_2p(4, 8, 4).simulate().span
    24.0
    """
    return _made("ZB2P", ranks, microbatches, stages, 2)


def _made(name: str, ranks: int, microbatches: int, stages: int, step: int) -> Schedule:
    """A warm-up that is shorter by ``step`` forwards from rank to rank, within ``step * ranks``."""
    warm_ups = [1 + step * (ranks - 1 - rank) for rank in range(ranks)]
    patterns = [one_forward_one_backward(microbatches, warm_up) for warm_up in warm_ups]
    split = split_backwards(one_a_rank(name, patterns, microbatches, ranks), step * ranks)
    assert split is not None, "the warm-up fits in the memory"
    patterns = ["".join(action.op for action in plain(row)) for row in split]
    return one_a_rank(name, patterns, microbatches, stages)
