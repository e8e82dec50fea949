# SPDX-License-Identifier: Apache-2.0
"""BitPipe: the two directions of Chimera, each a V of several chunks on a rank.

Wu, Chen and Yu, "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large
Models Training", 2024 (arXiv:2410.19367).

With v chunks a rank, a microbatch crosses the ranks v times forward and v times backward, in turns
down and up. Half of the microbatches begin at the other end. Every stage is on two ranks. The
published unit has 4 ranks and v = 2. Microbatches 1 and 2 go down, 3 and 4 up; small letters are
the second chunk of a rank:

    rank 0   F1 F2 F3 f3 F4 f4 f1 b1 f2 b2 b3 B3 b4 B4 B1 B2
    rank 1   F1 F3 F2 F4 f3 f1 f4 f2 b1 b3 b2 b4 B3 B1 B4 B2
    rank 2   as rank 1 }
    rank 3   as rank 0 }  with both directions changed

In each crossing the p/2 microbatches of one direction take every other slot of a rank, as in
Hanayo. Those of the other direction take the slots between. So a row is again two streams. On rank
0 these are

    F1 F2 f3 f4 b1 b2 B3 B4      and      F3 F4 f1 f2 b3 b4 B1 B2

At p microbatches the bubble is (p - 2)/(2vm + p - 2) for F = B. For v = 2 and B = 2F it is
(p - 2)/(3m + p - 2), as published.

Units follow each other as in the published drawing of two: a forward of the next unit comes before
the last backwards of this one. With F = B that keeps the bubble for any m. With B = 2F each unit
after the first adds p - 3 forwards of a chunk, as in the drawing.

A rank holds from p - (p/2 - 1)/v activations (the outermost rank) to p. The gradients of both ranks
of a stage are summed at the end, as in Chimera.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions.action import Placement, Row
from ..schedule import Schedule
from .chimera import Leg, stream, two_directions
from .patterns import row_of


def make_bitpipe(ranks: int, microbatches: int, stages: int) -> Schedule:
    """BitPipe; every stage on two ranks. Of an odd count of microbatches one more goes down than
    up.

    >>> print(make_bitpipe(2, 2, 4))
    [0F0, 1F1, 2F1, 3F0, 3B0, 2B1, 1B1, 0B0]
    [0F1, 1F0, 2F0, 3F1, 3B1, 2B0, 1B0, 0B1]
    """
    placement = Placement.v(ranks, stages // ranks)

    def row(near: int, far: int, first: Sequence[range], second: Sequence[range]) -> Row:
        nearer = _legs(placement.stages_of(near), first)
        other = _legs(placement.stages_of(far), second)
        return _row(ranks // 2 - near, nearer, other)

    return two_directions("BitPipe", ranks, microbatches, stages, row)


def _legs(chunks: Sequence[int], units: Sequence[range]) -> list[Leg]:
    """The legs of a direction on a rank: forwards from its first chunk, backwards from its last."""
    return [
        *((stage, "F", units) for stage in chunks),
        *((stage, "B", units) for stage in reversed(chunks)),
    ]


def _row(lead: int, near: list[Leg], far: list[Leg]) -> Row:
    """The row of a rank from the legs of both directions, that which enters nearer to it first."""
    pairs = list(zip(near, far, strict=True))
    even = [pair[k % 2] for k, pair in enumerate(pairs)]
    odd = [pair[(k + 1) % 2] for k, pair in enumerate(pairs)]
    units = range(len(near[0][2]))
    lengths = [sum(len(microbatches[unit]) for _, _, microbatches in even) for unit in units]
    last = len(lengths) - 1
    pattern = "E" * lead
    for unit, length in enumerate(lengths):
        pattern += "OE" * (length - lead)
        pattern += "O" * lead if unit == last else "OE" + "EO" * (lead - 1)
    return row_of(pattern, {"E": stream(even), "O": stream(odd)})
