# SPDX-License-Identifier: Apache-2.0
"""``Action`` and ``Fused``, the elements of a schedule; ``Span``, ``Wait`` and ``Carried``, those of a timeline.

Standard library only; nothing here knows tensors or order.

F   forward of a stage on a microbatch
I   gradient of the stage's input        W   gradient of its parameters        B   both at once
(a;b;...)OVERLAP_F_B    a fused action: its parts run as one, in any order, so they must not need each other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

Op: TypeAlias = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work: ``op`` of ``stage`` on ``microbatch``.

    >>> Action(3, "F", 0)
    3F0
    >>> Action(3, "F", 0).op
    'F'
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    __repr__ = __str__

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself: plain and fused actions have the same interface."""
        return (self,)


class Fused(NamedTuple):
    """Two or more actions run as one; no part needs what another part provides.

    >>> Fused((Action(0, "F", 1), Action(3, "B", 0)))
    (0F1;3B0)OVERLAP_F_B
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "(" + ";".join(map(str, self.parts)) + ")OVERLAP_F_B"

    __repr__ = __str__


AnyAction: TypeAlias = Action | Fused
Row: TypeAlias = tuple[AnyAction, ...]


def joined(parts: Sequence[Action]) -> AnyAction:
    """The action with these parts: a lone part itself, several of them fused.

    >>> joined([Action(0, "F", 1)]), joined([Action(0, "F", 1), Action(3, "B", 0)])
    (0F1, (0F1;3B0)OVERLAP_F_B)
    """
    return parts[0] if len(parts) == 1 else Fused(tuple(parts))


def plain(row: Iterable[AnyAction]) -> Iterator[Action]:
    """The actions of a row in order, with each fused one replaced by its parts.

    >>> list(plain([Fused((Action(0, "F", 1), Action(1, "B", 0))), Action(0, "B", 1)]))
    [0F1, 1B0, 0B1]
    """
    for action in row:
        yield from action.parts


class Span(NamedTuple):
    """One action on one rank, from ``start`` to ``end``; ``position`` is its index in the rank's row."""

    rank: int
    position: int
    action: AnyAction
    start: float
    end: float


class Wait(NamedTuple):
    """What an action waited for: its rank and position, and how long the waiting rank was idle."""

    rank: int
    position: int
    time: float


class Carried(NamedTuple):
    """What a rank's link carries beside its computing, as predicted for a woven action."""

    start: float
    end: float
    what: str
