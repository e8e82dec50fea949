# SPDX-License-Identifier: Apache-2.0
"""How long the parts of a preparation take: tracing, lowering, handshakes. Knows clocks, no stages
or plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["tracing", "lowering", "handshakes"]


@dataclass(frozen=True)
class Spent:
    """Seconds of each part, and how many traces were taken.

    >>> print(Spent(tracing=1.25, traces=3) + Spent(lowering=0.5))
    tracing 1.25 s (3 traces), lowering 0.50 s, handshakes 0.00 s
    """

    tracing: float = 0.0
    lowering: float = 0.0
    handshakes: float = 0.0
    traces: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.tracing + other.tracing,
            self.lowering + other.lowering,
            self.handshakes + other.handshakes,
            self.traces + other.traces,
        )

    def __str__(self) -> str:
        traces = f"{self.traces} trace{'' if self.traces == 1 else 's'}"
        return (
            f"tracing {self.tracing:.2f} s ({traces}), lowering {self.lowering:.2f} s, "
            f"handshakes {self.handshakes:.2f} s"
        )

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.tracing + self.lowering + self.handshakes


_PARTS: ContextVar[list[Spent] | None] = ContextVar("PARTS", default=None)


@contextmanager
def measured() -> Iterator[list[Spent]]:
    """Collect what is spent inside.

    >>> with measured() as parts, timed("lowering"):
    ...     pass
    >>> [part.traces for part in parts]
    [0]
    """
    parts: list[Spent] = []
    before = _PARTS.set(parts)
    try:
        yield parts
    finally:
        _PARTS.reset(before)
        if (outer := _PARTS.get()) is not None:
            outer += parts


@contextmanager
def timed(part: Part) -> Iterator[None]:
    """Measure a part; one that is in another of its kind counts once."""
    parts = _PARTS.get()
    if parts is None:
        yield
        return
    begin, before = time.perf_counter(), sum(getattr(each, part) for each in parts)
    try:
        yield
    finally:
        inside = sum(getattr(each, part) for each in parts) - before
        seconds = time.perf_counter() - begin - inside
        parts.append(Spent(**{part: seconds}, traces=int(part == "tracing")))
