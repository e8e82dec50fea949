# SPDX-License-Identifier: Apache-2.0
"""The elements of a timeline: an action with its times, what it waited for, what a link carries."""

from __future__ import annotations

from typing import NamedTuple

from .actions import AnyAction


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
