# SPDX-License-Identifier: Apache-2.0
"""``Action``, ``Slice`` and ``Fused``, the elements of a schedule.

Standard library only; nothing here knows tensors or order.

F   forward of a stage on a microbatch
I   gradient of the stage's input        W   gradient of its parameters        B   both at once
(a;b;...)OVERLAP_F_B    a fused action: its parts run as one, in any order, so they must not need
each other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ..errors import ScheduleError
from .action_kinds import Op

#: Slices of a microbatch where their number is not known, as of an action alone.
MOST_SLICES = 1_000_000


class Slice(int):
    """The number of a slice of a microbatch, counted through the ``of`` slices of every microbatch.

    It is that number, so that slices are compared and counted as microbatches are, and it prints as
    ``3.1``.

    Args:
        microbatch: the number of the microbatch.
        slice: the number of the slice within it.
        of: how many slices each microbatch has.

    Raises:
        ScheduleError: if there is no such slice.

    >>> Slice(3, 1, of=4), Slice(3, 1, of=4) == 13
    (3.1, True)
    """

    of: int

    def __new__(cls, microbatch: int, slice: int, of: int) -> Slice:
        if not 0 <= slice < of:
            raise ScheduleError(
                f"there is no slice {slice} of {of}; slices are counted from 0", rule="slices"
            )
        number = super().__new__(cls, microbatch * of + slice)
        number.of = of
        return number

    @property
    def microbatch(self) -> int:
        """The number of the microbatch."""
        return self // self.of

    @property
    def slice(self) -> int:
        """The number of the slice within the microbatch."""
        return self % self.of

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}"

    __repr__ = __str__

    def __reduce__(self) -> tuple[type[Slice], tuple[int, int, int]]:
        return Slice, (self.microbatch, self.slice, self.of)


def unit(number: int, slices: int) -> int:
    """The unit of work with this number: a microbatch or, where these have slices, a slice of one.

    >>> unit(13, 4), unit(13, 1)
    (3.1, 13)
    """
    return number if slices == 1 else Slice(*divmod(number, slices), slices)


class Action(NamedTuple):
    """One piece of work: ``op`` of ``stage`` on a microbatch, or on a slice of one.

    Args:
        stage: the number of the stage.
        op: ``F`` forward, ``I`` gradient of the input, ``W`` gradients of the parameters, ``B``
            both in one.
        microbatch: the number of the microbatch, or a ``Slice`` of one.

    >>> Action(3, "F", 0), Action(3, "F", Slice(0, 1, of=2))
    (3F0, 3F0.1)
    >>> Action(3, "F", 0).op, Action(3, "F", Slice(7, 1, of=2)).whole
    ('F', 7)
    """

    stage: int
    op: Op
    microbatch: int  #: its number; where microbatches have slices, a ``Slice``

    @property
    def whole(self) -> int:
        """The number of the microbatch, also where it is one of its slices."""
        return self.microbatch.microbatch if isinstance(self.microbatch, Slice) else self.microbatch

    @property
    def slices(self) -> int:
        """The number of slices of each microbatch."""
        return self.microbatch.of if isinstance(self.microbatch, Slice) else 1

    @property
    def slice(self) -> int:
        """The number of the slice within the microbatch; 0 where there are no slices."""
        return self.microbatch.slice if isinstance(self.microbatch, Slice) else 0

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    __repr__ = __str__

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself: plain and fused actions have the same interface."""
        return (self,)


class Fused(NamedTuple):
    """Two or more actions run as one; no part needs what another part provides.

    Args:
        parts: the actions, in the order in which they are printed.

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
