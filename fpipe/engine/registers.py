# SPDX-License-Identifier: Apache-2.0
"""``Registers``: everything that changes while one rank runs its plan. Knows no plan, program or
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..collectives.group import Work


@dataclass(slots=True, eq=False)
class Registers:
    """The state of a run on one rank."""

    slots: list[Any]
    seed: int | None = None  # of random draws; None: draws come from the device's stream as it is
    receives: dict[tuple[int, int], Work] = field(
        default_factory=dict
    )  # by (sender, number), until awaited
    collectives: dict[int, Sequence[Work]] = field(
        default_factory=dict
    )  # of all copies, by number, until awaited
    streams: dict[tuple[int, str, str], torch.Tensor] = field(
        default_factory=dict
    )  # random states between segments
    each: Callable[[int, list[Any]], object] | None = (
        None  # receives a microbatch's outputs at EACH
    )
    send_loss: Callable[[], torch.Tensor] | None = None  # called at LOSS
    loss: torch.Tensor | None = None  # what it returned

    @classmethod
    def empty(cls, slots: int, seed: int | None) -> Registers:
        """As many empty slots, and nothing under way."""
        return cls([None] * slots, seed)

    def copy(self) -> Registers:
        """The same values; a run changes only the copy."""
        return replace(
            self,
            slots=list(self.slots),
            receives=dict(self.receives),
            collectives=dict(self.collectives),
            streams=dict(self.streams),
        )
