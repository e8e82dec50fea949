# SPDX-License-Identifier: Apache-2.0
"""Faults as data: what fails in a fake world, and where. This module must not know threads and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Delay:
    """The ``nth`` message (from 0) of a channel arrives so many seconds late, by the clock of the world."""

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
    """A rank ends before its ``before``-th call of the group (from 0), without an error report."""

    rank: int
    before: int


@dataclass(frozen=True)
class Refuse:
    """An operation raises UnsupportedError, on one rank or on all: "send", "recv", "share", "all_reduce", ..."""

    operation: str
    rank: int | None = None


Fault: TypeAlias = Delay | Drop | Kill | Refuse
