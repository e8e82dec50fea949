# SPDX-License-Identifier: Apache-2.0
"""A schedule that is still to be chosen: what ``fpipe.auto`` returns, as a pipeline sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ..collectives.group import Group
from ..schedule import Schedule


@runtime_checkable
class Choice(Protocol):
    """A schedule that is still to be chosen, as ``fpipe.auto`` returns."""

    def bound_to(self, group: Group, stages: int, microbatches: int | None) -> Chosen:
        """What chooses it for a pipeline."""
        ...


@runtime_checkable
class Chosen(Protocol):
    """What chooses the schedule of a pipeline. ``chosen`` is by number of microbatches: the
    schedule, and why.
    """

    chosen: dict[int, tuple[Schedule, str]]

    def __call__(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule to run."""
        ...

    def estimated(
        self,
        microbatches: int,
        plans_of: Callable[[Schedule], Any],
        run: Schedule,
        latency: float,
    ) -> Schedule:
        """Choose from what the programs of all stages are expected to take."""
        ...
