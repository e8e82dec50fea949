# SPDX-License-Identifier: Apache-2.0
"""How long preparations took, by part. ``cache`` measures."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["tracing", "lowering", "handshakes"]


@dataclass(frozen=True)
class Spent:
    """Seconds of each part of a preparation, and how many traces were taken.

    >>> print(Spent(tracing=1.25, traces=3) + Spent(lowering=0.5))
    tracing 1.25 s (3 traces), lowering 0.50 s, handshakes 0.00 s
    """

    tracing: float = 0.0
    lowering: float = 0.0
    handshakes: float = 0.0
    traces: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(add, astuple(self), astuple(other)))

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
