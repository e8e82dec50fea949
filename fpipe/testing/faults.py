# SPDX-License-Identifier: Apache-2.0
"""Faults as data: what fails in a fake world, and where. This module must not know threads and
tensors.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Delay(NamedTuple):
    """The ``nth`` message (from 0) of a channel arrives so many seconds late, by the clock of the
    world.

    Args:
        src: the rank that sends.
        dst: the rank that receives.
        nth: which message of the channel, from 0.
        seconds: by how much it is late.

    >>> Delay(0, 1, nth=0, seconds=2.0)
    Delay(src=0, dst=1, nth=0, seconds=2.0)
    """

    src: int
    dst: int
    nth: int
    seconds: float


class Drop(NamedTuple):
    """The ``nth`` message of a channel never arrives.

    Args:
        src: the rank that sends.
        dst: the rank that receives.
        nth: which message of the channel, from 0.

    >>> Drop(0, 1, nth=3)
    Drop(src=0, dst=1, nth=3)
    """

    src: int
    dst: int
    nth: int


class Kill(NamedTuple):
    """A rank ends before its ``before``-th call of the group (from 0), without an error report.

    Args:
        rank: the rank that ends.
        before: which of its calls, from 0, it does not make.

    >>> Kill(1, before=0)
    Kill(rank=1, before=0)
    """

    rank: int
    before: int


class Refuse(NamedTuple):
    """An operation raises UnsupportedError, on one rank or on all.

    Args:
        operation: ``"send"``, ``"recv"``, ``"share"``, ``"all_reduce"`` and others.
        rank: the only rank that refuses; by default all do.

    >>> Refuse("share")
    Refuse(operation='share', rank=None)
    """

    operation: str
    rank: int | None = None


Fault: TypeAlias = Delay | Drop | Kill | Refuse
