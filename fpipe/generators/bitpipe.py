# SPDX-License-Identifier: Apache-2.0
"""BitPipe: Chimera's two directions, each a V of several chunks a rank.

Wu, Chen and Yu, "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large
Models Training", 2024 (arXiv:2410.19367). With v chunks a rank a microbatch crosses the ranks v
times forward and v times backward, in turns down and up, and half of the microbatches begin at the
other end. Every stage is on two ranks. As in Hanayo the p/2 microbatches of one direction take
every other slot of a rank in each crossing, and those of the other direction the slots between, or
the slots after: so a row is again two streams. The published unit, 4 ranks, v = 2, microbatches 1
and 2 down and 3 and 4 up; small letters are a rank's second chunk:

    rank 0   F1 F2 F3 f3 F4 f4 f1 b1 f2 b2 b3 B3 b4 B4 B1 B2         F1 F2 f3 f4 b1 b2 B3 B4  and
    rank 1   F1 F3 F2 F4 f3 f1 f4 f2 b1 b3 b2 b4 B3 B1 B4 B2         F3 F4 f1 f2 b3 b4 B1 B2  on
    rank 0 rank 2   as rank 1 }
    rank 3   as rank 0 }  with both directions changed

At p microbatches the bubble is (p - 2)/(3m + p - 2) for v = 2 and backwards of twice a forward, as
published, and (p - 2)/(2vm + p - 2) at F = B. Further units follow as in the published drawing of
two: a forward of the next unit comes before the last backwards of this one. That keeps (p - 2)/(2vm
    + p - 2) for any m; with longer backwards a unit
has gaps (at B = 2F each unit after the first adds p - 3 forwards of a chunk, in the drawing too). A
rank holds p - (p/2 - 1)/v (the outermost) to p activations. Copies of a stage are summed at the
end, as those of Chimera.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions.action import Placement, Row
from ..schedule import Schedule
from .chimera import Leg, stream, two_directions
from .patterns import deal


def make_bitpipe(ranks: int, microbatches: int, stages: int) -> Schedule:
    """BitPipe; every stage on two ranks. Of an odd count of microbatches one more goes down than
    up.

    >>> print(make_bitpipe(2, 2, 4))
    [0F0, 1F1, 2F1, 3F0, 3B0, 2B1, 1B1, 0B0]
    [0F1, 1F0, 2F0, 3F1, 3B1, 2B0, 1B0, 0B1]
    """
    held = Placement.v(ranks, stages // ranks)

    def row(near: int, far: int, first: Sequence[range], second: Sequence[range]) -> Row:
        nearer = _legs(held.stages_of(near), first)
        other = _legs(held.stages_of(far), second)
        return _row(ranks // 2 - near, nearer, other)

    return two_directions("BitPipe", ranks, microbatches, stages, row)


def _legs(chunks: Sequence[int], units: Sequence[range]) -> list[Leg]:
    """The crossings of one direction on a rank: forward from its first chunk, backward from its
    last.
    """
    return [
        *((stage, "F", units) for stage in chunks),
        *((stage, "B", units) for stage in reversed(chunks)),
    ]


def _row(lead: int, near: list[Leg], far: list[Leg]) -> Row:
    """The row of a rank from the crossings of the direction that enters nearer to it and of the
    other.
    """
    both = list(zip(near, far, strict=True))
    even, odd = ([pair[(k + turn) % 2] for k, pair in enumerate(both)] for turn in (0, 1))
    lengths = [sum(len(leg[2][unit]) for leg in even) for unit in range(len(near[0][2]))]
    last = len(lengths) - 1
    pattern = "E" * lead
    for unit, length in enumerate(lengths):
        pattern += "OE" * (length - lead) + (
            "O" * lead if unit == last else "OE" + "EO" * (lead - 1)
        )
    return deal(pattern, {"E": stream(even), "O": stream(odd)})
