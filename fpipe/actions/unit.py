# SPDX-License-Identifier: Apache-2.0
"""Numbers of slices of microbatches."""

from __future__ import annotations

from ..errors import ScheduleError, checked


@checked
class Slice(int):
    """The number of a slice of a microbatch, counted through the ``of`` slices of every microbatch.

    It is an integer, so slices are compared and counted as microbatches are. It prints as ``3.1``.

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
    if slices == 1:
        return number
    return Slice(*divmod(number, slices), slices)
