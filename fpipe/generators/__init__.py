# SPDX-License-Identifier: Apache-2.0
"""Schedules by name: one family of generators per file, the catalogue of names, and tools that
compare schedules.

A generator is a pure function of counts. It knows nothing of tensors or processes;
``Schedule.check`` decides whether its result is valid.
"""

from .catalogue import is_path, make_schedule, schedule_from, schedule_names
from .registry import about_schedule, orders_slices, register_schedule, unregister_schedule
from .sources import Source, read_schedule

__all__ = [
    "Source",
    "about_schedule",
    "is_path",
    "make_schedule",
    "orders_slices",
    "read_schedule",
    "register_schedule",
    "schedule_from",
    "schedule_names",
    "unregister_schedule",
]
