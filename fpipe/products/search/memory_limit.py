# SPDX-License-Identifier: Apache-2.0
"""Limits of memory, as numbers or text such as ``"60GB"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import TypeAlias

from ... import Costs, Timeline
from ...errors import ScheduleError
from .problem import ALMOST

Memory: TypeAlias = float | str | Sequence[float | str] | None
#: A number with a digit and one point at most; a prefix; whether that is a power of 1024.
_LIMIT = re.compile(
    r"\s*((?:[0-9]+\.?|[0-9]*\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE
)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = 4  #: bytes of one; a stage that saves less is not measured in bytes


def in_bytes(memory: float | str) -> float:
    """A number, or text with a unit: kB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024.

    >>> in_bytes("60GB"), in_bytes("1.5 GiB"), in_bytes(7)
    (60000000000.0, 1610612736.0, 7.0)
    """
    value = 0.0
    if isinstance(memory, str):
        if match := _LIMIT.fullmatch(memory):
            value = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()]
    elif isinstance(memory, (int, float)) and not isinstance(memory, bool):
        value = float(memory)
    if not value > 0:
        raise ScheduleError(
            f"memory={memory!r} is no limit; give a number above 0, or text such as '60GB'",
            rule="memory",
        )
    return value


def is_within(limit: Sequence[float], timeline: Timeline) -> bool:
    """Whether no rank holds more than its limit."""
    held = zip(timeline.peak_bytes, limit, strict=True)
    return all(peak <= most * ALMOST for peak, most in held)


def limits(memory: Memory, ranks: int, costs: Costs | None = None) -> tuple[float, ...]:
    """One limit for each rank; those with a unit need costs in bytes.

    >>> limits(None, 2), limits(["1kB", 5], 2)
    ((inf, inf), (1000.0, 5.0))
    """
    if memory is None:
        return (inf,) * ranks
    given = [memory] * ranks if isinstance(memory, (str, int, float)) else memory
    values = tuple(map(in_bytes, given))
    if len(values) != ranks:
        raise ScheduleError(
            f"memory has {len(values)} limits, but there are {ranks} ranks; give one, or {ranks}",
            rule="memory",
        )
    if costs and 0 < max(costs.spread("saved", max(costs.counts, default=1))) < _NUMBER:
        for limit in given:
            if isinstance(limit, str) and limit.strip()[-1].isalpha():
                raise ScheduleError(
                    f"memory={limit!r} is in bytes, but saved={costs.saved!r} counts microbatches; "
                    "give costs with saved in bytes, as fpipe.measure_costs does, or a memory "
                    "without a unit",
                    rule="memory",
                )
    return values
