# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of a pipeline. Knows its configuration; no plan and no call."""

from __future__ import annotations

from collections.abc import Callable

from ...actions.costs import Costs
from ...engine.config import Chosen, Config
from ...schedule import Schedule
from .. import pictures
from ..search.comparison import per_share


def shown(config: Config, schedule: Callable[[int], Schedule]) -> str:
    """What it is built from, and a picture of its schedule if the number of microbatches is
    known.
    """
    rows = [
        ("pipeline", repr(config)),
        ("stages of this process", ", ".join(map(str, config.here))),
        ("placement", repr(config.placement)),
        ("microbatches", config.microbatches or "by the call"),
        ("loss", getattr(config.loss, "__name__", config.loss)),
        ("reduction", config.reduction),
    ]
    picture = ""
    if config.microbatches is not None and not isinstance(config.schedule, Chosen):
        found = schedule(config.microbatches)
        picture = pictures.figure(found.simulate(per_share(Costs(), found)))
    return pictures.table(["", ""], rows) + picture
