# SPDX-License-Identifier: Apache-2.0
"""The catalogue: which schedules have a name, which counts each accepts, and the names that users register.

A new schedule is one function and one row in ``TABLE`` or, for users, one call of :func:`register_schedule`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple, TypeVar, overload

from ..errors import ScheduleError
from ..schedule import Schedule
from .automatic import make_zb_1p, make_zb_2p
from .chimera import make_chimera
from .dualpipe import make_dual_pipe, make_dual_pipe_v
from .gpipe import make_gpipe
from .hanayo import make_hanayo
from .interleaved import make_interleaved_one_f_one_b, make_looped_bfs
from .one_f_one_b import make_eager_one_f_one_b, make_one_f_one_b, make_overlapped_one_f_one_b
from .v_family import make_v_half, make_v_min
from .zbv import make_zbv
from .zero_bubble import make_interleaved_zero_bubble, make_zb_h1, make_zb_h2

Maker = TypeVar("Maker", bound=Callable[..., Schedule])


class _Entry(NamedTuple):
    """A built-in schedule: its generator, and how many stages it places on a rank."""

    name: str
    make: Callable[[int, int, int], Schedule]
    per_rank: int = 1  #: by default
    step: int = 1  #: any multiple of this
    exactly: bool = False  #: or no other number than the default


TABLE = (
    _Entry("GPipe", make_gpipe),
    _Entry("1F1B", make_one_f_one_b),
    _Entry("Interleaved1F1B", make_interleaved_one_f_one_b, 2),
    _Entry("LoopedBFS", make_looped_bfs, 2),
    _Entry("InterleavedZeroBubble", make_interleaved_zero_bubble, 2),
    _Entry("ZBVZeroBubble", make_zbv, 2, exactly=True),
    _Entry("DualPipeV", make_dual_pipe_v, 2, exactly=True),
    _Entry("Eager1F1B", make_eager_one_f_one_b),
    _Entry("Overlapped1F1B", make_overlapped_one_f_one_b, exactly=True),
    _Entry("ZBH1", make_zb_h1),
    _Entry("ZBH2", make_zb_h2),
    _Entry("ZB1P", make_zb_1p),
    _Entry("ZB2P", make_zb_2p),
    _Entry("VHalf", make_v_half, 2, exactly=True),
    _Entry("VMin", make_v_min, 2, exactly=True),
    _Entry("DualPipe", make_dual_pipe, 1, exactly=True),
    _Entry("Chimera", make_chimera, 1, exactly=True),
    _Entry("Hanayo", make_hanayo, 2, step=2),
)
#: Forwards and backwards of the largest schedule: it takes some gigabytes.
MOST_ACTIONS = 1 << 24
_ALSO = {"ZBV": "ZBVZeroBubble"}


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


_BUILT_IN = {_key(entry.name): entry for entry in TABLE}
_BUILT_IN.update({_key(other): _BUILT_IN[_key(name)] for other, name in _ALSO.items()})
_REGISTERED: dict[str, tuple[str, Callable[..., Schedule]]] = {}


def schedule_names() -> tuple[str, ...]:
    """The names that :func:`make_schedule` knows, built-in ones first.

    >>> schedule_names()[:3]
    ('GPipe', '1F1B', 'Interleaved1F1B')
    """
    return (*(entry.name for entry in TABLE), *(name for name, _ in _REGISTERED.values()))


def is_known(name: str) -> bool:
    """Whether :func:`make_schedule` knows this name.

    >>> is_known("zbv"), is_known("plan.csv")
    (True, False)
    """
    return _key(name) in _BUILT_IN or _key(name) in _REGISTERED


def about_schedule(name: str) -> str:
    """One line on a schedule: the first of its function's docstring, "" where it has none.

    >>> about_schedule("GPipe")
    'All forwards, then all backwards, both in ascending order.'
    """
    if not is_known(name):
        raise ScheduleError(_unknown(name), rule="name")
    key = _key(name)
    make = _BUILT_IN[key].make if key in _BUILT_IN else _REGISTERED[key][1]
    return (inspect.getdoc(make) or "").partition("\n")[0]


def make_schedule(name: str, ranks: int, microbatches: int, stages: int | None = None) -> Schedule:
    """The schedule called ``name`` for these counts; case, blanks, ``-`` and ``_`` in the name do not matter.

    ``stages`` counts them in all. Left out, it is what the schedule's placement needs: one a rank, or two.

    >>> print(make_schedule("1F1B", ranks=2, microbatches=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    >>> make_schedule("interleaved1f1b", 4, 8, stages=12).placement
    Placement(0: [0, 4, 8], 1: [1, 5, 9], 2: [2, 6, 10], 3: [3, 7, 11])
    """
    ranks, microbatches = _count("ranks", ranks), _count("microbatches", microbatches)
    stages = None if stages is None else _count("stages", stages)
    key = _key(name) if isinstance(name, str) else ""
    if key in _BUILT_IN:
        entry = _BUILT_IN[key]
        count = _stages(entry, ranks, stages)
        _check_size(max(count, ranks), microbatches)
        return entry.make(ranks, microbatches, count)
    if key in _REGISTERED:
        return _registered(*_REGISTERED[key], ranks, microbatches, stages)
    raise ScheduleError(_unknown(name), rule="name")


def _check_size(stages: int, microbatches: int) -> None:
    """Refuse a schedule that would not fit in memory."""
    if 2 * stages * microbatches > MOST_ACTIONS:
        raise ScheduleError(
            f"{stages} stages and {microbatches} microbatches are {2 * stages * microbatches:,} forwards and "
            f"backwards; at most {MOST_ACTIONS:,} are allowed, which take gigabytes. Give fewer ranks or microbatches",
            rule="size",
        )


@overload
def register_schedule(name: str, fn: Maker) -> Maker: ...
@overload
def register_schedule(name: str) -> Callable[[Maker], Maker]: ...
def register_schedule(name: str, fn: Maker | None = None) -> Maker | Callable[[Maker], Maker]:
    """Register ``fn(ranks, microbatches) -> Schedule`` under ``name`` for :func:`make_schedule`; also a decorator.

    ``fn`` may take ``stages=`` too, the requested number or None. A registered name is replaced, a built-in one is
    refused.

    >>> @register_schedule("OneByOne")
    ... def one_by_one(ranks, microbatches):
    ...     return make_schedule("GPipe", ranks, microbatches)
    >>> make_schedule("onebyone", 2, 3).microbatches
    3
    >>> unregister_schedule("OneByOne")
    """
    if fn is None:
        return lambda generator: register_schedule(name, generator)
    if not isinstance(name, str) or not _key(name):
        raise ScheduleError(f"a schedule cannot be called {name!r}; use letters or digits", rule="name")
    if _key(name) in _BUILT_IN:
        taken = _BUILT_IN[_key(name)].name
        raise ScheduleError(
            f"{name!r} is built in (as {taken}) and is not replaced; register another name", rule="name"
        )
    if not callable(fn):
        raise ScheduleError(
            f"{name!r} needs a function (ranks, microbatches) -> Schedule, not {fn!r}; a Schedule needs no name, "
            "it can be passed wherever a name can",
            rule="name",
        )
    _REGISTERED[_key(name)] = (name, fn)
    return fn


def unregister_schedule(name: str) -> None:
    """Remove a registered name.

    >>> unregister_schedule("GPipe")
    Traceback (most recent call last):
    ...
    fpipe.errors.ScheduleError: no schedule is registered as 'GPipe'; only registered names can be removed
    """
    if _REGISTERED.pop(_key(name), None) is None:
        raise ScheduleError(f"no schedule is registered as {name!r}; only registered names can be removed", rule="name")


def _count(what: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ScheduleError(f"{what}={value!r}, but there must be a whole number of {what}, 1 or more", rule=what)
    return number


def _stages(entry: _Entry, ranks: int, stages: int | None) -> int:
    if stages is None:
        return ranks * entry.per_rank
    wanted = ranks * entry.per_rank
    if entry.exactly and stages != wanted:
        raise ScheduleError(
            f"{entry.name} takes {wanted} stages on {ranks} ranks, not {stages}; give stages={wanted} or leave it out",
            rule="stages",
        )
    unit = ranks * entry.step
    if stages % unit:
        above = -(-stages // unit) * unit
        fits = f"{above - unit} or {above}" if above > unit else f"{above}"
        raise ScheduleError(
            f"{entry.name} takes a multiple of {unit} stages on {ranks} ranks, not {stages}; give stages={fits}",
            rule="stages",
        )
    return stages


def _registered(name: str, fn: Callable[..., Schedule], ranks: int, microbatches: int, stages: int | None) -> Schedule:
    result = fn(ranks, microbatches, stages=stages) if _takes_stages(fn) else fn(ranks, microbatches)
    if not isinstance(result, Schedule):
        raise ScheduleError(
            f"the function registered as {name!r} returned {type(result).__name__}; it must return a Schedule",
            rule="name",
        )
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        if number not in (None, getattr(result, what)):
            raise ScheduleError(
                f"the function registered as {name!r} was called for {what}={number} and returned a schedule with "
                f"{getattr(result, what)}; request that number, or correct the function",
                rule=what,
            )
    return result


def _takes_stages(fn: Callable[..., Schedule]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return "stages" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _unknown(name: object) -> str:
    known = {**{_key(n): n for n in (*schedule_names(), *_ALSO)}}
    close = difflib.get_close_matches(_key(str(name)), known, n=3, cutoff=0.5)
    if close:
        return f"no schedule is called {name!r}; did you mean {' or '.join(known[key] for key in close)}?"
    return f"no schedule is called {name!r}; there are {', '.join(schedule_names())}"
