# SPDX-License-Identifier: Apache-2.0
"""Errors about names and other sources of schedules, and about counts for which a schedule has no
form.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial

from ..actions.text import counted
from ..errors import ScheduleError

refuse_name = partial(ScheduleError, rule="name")


def unknown_name(name: object, known: Mapping[str, str]) -> ScheduleError:
    """The error for an unknown name. ``known`` maps the keys of the known names to the names."""
    # a class of torch.distributed.pipelining, such as Schedule1F1B
    short = str(name).lower().removeprefix("schedule")
    remedy = f"there are {', '.join(known.values())}"
    if short[:1] == "[":
        remedy = "fpipe.Schedule.parse(text) makes a schedule of rows"
    close = [short] if short in known else difflib.get_close_matches(short, known, cutoff=0.5)
    if close:
        remedy = f"did you mean {' or '.join(known[near] for near in close)}?"
    return refuse_name(f"no schedule is called {name!r}; {remedy}")


def no_source(source: object) -> ScheduleError:
    """The error for a value that describes no schedule."""
    if isinstance(source, type):
        name = source.__name__.removeprefix("Schedule")
        return refuse_name(
            f"schedule={source.__name__} is a class; give the name of a schedule, such as {name!r}"
        )
    if callable(source):
        return refuse_name("schedule=fpipe.auto is a function to be called; give fpipe.auto()")
    return refuse_name(
        f"schedule={source!r}; give a name, a Schedule, a path to a CSV or a function (ranks, "
        "microbatches)"
    )


def wrong_count(what: str, value: object) -> ScheduleError:
    """The error for a value that is no number of ranks, microbatches, stages or slices."""
    return ScheduleError(
        f"{what}={value!r}, but there must be a whole number of {what}, 1 or more", rule=what
    )


def wrong_stages(name: str, ranks: int, stages: int, only: int, step: int) -> ScheduleError:
    """The error for a number of stages that a schedule cannot place.

    The schedule takes ``only`` stages or, if that is 0, a multiple of ``step`` for each rank.
    """
    if only:
        return ScheduleError(
            f"{name} takes {only} stages on {counted(ranks, 'rank')}, not {stages}; give "
            f"stages={only}, and a pipeline {only} functions, or other ranks, as in "
            "group=fpipe.local(4)",
            rule="stages",
        )
    unit = ranks * step
    below = stages // unit * unit
    fits = f"{below} or {below + unit}" if below else f"{unit}"
    return ScheduleError(
        f"{name} takes a multiple of {unit} stages on {counted(ranks, 'rank')}, not {stages}; give "
        f"stages={fits}, and a pipeline as many functions, or other ranks",
        rule="stages",
    )


def too_large(stages: int, microbatches: int, slices: int, most: int) -> ScheduleError:
    """The error for a schedule with more than ``most`` forwards and backwards."""
    of_slices = f" of {slices} slices" if slices > 1 else ""
    actions = 2 * stages * microbatches * slices
    return ScheduleError(
        f"{stages} stages and {microbatches} microbatches{of_slices} are {actions:,} forwards and "
        f"backwards; at most {most:,} are allowed, which take gigabytes. Give fewer ranks or "
        "microbatches",
        rule="size",
    )
