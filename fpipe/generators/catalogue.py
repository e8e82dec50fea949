# SPDX-License-Identifier: Apache-2.0
"""How a name, a file, a function or a ``Schedule`` becomes a ``Schedule``; the catalogue of names
is part of it.

A new schedule is one function and one row in ``TABLE`` or, for users, one call of
:func:`register_schedule`.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable
from functools import partial
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

from ..actions.collector import uncollected
from ..actions.text import parse_csv, parse_rows
from ..errors import ScheduleError
from ..schedule import Schedule, read_text
from .bitpipe import make_bitpipe
from .chimera import make_chimera
from .dualpipe import make_dual_pipe, make_dual_pipe_v
from .gpipe import make_gpipe
from .hanayo import make_hanayo
from .interleaved import make_interleaved_one_f_one_b, make_looped_bfs
from .one_f_one_b import make_eager_one_f_one_b, make_one_f_one_b, make_overlapped_one_f_one_b
from .slices import make_seq_one_f_one_b, make_seq_zb_h1
from .v_family import make_v_half, make_v_min
from .v_memory import make_v
from .zb_1p_2p import (
    make_interleaved_zb_1p,
    make_interleaved_zb_2p,
    make_zb_1p,
    make_zb_2p,
)
from .zbv import make_zbv
from .zero_bubble import make_interleaved_zero_bubble, make_zb_h1, make_zb_h2

Maker = TypeVar("Maker", bound=Callable[..., Schedule])
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
    "InterleavedZB1P",
    "InterleavedZB2P",
    "VHalf",
    "VMin",
    "V",
    "DualPipe",
    "Chimera",
    "BitPipe",
    "Hanayo",
    "Seq1F1B",
    "SeqZBH1",
    "auto",
]
Source: TypeAlias = Name | str | PathLike[str] | Schedule | Callable[[int, int], Schedule]


class _Entry(NamedTuple):
    """A schedule with a name: its generator, and how many stages it places on a rank."""

    name: str
    make: Callable[..., Schedule]
    per_rank: int = 1  #: by default; 0 for a registered function, which is not asked for it
    step: int = 1  #: any multiple of this
    exactly: bool = False  #: or no other number than the default
    limited: bool = False  #: whether it takes ``memory=``
    sliced: bool = False  #: whether it takes ``slices=``: an order of its own for slices


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
    _Entry("InterleavedZB1P", make_interleaved_zb_1p, 2),
    _Entry("InterleavedZB2P", make_interleaved_zb_2p, 2),
    _Entry("VHalf", make_v_half, 2, exactly=True),
    _Entry("VMin", make_v_min, 2, exactly=True),
    _Entry("V", make_v, 2, exactly=True, limited=True),
    _Entry("DualPipe", make_dual_pipe, 1, exactly=True),
    _Entry("Chimera", make_chimera, 1, exactly=True),
    _Entry("BitPipe", make_bitpipe, 2),
    _Entry("Hanayo", make_hanayo, 2, step=2),
    _Entry("Seq1F1B", make_seq_one_f_one_b, sliced=True),
    _Entry("SeqZBH1", make_seq_zb_h1, sliced=True),
)
#: Forwards and backwards of the largest schedule: it takes some gigabytes.
MOST_ACTIONS = 1 << 24
_ALSO = {"ZBV": "ZBVZeroBubble"}
_refuse = partial(ScheduleError, rule="name")


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


_KNOWN = {_key(entry.name): entry for entry in TABLE}
_KNOWN |= {_key(other): _KNOWN[_key(name)] for other, name in _ALSO.items()}


def schedule_names() -> tuple[str, ...]:
    """The names that :func:`make_schedule` knows, built-in ones first.

    Returns:
        Names, as text.

    >>> schedule_names()[:3]
    ('GPipe', '1F1B', 'Interleaved1F1B')
    """
    return tuple(dict.fromkeys(entry.name for entry in _KNOWN.values()))


def about_schedule(name: str) -> str:
    """One line on a schedule: the first sentences of its function's docstring.

    >>> about_schedule("GPipe")
    'All forwards, then all backwards, both in ascending order.'
    """
    summary = (inspect.getdoc(_entry(name).make) or "").partition("\n\n")[0]
    return " ".join(summary.split())


def orders_slices(name: str) -> bool:
    """Whether a schedule has an order of its own for slices of sequences.

    >>> orders_slices("Seq1F1B"), orders_slices("1F1B")
    (True, False)
    """
    return _entry(name).sliced


def make_schedule(
    name: Name | str,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    *,
    memory: float | None = None,
    slices: int = 1,
) -> Schedule:
    """The schedule called ``name`` for these counts.

    Args:
        name: one of :func:`schedule_names`; case, blanks, ``-`` and ``_`` do not matter.
        ranks: how many ranks there are.
        microbatches: how many microbatches a step has.
        stages: how many stages there are in all; by default one or two for each rank, depending on
            the schedule.
        memory: for ``"V"``: the share of the memory of 1F1B that a rank may hold, from a third to
            1.
        slices: into how many slices the sequence of each microbatch is cut. "Seq1F1B" and "SeqZBH1"
            order slices as others do microbatches; of any other schedule, each action becomes one
            for each slice (see ``Schedule.sliced``).

    Returns:
        A ``Schedule``.

    Raises:
        ScheduleError: if there is no such name, or the schedule has no form for these counts.

    >>> print(make_schedule("1F1B", ranks=2, microbatches=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    >>> make_schedule("interleaved1f1b", 4, 8, stages=12).placement
    Placement(0: [0, 4, 8], 1: [1, 5, 9], 2: [2, 6, 10], 3: [3, 7, 11])
    >>> print(make_schedule("Seq1F1B", ranks=1, microbatches=1, slices=2))
    [0F0.0, 0F0.1, 0B0.1, 0B0.0]
    """
    ranks, microbatches = _count("ranks", ranks), _count("microbatches", microbatches)
    stages, slices = None if stages is None else _count("stages", stages), _count("slices", slices)
    entry = _entry(name)
    if memory is not None and not entry.limited:
        raise ScheduleError(
            f"{entry.name} has no memory=; leave it out, or take 'V'", rule="memory"
        )
    if not entry.per_rank:
        made = _registered(entry, ranks, microbatches, stages)
        return made if made.slices == slices else made.sliced(slices)
    count = _stages(entry, ranks, stages)
    actions = 2 * max(count, ranks) * microbatches * slices
    if actions > MOST_ACTIONS:
        cut = f" of {slices} slices" if slices > 1 else ""
        what = (
            f"{max(count, ranks)} stages and {microbatches} microbatches{cut} are {actions:,} "
            "forwards and backwards"
        )
        rule = (
            f"at most {MOST_ACTIONS:,} are allowed, which take gigabytes. Give fewer ranks or "
            "microbatches"
        )
        raise ScheduleError(f"{what}; {rule}", rule="size")
    limits = {} if memory is None else {"memory": memory}
    with uncollected():
        if entry.sliced:
            return entry.make(ranks, microbatches, count, slices)
        return entry.make(ranks, microbatches, count, **limits).sliced(slices)


def schedule_from(
    source: Source, ranks: int, microbatches: int, stages: int | None = None, slices: int = 1
) -> Schedule:
    """The schedule that ``source`` describes; not yet checked.

    ``source`` is a name for :func:`make_schedule`, the path of a file (see :func:`is_path`), a
    function ``(ranks, microbatches) -> Schedule``, or a Schedule, which is returned as it is. A
    name is made with these counts, and a function is called with them. A file and a Schedule have
    their own counts, and a function may return others: the caller compares them with what it needs.

    >>> schedule_from("1F1B", ranks=2, microbatches=3)
    Schedule(1F1B, ranks=2, microbatches=3, stages=2)
    >>> schedule_from(lambda ranks, microbatches: make_schedule("ZBV", ranks, microbatches), 2,
    ...     3).stages
    4
    """
    if isinstance(source, Schedule):
        return source
    if isinstance(source, PathLike) or (isinstance(source, str) and is_path(source)):
        return read_schedule(source)
    if isinstance(source, str):
        return make_schedule(source, ranks, microbatches, stages, slices=slices)
    if not callable(source):
        known = "a name, a Schedule, a path to a CSV or a function (ranks, microbatches)"
        raise _refuse(f"schedule={source!r}; give {known}")
    return _returned(source(ranks, microbatches), "the schedule function")


def is_path(source: str) -> bool:
    """Whether :func:`schedule_from` reads ``source`` as a path: it ends in .csv or .txt, contains a
    separator of folders, or is an existing file whose name is no schedule's.

    >>> is_path("plan.csv"), is_path("1F1B")
    (True, False)
    """
    if Path(source).suffix.lower() in (".csv", ".txt") or os.sep in source:
        return True
    return os.path.isfile(source) and _key(source) not in _KNOWN


def read_schedule(
    path: str | PathLike[str], track: Callable[[list[str]], Iterable[str]] = iter
) -> Schedule:
    """The schedule in a text file, written as CSV or as ``str(schedule)`` writes it; ``track``
    yields its lines.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plan.txt")
    >>> _ = file.write_text("[0F0, 0B0]")
    >>> read_schedule(file)
    Schedule(plan, ranks=1, microbatches=1, stages=1)
    """
    text = read_text(path)
    parse = parse_rows if text[:4096].lstrip(" \t\r\n").startswith("[") else parse_csv
    return Schedule(parse(text, track), name=Path(path).stem)


@overload
def register_schedule(name: str, fn: Maker) -> Maker: ...
@overload
def register_schedule(name: str) -> Callable[[Maker], Maker]: ...
def register_schedule(name: str, fn: Maker | None = None) -> Maker | Callable[[Maker], Maker]:
    """Register ``fn(ranks, microbatches) -> Schedule`` under ``name`` for :func:`make_schedule`;
    also a decorator.

    Args:
        name: of the schedule; a registered name is replaced, a built-in one is refused.
        fn: ``fn(ranks, microbatches)``, which may take ``stages=`` too, the requested number or
            None.

    Returns:
        ``fn``; without ``fn`` a decorator.

    Raises:
        ScheduleError: if the name is built in, or ``fn`` is no function.

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
        raise _refuse(f"a schedule cannot be called {name!r}; use letters or digits")
    taken = _KNOWN.get(_key(name))
    if taken and taken.per_rank:
        raise _refuse(
            f"{name!r} is built in (as {taken.name}) and is not replaced; register another name"
        )
    if not callable(fn):
        remedy = "a Schedule needs no name, it can be passed wherever a name can"
        raise _refuse(
            f"{name!r} needs a function (ranks, microbatches) -> Schedule, not {fn!r}; {remedy}"
        )
    _KNOWN[_key(name)] = _Entry(name, fn, per_rank=0)
    return fn


def unregister_schedule(name: str) -> None:
    """Remove a registered name.

    >>> unregister_schedule("GPipe")
    Traceback (most recent call last):
    ...
    fpipe.errors.ScheduleError: no schedule is registered as 'GPipe'; only registered names can be
    removed
    """
    if _key(name) not in _KNOWN or _KNOWN[_key(name)].per_rank:
        raise _refuse(
            f"no schedule is registered as {name!r}; only registered names can be removed"
        )
    del _KNOWN[_key(name)]


def _entry(name: object) -> _Entry:
    key = _key(name) if isinstance(name, str) else ""
    if key in _KNOWN:
        return _KNOWN[key]
    names = {_key(n): n for n in (*schedule_names(), *_ALSO)}
    close = [
        names[key] for key in difflib.get_close_matches(_key(str(name)), names, n=3, cutoff=0.5)
    ]
    remedy = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"there are {', '.join(schedule_names())}"
    )
    raise _refuse(f"no schedule is called {name!r}; {remedy}")


def _count(what: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ScheduleError(
            f"{what}={value!r}, but there must be a whole number of {what}, 1 or more", rule=what
        )
    return number


def _stages(entry: _Entry, ranks: int, stages: int | None) -> int:
    wanted = ranks * entry.per_rank
    if stages is None:
        return wanted
    if entry.exactly and stages != wanted:
        what = f"{entry.name} takes {wanted} stages on {ranks} ranks, not {stages}"
        raise ScheduleError(
            f"{what}; give stages={wanted} or leave it out, and a pipeline {wanted} functions",
            rule="stages",
        )
    unit = ranks * entry.step
    if stages % unit:
        above = -(-stages // unit) * unit
        fits = f"{above - unit} or {above}" if above > unit else f"{above}"
        what = f"{entry.name} takes a multiple of {unit} stages on {ranks} ranks, not {stages}"
        raise ScheduleError(f"{what}; give stages={fits}", rule="stages")
    return stages


def _registered(entry: _Entry, ranks: int, microbatches: int, stages: int | None) -> Schedule:
    who = f"the function registered as {entry.name!r}"
    keywords = {"stages": stages} if _takes_stages(entry.make) else {}
    result = _returned(entry.make(ranks, microbatches, **keywords), who)
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        if number not in (None, getattr(result, what)):
            returned = (
                f"returned a schedule with {getattr(result, what)}; request that number, "
                "or correct the function"
            )
            raise ScheduleError(f"{who} was called for {what}={number} and {returned}", rule=what)
    return result


def _returned(result: object, who: str) -> Schedule:
    if not isinstance(result, Schedule):
        raise _refuse(f"{who} returned a {type(result).__name__}; it must return an fpipe.Schedule")
    return result


def _takes_stages(fn: Callable[..., Schedule]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return "stages" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
