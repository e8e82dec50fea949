# SPDX-License-Identifier: Apache-2.0
"""From what a schedule can be made: how one is read from a file, or made by a function of a
user.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from ..actions import Track
from ..actions.text import parse_csv, parse_rows
from ..errors import ScheduleError
from ..schedule import Schedule, read_text
from .refusals import no_source, refuse_name

T = TypeVar("T")

#: The names of the catalogue, for completion in editors; a registered name is any text.
Name: TypeAlias = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "ZBV",
    "DualPipeV",
    "Eager1F1B",
    "Overlapped1F1B",
    "ZBH1",
    "ZBH2",
    "ZB1P",
    "ZB2P",
    "VHalf",
    "VMin",
    "DualPipe",
    "Chimera",
    "Hanayo",
    "Seq1F1B",
    "SeqZBH1",
    "auto",
]
#: A schedule, a name, the path of a CSV file, or a function from ranks and microbatches to a
#: schedule.
ScheduleSource: TypeAlias = Name | str | PathLike[str] | Schedule | Callable[[int, int], Schedule]


def read_schedule(path: str | PathLike[str], track: Track = iter) -> Schedule:
    """The schedule in a text file: CSV, or the text of ``str(schedule)``.

    ``track`` yields the lines, and may show how many were read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plan.txt")
    >>> _ = file.write_text("[0F0, 0B0]")
    >>> read_schedule(file)
    Schedule(plan, ranks=1, microbatches=1, stages=1)
    """
    return schedule_in(read_text(path), Path(path).stem, track)


def schedule_in(text: str, name: str, track: Track = iter) -> Schedule:
    """The schedule in a text: CSV, or the text of ``str(schedule)``.

    >>> schedule_in("[0F0, 0B0]", "plan")
    Schedule(plan, ranks=1, microbatches=1, stages=1)
    """
    parse = parse_rows if text[:4096].lstrip(" \t\r\n").startswith("[") else parse_csv
    return Schedule(parse(text, track), name=name)


def make_registered(
    name: str,
    make: Callable[..., Schedule],
    ranks: int,
    microbatches: int,
    stages: int | None,
    slices: int,
) -> Schedule:
    """The schedule of a registered function; ScheduleError if it is for other counts."""
    who = f"the function registered as {name!r}"
    keywords = {"stages": stages} if _takes_stages(make) else {}
    schedule = returned(called(make, ranks, microbatches, **keywords), who)
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        if number not in (None, getattr(schedule, what)):
            raise ScheduleError(
                f"{who} was called for {what}={number} and returned a schedule with "
                f"{getattr(schedule, what)}; request that number, or correct the function",
                rule=what,
            )
    return schedule if schedule.slices == slices else schedule.sliced(slices)


def called(fn: Callable[..., T], *counts: int, **keywords: object) -> T:
    """The result of a function for schedules; ScheduleError where it takes other arguments."""
    uncalled = inspect.isfunction(fn) and fn.__module__ == "fpipe.products.search.auto"
    if isinstance(fn, type) or uncalled:
        raise no_source(fn)
    try:
        inspect.signature(fn).bind(*counts, **keywords)
    except TypeError as error:
        raise refuse_name(
            f"the schedule function {fn!r} cannot be called with (ranks, microbatches): {error}; "
            "give a function of these two"
        ) from error
    except ValueError:  # a callable without a signature
        pass
    return fn(*counts, **keywords)


def returned(result: object, who: str) -> Schedule:
    """The Schedule that a function of the user returned; ScheduleError for anything else."""
    if not isinstance(result, Schedule):
        raise refuse_name(
            f"{who} returned a {type(result).__name__}; it must return an fpipe.Schedule"
        )
    return result


def _takes_stages(fn: Callable[..., Schedule]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return "stages" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
