# SPDX-License-Identifier: Apache-2.0
"""The traces of functions, by signature: a signature is traced once.

Traces are cached as long as their function lives, up to a limit. When a second signature of a
function differs from the first in sizes alone, the pass ``sizes`` makes one trace that serves all
sizes. An engine other than tracing is a pass of its name. This module knows functions and
signatures, no schedules, ranks or microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakValueDictionary

from torch.utils.weak import WeakIdKeyDictionary

from ..actions.product import load_pass
from ..errors import StageError
from ..stage import Stage
from .internals import exclusive, surroundings
from .program import Programs
from .signature import Signature
from .tracing import traced

#: How many traces of one function are cached; the oldest is dropped.
MOST_TRACES = 512

TraceKey: TypeAlias = tuple[Hashable, ...]


class Occasion(Protocol):
    """The call of a pipeline for which a trace is taken."""

    @property
    def pipeline_id(self) -> object:
        """An object that all calls of one pipeline share."""
        ...


class Traces(dict[TraceKey, Programs]):
    """The traces of one function, the oldest first.

    ``firsts`` and ``families`` are by signature without sizes. The first signature of a pipeline is
    in ``firsts``, with its occasion. The pass ``sizes`` keeps traces for all sizes in ``families``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[TraceKey, tuple[Signature, Occasion | None]] = {}
        self.families: dict[TraceKey, Any] = {}


#: By identity of the function: two that are equal (``==``) may compute something else.
_BY_FUNCTION: MutableMapping[object, Traces] = WeakIdKeyDictionary()
#: Programs of other engines refer to their function, so they are cached as long as they are used.
_UNTRACED: WeakValueDictionary[TraceKey, Programs] = WeakValueDictionary()


def programs_of(
    stage: Stage,
    signature: Signature,
    unused: frozenset[int] = frozenset(),
    occasion: Occasion | None = None,
) -> Programs:
    """Return the programs of a stage for a signature and the global state of torch; trace them if
    they are not cached.

    The outputs ``unused`` have no cotangent. ``occasion`` is the same for all signatures of one
    call.
    """
    one_size = stage.dynamic is False  # never the trace for all sizes of another Stage of fn
    state = surroundings()
    options: TraceKey = (stage.aux_loss, stage.state, stage.compile, one_size, state, unused)
    fn = stage.fn
    engine = None if stage.engine == "trace" else stage.engine
    stands_for = getattr(fn, "stands_for", None)
    if stands_for is not None:  # fn is created for each use; the function that it stands for lives
        fn, others = stands_for()
        options = (*options, others)
    if engine:  # the programs keep both alive
        options = (*options, engine, id(fn), id(stage.like))
    store: MutableMapping[TraceKey, Programs] = _UNTRACED if engine else _traces_of(fn)
    key: TraceKey = (*options, signature)
    try:
        programs = store.get(key)
    except TypeError as error:
        remedy = 'numbers, strings or None, or register its class (optree, namespace="fpipe")'
        if "ndarray" in str(error):
            remedy = "torch.from_numpy(...) of it, which shares its memory"
        raise StageError(
            f"stage {stage.label}: a leaf that is neither a tensor nor hashable came in ({error}); "
            f"pass {remedy}"
        ) from error
    if programs is None:
        with exclusive():  # torch's tracing changes state of the process
            if isinstance(store, Traces):
                programs = store[key] = _trace(store, stage, signature, unused, options, occasion)
                if len(store) > MOST_TRACES:
                    del store[next(iter(store))]
            else:
                programs = load_pass(f"{engine}.programs").programs_of(stage, signature, unused)
                store[key] = programs
    return programs


def _trace(
    store: Traces,
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    options: TraceKey,
    occasion: Occasion | None,
) -> Programs:
    """Trace the programs for a new signature: for its sizes, or for all sizes."""
    key = (*options, signature.skeleton)
    first = store.firsts.setdefault(key, (signature, occasion))
    all_sizes = stage.dynamic
    if all_sizes is None:
        if key not in store.families and not _of_one_pipeline(first[1], occasion):
            first = store.firsts[key] = signature, occasion
        all_sizes = first[0] is not signature
    if all_sizes:
        programs = load_pass("sizes.families").programs_of(
            store.families, key, first, stage, signature, unused, occasion
        )
    else:
        with timed("tracing"):
            programs = traced(stage, signature, unused)
    return load_pass("compilers").compiled(programs, stage.compile) if stage.compile else programs


def _of_one_pipeline(first: Occasion | None, occasion: Occasion | None) -> bool:
    """Whether both may be calls of one pipeline. A function outlives pipelines, and another one may
    use it with other sizes.
    """
    return first is None or occasion is None or first.pipeline_id is occasion.pipeline_id


def _traces_of(fn: Callable[..., object]) -> Traces:
    """The traces of this very function. Another that is equal to it (``==``) has its own."""
    try:
        return _BY_FUNCTION.setdefault(fn, Traces())
    except TypeError:
        identity = load_pass("identity")
        return identity.traces_of(identity.Same(fn))


# ---- how long preparations take ----
Part: TypeAlias = Literal["tracing", "lowering", "handshakes"]


@dataclass(frozen=True)
class Spent:
    """Seconds of each part of a preparation, and how many traces were taken.

    >>> print(Spent(tracing=1.25, traces=3) + Spent(lowering=0.5))
    tracing 1.25 s (3 traces), lowering 0.50 s, handshakes 0.00 s
    """

    tracing: float = 0.0
    lowering: float = 0.0
    handshakes: float = 0.0
    traces: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        traces = f"{self.traces} trace{'' if self.traces == 1 else 's'}"
        return (
            f"tracing {self.tracing:.2f} s ({traces}), lowering {self.lowering:.2f} s, "
            f"handshakes {self.handshakes:.2f} s"
        )

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.tracing + self.lowering + self.handshakes


_PARTS: ContextVar[list[Spent] | None] = ContextVar("PARTS", default=None)


@contextmanager
def measured() -> Iterator[list[Spent]]:
    """Collect the time that is spent inside, by part.

    >>> with measured() as parts, timed("lowering"):
    ...     pass
    >>> [part.traces for part in parts]
    [0]
    """
    parts: list[Spent] = []
    before = _PARTS.set(parts)
    try:
        yield parts
    finally:
        _PARTS.reset(before)
        if (outer := _PARTS.get()) is not None:
            outer += parts


@contextmanager
def timed(part: Part) -> Iterator[None]:
    """Measure a part. It must not be inside another of its kind."""
    parts = _PARTS.get()
    if parts is None:
        yield
        return
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begin
        parts.append(Spent(**{part: seconds}, traces=int(part == "tracing")))
