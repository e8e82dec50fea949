"""Faults to order, as data: what goes wrong in a fake world, and where. Knows no threads and no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Delay:
    """The ``nth`` message (from 0) of a channel arrives so many seconds late, in the world's own time."""

    src: int
    dst: int
    nth: int
    seconds: float


@dataclass(frozen=True)
class Drop:
    """The ``nth`` message of a channel never arrives."""

    src: int
    dst: int
    nth: int


@dataclass(frozen=True)
class Kill:
    """A rank is gone before its ``before``-th call of the group (from 0), without a word."""

    rank: int
    before: int


@dataclass(frozen=True)
class Refuse:
    """An operation raises UnsupportedError, on one rank or on all: "send", "recv", "share", "all_reduce", ..."""

    operation: str
    rank: int | None = None


Order: TypeAlias = Delay | Drop | Kill | Refuse
