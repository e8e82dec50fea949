"""Is a schedule complete, and can it run?  Knows the rules, and nothing of time, memory or tensors."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Placement, Row
from .errors import ScheduleError
from .walk import walk


def check_rows(rows: Sequence[Row], placement: Placement, microbatches: int, *, training: bool = True) -> None:
    """Raise ScheduleError at the first broken rule."""
    result = walk(rows, placement.stages, microbatches)
    if result.blocked:
        first = result.blocked[0]
        raise ScheduleError(
            f"rank {first.rank} waits at position {first.position} for {first.lacks}",
            rank=first.rank,
            position=first.position,
            rule="deadlock",
        )
