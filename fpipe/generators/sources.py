# SPDX-License-Identifier: Apache-2.0
"""How a name, a file, a function or a ``Schedule`` becomes a ``Schedule``: the one place with that rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from ..errors import ScheduleError
from ..schedule import Schedule, read_text
from ..schedules.text import parse_csv
from .catalogue import is_known, make_schedule

Source: TypeAlias = str | PathLike[str] | Schedule | Callable[[int, int], Schedule]


def schedule_from(source: Source, ranks: int, microbatches: int, stages: int | None = None) -> Schedule:
    """The schedule that ``source`` describes; not yet checked.

    ``source`` is a name for :func:`make_schedule`, the path of a file (see :func:`is_path`), a function
    ``(ranks, microbatches) -> Schedule``, or a Schedule, which is returned as it is. A name is made with these counts,
    and a function is called with them. A file and a Schedule have their own counts, and a function may return others:
    the caller compares them with what it needs.

    >>> schedule_from("1F1B", ranks=2, microbatches=3)
    Schedule(1F1B, ranks=2, microbatches=3, stages=2)
    >>> schedule_from(lambda ranks, microbatches: make_schedule("ZBV", ranks, microbatches), 2, 3).stages
    4
    """
    if isinstance(source, Schedule):
        return source
    if isinstance(source, PathLike) or (isinstance(source, str) and is_path(source)):
        return read_schedule(source)
    if isinstance(source, str):
        return make_schedule(source, ranks, microbatches, stages)
    if not callable(source):
        raise ScheduleError(
            f"schedule={source!r}; give a name, a Schedule, a path to a CSV or a function (ranks, microbatches)",
            rule="name",
        )
    schedule = source(ranks, microbatches)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"the schedule function returned a {type(schedule).__name__}; it must return an fpipe.Schedule", rule="name"
        )
    return schedule


def is_path(source: str) -> bool:
    """Whether :func:`schedule_from` reads ``source`` as a path: it ends in .csv or .txt, contains a separator of
    folders, or is an existing file whose name is no schedule's.

    >>> is_path("plan.csv"), is_path("1F1B")
    (True, False)
    """
    if Path(source).suffix.lower() in (".csv", ".txt") or os.sep in source:
        return True
    return os.path.isfile(source) and not is_known(source)


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """The schedule in a text file, written as CSV or as ``str(schedule)`` writes it.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plan.txt")
    >>> _ = file.write_text("[0F0, 0B0]")
    >>> read_schedule(file)
    Schedule(plan, ranks=1, microbatches=1, stages=1)
    """
    text = read_text(path)
    if text[:4096].lstrip(" \t\r\n").startswith("["):
        return Schedule.parse(text, name=Path(path).stem)
    return Schedule(parse_csv(text), name=Path(path).stem)
