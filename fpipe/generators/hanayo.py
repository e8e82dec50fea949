# SPDX-License-Identifier: Apache-2.0
"""Hanayo: the model in waves, down the ranks and up again, several times.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023 (arXiv:2308.15762). It has the two directions of Chimera in one copy of the model.

With w waves a rank holds 2w chunks. A microbatch crosses the ranks 4w times: in 2w legs forward,
and in 2w legs backward. Let a forward take as long as a backward. Then the even legs of p
microbatches take every other slot of a rank, and the odd legs take the slots between, without a gap
from unit to unit. So a row is two streams in the order of 1F1B, even legs (E) and odd legs (O). One
wave on 3 ranks:

    rank 0   E E E O E O E O E ... O O O        E: F of chunk 0 for a unit, then B of chunk 1
    rank 1   . E E O E O E O E ... O O          O: F of chunk 1 for a unit, then B of chunk 0
    rank 2   . . E O E O E O E ... O

If m is no multiple of p the units are a little larger, which costs no time. For fewer than p
microbatches a unit is made and the last ones are left out. At F = B a rank is idle for
(p - 1)(F + B)/2w. It holds at most p activations, or as many as a unit has microbatches.
"""

from __future__ import annotations

from ..actions.action import Placement
from .chimera import Leg, stream, two_streams
from .patterns import Made, keep_microbatches
from .shapes import even_parts


def make_hanayo(ranks: int, microbatches: int, stages: int) -> Made:
    """Waves down the ranks and up, the memory of 1F1B.

    There are ``stages / ranks / 2`` waves: idle time falls with more of them.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Hanayo", 2, 2, 4))
    [0F0, 0F1, 3F0, 3B0, 3F1, 3B1, 0B0, 0B1]
    [1F0, 2F0, 1F1, 2F1, 2B0, 1B0, 2B1, 1B1]
    """
    made_for = max(microbatches, ranks)
    units = even_parts(range(made_for), made_for // ranks)
    placement = Placement.v(ranks, stages // ranks)
    rows = []
    for rank in range(ranks):
        chunks = placement.stages_of(rank)
        legs: list[Leg] = [(chunk, "F", units) for chunk in chunks]
        legs.extend((chunk, "B", units) for chunk in reversed(chunks))
        count = len(chunks) * made_for
        rows.append(two_streams(ranks - rank, count, stream(legs[::2]), stream(legs[1::2])))
    return keep_microbatches(rows, made_for, range(microbatches)), placement
