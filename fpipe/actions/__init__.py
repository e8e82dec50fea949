# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: actions, the rule of dependence, text, checks, costs, simulation, timelines.

The value itself is ``fpipe.schedule.Schedule``. Nothing here imports torch. What is exported here
is for all of the package. Other names are for this folder, ``schedule`` and ``lowering``.
"""

from .action import Action, AnyAction, Fused, Placement, Row, joined, plain
from .action_kinds import KINDS, OPS, Kind, Op
from .costs import Beside, Costs, PerStage, as_costs
from .dependencies import uncollected
from .progress_line import progress
from .text import counted, number
from .text_files import read_bytes, write_bytes
from .timeline import Carried, Span, Timeline, Wait
from .unit import Slice, unit

__all__ = [
    "KINDS",
    "OPS",
    "Action",
    "AnyAction",
    "Beside",
    "Carried",
    "Costs",
    "Fused",
    "Kind",
    "Op",
    "PerStage",
    "Placement",
    "Row",
    "Slice",
    "Span",
    "Timeline",
    "Wait",
    "as_costs",
    "counted",
    "joined",
    "number",
    "plain",
    "progress",
    "read_bytes",
    "uncollected",
    "unit",
    "write_bytes",
]
