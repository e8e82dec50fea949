# SPDX-License-Identifier: Apache-2.0
"""Schedules by name: a file for each family of generators, and the catalogue of names.

A generator is a pure function of counts. It knows nothing of tensors or processes;
``Schedule.check`` decides whether its result is valid.

The docstrings of the generators use these letters: p ranks, of which r is one; m microbatches; v
stages on each rank, which are its chunks; and F, B, I and W for the times of these actions. "Idle
(p - 1)(F + B)" is the time in which a rank waits during a step. An activation is what one stage
keeps of one microbatch, from its F to its W or B.
"""

from .catalogue import is_path, make_schedule, schedule_from, schedule_names
from .registry import about_schedule, orders_slices, register_schedule
from .sources import ScheduleSource, read_schedule, schedule_in

__all__ = [
    "ScheduleSource",
    "about_schedule",
    "is_path",
    "make_schedule",
    "orders_slices",
    "read_schedule",
    "register_schedule",
    "schedule_from",
    "schedule_in",
    "schedule_names",
]
