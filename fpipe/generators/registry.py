# SPDX-License-Identifier: Apache-2.0
"""Facts about schedules by name, and the registration of further names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TypeVar, overload

from ..schedule import Schedule
from .catalogue import ENTRIES, Entry, key
from .refusals import refuse_name

Maker = TypeVar("Maker", bound=Callable[..., Schedule])


def about_schedule(name: str) -> str:
    """One line about a schedule: the first paragraph of the docstring of its function.

    >>> about_schedule("GPipe")
    'All forwards, then all backwards.'
    """
    summary = (inspect.getdoc(ENTRIES[key(name)].make) or "").partition("\n\n")[0]
    return " ".join(summary.split())


def orders_slices(name: str) -> bool:
    """Whether a schedule has an order of its own for slices of sequences.

    >>> orders_slices("Seq1F1B"), orders_slices("1F1B")
    (True, False)
    """
    return key(name) in ENTRIES and ENTRIES[key(name)].orders_slices


@overload
def register_schedule(name: str, fn: Maker) -> Maker: ...
@overload
def register_schedule(name: str) -> Callable[[Maker], Maker]: ...
def register_schedule(name: str, fn: Maker | None = None) -> Maker | Callable[[Maker], Maker]:
    """Register ``fn(ranks, microbatches) -> Schedule`` under ``name`` for :func:`make_schedule`.

    Args:
        name: of the schedule. A registered name is replaced, a built-in one is refused.
        fn: a function of ranks and microbatches. It may also take ``stages=``, which is the
            requested number or None.

    Returns:
        ``fn``; without ``fn`` a decorator.

    Raises:
        ScheduleError: if the name is built in, or ``fn`` is no function.

    >>> @register_schedule("OneByOne")
    ... def one_by_one(ranks, microbatches):
    ...     return make_schedule("GPipe", ranks, microbatches)
    >>> from fpipe import make_schedule
    >>> make_schedule("onebyone", 2, 3).microbatches
    3
    >>> _ = ENTRIES.pop("onebyone")
    """
    if fn is None:
        return partial(register_schedule, name)
    if not isinstance(name, str) or not key(name):
        raise refuse_name(f"a schedule cannot be called {name!r}; use letters or digits")
    present = ENTRIES.get(key(name))
    if present and not callable(present.generator):
        raise refuse_name(
            f"{name!r} is built in (as {present.name}) and is not replaced; register another name"
        )
    if not callable(fn):
        raise refuse_name(
            f"{name!r} needs a function (ranks, microbatches) -> Schedule, not {fn!r}; a Schedule "
            "needs no name, it can be passed wherever a name can"
        )
    ENTRIES[key(name)] = Entry(name, fn)
    return fn
