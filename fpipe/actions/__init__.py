# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: actions, the rule of dependence, text, checks, costs, simulation, timelines.

The value itself is ``fpipe.schedule.Schedule``. Nothing here imports torch. What is exported here
is for all of the package. Other names are for this folder, ``schedule`` and ``lowering``.
"""

from .action import Action, AnyAction, Placement, Row, unfused
from .action_kinds import KINDS, OPS, Op
from .costs import Costs, Per, as_costs
from .dependencies import uncollected
from .product import load_pass
from .progress_line import Track, progress
from .text import counted, number, readable
from .text_files import read_bytes, write_bytes
from .timeline import Timeline, Wait

__all__ = [
    "KINDS",
    "OPS",
    "Action",
    "AnyAction",
    "Costs",
    "Op",
    "Per",
    "Placement",
    "Row",
    "Timeline",
    "Track",
    "Wait",
    "as_costs",
    "counted",
    "load_pass",
    "number",
    "progress",
    "read_bytes",
    "readable",
    "uncollected",
    "unfused",
    "write_bytes",
]
