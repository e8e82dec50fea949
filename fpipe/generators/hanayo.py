# SPDX-License-Identifier: Apache-2.0
"""Hanayo: the model in waves, down the ranks and up again, several times.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", 2023 (arXiv:2308.15762): Chimera's two directions in one copy of the model. With w
waves a rank holds 2w chunks, and a microbatch crosses the ranks 4w times: 2w legs forward and 2w
more, of the same zigzag, backward. With a forward as long as a backward, the even legs of p
microbatches take every other slot of a rank and the odd legs those between, without a gap from unit
to unit. So a row is two streams, even legs (E) and odd legs (O), in the order of 1F1B; for 3 ranks:

    rank 0   E E E O E O E O E ... O O O        one wave: E is F of chunk 0 for a unit, then B of
    chunk 1 rank 1   . E E O E O E O E ... O O                    O is F of chunk 1 for a unit, then
    B of chunk 0 rank 2   . . E O E O E O E ... O

Where m is no multiple of p the units are a little larger, which costs no time; for fewer than p
microbatches a unit is drawn and the last ones are left out. At F = B a rank idles for (p - 1)(F +
B)/2w; it holds at most p activations, or as many as a unit has microbatches.
"""

from __future__ import annotations

from ..actions.action import Placement
from ..schedule import Schedule
from .chimera import Leg, stream, two_streams
from .patterns import keep
from .shapes import evenly


def make_hanayo(ranks: int, microbatches: int, stages: int) -> Schedule:
    """Hanayo, with ``stages / ranks / 2`` waves.

    >>> print(make_hanayo(2, 2, 4))
    [0F0, 0F1, 3F0, 3B0, 3F1, 3B1, 0B0, 0B1]
    [1F0, 2F0, 1F1, 2F1, 2B0, 1B0, 2B1, 1B1]
    """
    drawn = max(microbatches, ranks)
    units = evenly(range(drawn), drawn // ranks)
    placement = Placement.v(ranks, stages // ranks)
    rows = []
    for rank in range(ranks):
        held = placement.stages_of(rank)
        legs: list[Leg] = [
            *((s, "F", units) for s in held),
            *((s, "B", units) for s in reversed(held)),
        ]
        rows.append(
            two_streams(ranks - rank, len(held) * drawn, stream(legs[::2]), stream(legs[1::2]))
        )
    return Schedule(keep(rows, drawn, range(microbatches)), placement, microbatches, "Hanayo")
