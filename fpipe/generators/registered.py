# SPDX-License-Identifier: Apache-2.0
"""Schedules of functions that users registered, and the errors for unknown names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from ..errors import ScheduleError
from ..schedule import Schedule

T = TypeVar("T")
refuse_name = partial(ScheduleError, rule="name")


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
    if schedule.slices == slices:
        return schedule
    return schedule.sliced(slices)


def called(fn: Callable[..., T], *counts: int, **keywords: object) -> T:
    """The result of a function for schedules; ScheduleError where it takes other arguments."""
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


def unknown_name(name: object, known: Mapping[str, str]) -> ScheduleError:
    """The error for an unknown name. ``known`` maps the keys of the known names to the names."""
    close = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    remedy = f"there are {', '.join(known.values())}"
    if close:
        remedy = f"did you mean {' or '.join(known[near] for near in close)}?"
    return refuse_name(f"no schedule is called {name!r}; {remedy}")


def no_source(source: object) -> ScheduleError:
    """The error for a value that describes no schedule."""
    return refuse_name(
        f"schedule={source!r}; give a name, a Schedule, a path to a CSV or a function (ranks, "
        "microbatches)"
    )


def _takes_stages(fn: Callable[..., Schedule]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return "stages" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
