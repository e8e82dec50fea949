# SPDX-License-Identifier: Apache-2.0
"""Chimera: two pipelines in opposite directions, each in the gaps of the other.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021 (arXiv:2107.06925).

Every stage is on two ranks. Half of the microbatches go down the ranks and half go up; p of them
make a unit. Two units for 4 ranks, with capitals for the direction that enters at the nearer end:

    rank 0   F F f b f b B F B F f b f b B B
    rank 1   F f F f b B b F B f F f b B b B
    rank 2   as rank 1 }
    rank 3   as rank 0 }  with both directions changed

The last backwards of a unit lie among the first forwards of the next one.

Let a forward take as long as a backward. Then microbatch i of a unit goes down through stage s at
time s + 2i and comes back at 2p - 1 - s + 2i. Those that go up run at times of the other parity. So
a row is two streams, one for each parity: F of the unit and then b; f of the unit and then B.

If m is no multiple of p the units are a little larger, which costs no time. For fewer than p
microbatches a unit is made and the last ones are left out. At F = B a rank is idle for p - 2
passes. It holds from p/2 + 1 activations (the outermost rank) to p.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeAlias

from ..actions.action import Action, Row
from ..actions.action_kinds import Op
from .patterns import Made, actions
from .shapes import even_parts, two_directions

#: A crossing of the ranks by one stage's op: stage, op, and the microbatches of each unit.
Leg: TypeAlias = tuple[int, Op, Sequence[range]]


def make_chimera(ranks: int, microbatches: int, stages: int) -> Made:
    """Two pipelines of 1F1B in opposite directions.

    Every stage is on two ranks: less idle time than 1F1B with up to twice as many microbatches
    as ranks. Of an odd count of microbatches one more goes down than up.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("Chimera", 2, 2, 2))
    [0F0, 1F1, 1B1, 0B0]
    [0F1, 1F0, 1B0, 0B1]
    """

    def row(near: int, far: int, first: range, second: range) -> Row:
        units = max(1, min(len(first), len(second)) // (ranks // 2))
        nearer = even_parts(first, units)
        other = even_parts(second, units)
        even: list[Leg] = [(near, "F", nearer), (far, "B", other)]
        odd: list[Leg] = [(far, "F", other), (near, "B", nearer)]
        count = len(first) + len(second)
        return two_streams((far + 1 - near) // 2, count, stream(even), stream(odd))

    return two_directions("Chimera", ranks, microbatches, row, ranks // 2)


def stream(legs: Iterable[Leg]) -> Iterator[Action]:
    """The actions of all legs for the first unit, then for the next one.

    >>> list(stream([(0, "F", [range(0, 2), range(2, 3)]), (3, "B", [range(0, 2), range(2, 3)])]))
    [0F0, 0F1, 3B0, 3B1, 0F2, 3B2]
    """
    parts = [[actions(stage, op, unit) for unit in units] for stage, op, units in legs]
    return (action for unit in zip(*parts, strict=True) for leg in unit for action in leg)


def two_streams(lead: int, count: int, even: Iterator[Action], odd: Iterator[Action]) -> Row:
    """Two streams of ``count`` actions in the order of 1F1B.

    The row begins with ``lead`` actions of ``even``. Then actions of both alternate.

    >>> two_streams(1, 2, actions(0, "F", range(2)), actions(0, "B", range(2)))
    (0F0, 0B0, 0F1, 0B1)
    """
    order = chain(repeat(even, lead), *repeat((odd, even), count - lead), repeat(odd, lead))
    return tuple(map(next, order))
