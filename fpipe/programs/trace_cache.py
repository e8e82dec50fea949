# SPDX-License-Identifier: Apache-2.0
"""The traces of each function, by signature: a signature is traced once, and other sizes of it not
at all.

The first signature of a function is traced as it is. When another one differs from it in sizes
alone, the function is traced with symbols for the sizes that differ (``families``), and that trace
serves all sizes for which its conditions hold. Traces are cached as long as their function lives,
up to a limit. A Python number is a part of a signature: one that differs in every call, such as a
temperature or the number of a step, would make each call a new trace; the user is warned of it.
Knows functions and signatures, no schedules, ranks or microbatches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from ..devices import exclusive
from ..errors import StageError
from ..stage import Stage, as_stage
from ..tree import AbstractTree, Aval, Static, Tree
from .autocast import ambient
from .carries import SliceCall
from .eager.engine import eager_programs
from .families import Families
from .losses import LossCall
from .signature import Signature
from .stage_programs import Programs
from .tracing import traced

#: How many traces of one function are cached; the oldest is dropped.
KEPT = 512
#: How many functions that cannot be referenced weakly have their traces cached.
FUNCTIONS = 256
#: The number of traces that differ in numbers alone at which the user is warned.
ALIKE = 256

Key: TypeAlias = tuple[Hashable, ...]


class _Traces(dict[Key, Programs]):
    """The traces of one function, the oldest first, and those with symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.warned = False
        self.families: dict[Key, Families] = {}


_WEAK: WeakKeyDictionary[Callable[..., object], _Traces] = WeakKeyDictionary()
#: Of functions that cannot be referenced weakly, the least recently used first.
_STRONG: dict[Callable[..., object], _Traces] = {}
#: Eager programs refer to their function, so they are cached as long as they are in use.
_EAGER: WeakValueDictionary[Key, Programs] = WeakValueDictionary()


def trace(
    fn: Callable[..., Any] | Stage, params: Tree, x: Tree, *, state: Tree = None, **side: Tree
) -> Programs:
    """Turn a pure stage function into its four programs; cached by function, shapes, dtypes and
    devices.

    Args:
        fn: a function as for ``fpipe.pipeline``, or a ``Stage``.
        params, x: example arguments; their values do not matter.
        state: the state of a stage that carries one.
        side: its side inputs.

    Returns:
        ``Programs``: ``forward``, ``backward``, ``backward_input`` and ``backward_weight`` are
        functions, whose ``.code`` is their source.

    Raises:
        TraceError: if the function cannot be traced, with the line and a remedy.
        StageError: if the stage has ``carry=True``.

    >>> programs = trace(lambda p, x: torch.tanh(x @ p), torch.eye(2), torch.ones(1, 2))
    >>> y, saved = programs.forward(torch.eye(2), torch.ones(1, 2))
    >>> dx, dparams = programs.backward(saved, torch.ones(1, 2))
    >>> dparams.shape
    torch.Size([2, 2])
    """
    of = AbstractTree.of
    if as_stage(fn).carry:
        raise StageError(
            f"stage {as_stage(fn).label} has a carry, and a trace has none; trace lambda p, x: "
            "fn(p, *x) for an input "
            "(carry, x)"
        )
    return programs_of(as_stage(fn), Signature(of(params, True), of(x, True), of(side), of(state)))


def programs_of(
    stage: Stage,
    signature: Signature,
    unused: frozenset[int] = frozenset(),
    occasion: object = None,
) -> Programs:
    """The programs of a stage for a signature and the autocast that is on, traced where they are
    not in the cache.

    The outputs ``unused`` have no cotangent. ``occasion`` is the same for all signatures of one
    call.
    """
    surroundings = ambient(), torch.is_autocast_cache_enabled(), torch.get_default_dtype()
    every_size = (
        stage.dynamic is False
    )  # no trace with symbols, also where another Stage of the function has one
    options: Key = (stage.aux_loss, stage.state, stage.compile, every_size, surroundings, unused)
    eager = stage.engine == "eager"
    if eager:
        options = (*options, stage.fn, stage.like)
    fn = stage.fn
    if isinstance(fn, LossCall):  # created for each use; the loss itself is the function that lives
        fn, options = fn.loss, (*options, fn.has_aux)
    elif isinstance(fn, SliceCall):
        fn, options = fn.fn, (*options, fn.kind)
    key: Key = (*options, signature)
    store: MutableMapping[Key, Programs] = _EAGER if eager else _traces_of(fn)
    try:
        programs = store.get(key)
    except TypeError as error:
        raise StageError(
            f"stage {stage.label}: a leaf that is neither a tensor nor hashable came in ({error}); "
            'pass numbers, strings or None, or register its class (optree, namespace="fpipe")'
        ) from error
    if programs is None:
        with exclusive():  # torch's tracing changes state of the process
            if isinstance(store, _Traces):
                programs = store[key] = _trace(store, stage, signature, unused, options, occasion)
                if len(store) > KEPT:
                    del store[next(iter(store))]
                if programs.origin is None:  # it was traced
                    _warn_of_numbers(store, stage, key)
            else:
                programs = store[key] = eager_programs(stage, signature, unused)
    return programs


def _trace(
    store: _Traces,
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    options: Key,
    occasion: object,
) -> Programs:
    """Programs for a signature that is new: of a trace with symbolic sizes, or of a trace of their
    own.
    """
    key = (*options, signature.skeleton)
    known = store.families.get(key, Families())
    programs = known.programs(stage.label, signature)
    if programs is None:
        families = store.families[key] = known.extended(stage, signature, unused, occasion)
        programs = families.programs(stage.label, signature)
        if programs is None:
            programs, _ = traced(stage, signature, unused)
        if families.fault and not known.fault:
            families.warn(stage)
    return programs.compiled_by(stage.compile) if stage.compile else programs


# ---- the cache ----
def _traces_of(fn: Callable[..., object]) -> _Traces:
    try:
        return _WEAK.setdefault(fn, _Traces())
    except TypeError:
        store = _STRONG.pop(fn, None)
        store = _STRONG[fn] = _Traces() if store is None else store
        if len(_STRONG) > FUNCTIONS:
            _STRONG.pop(next(iter(_STRONG)), None)
        return store


def _warn_of_numbers(store: _Traces, stage: Stage, key: Key) -> None:
    """After one more trace: warn where many differ in numbers alone."""
    if store.warned or len(store) < ALIKE:
        return
    wanted = _without_numbers(key)
    alike = [
        s
        for other in store
        if _without_numbers(other) == wanted
        for s in other
        if isinstance(s, Signature)
    ]
    if len(alike) < ALIKE:
        return
    store.warned = True
    places = [
        (g, i)
        for g, t in enumerate(alike[0])
        for i, leaf in enumerate(t.leaves)
        if isinstance(leaf, Static)
    ]
    group, index = max(
        places, key=lambda place: len({other[place[0]].leaves[place[1]] for other in alike})
    )
    seen = ", ".join(str(other[group].leaves[index]) for other in alike[-3:])
    what = ("the parameters", "the input", "the side inputs", "the state")[group]
    warnings.warn(
        f"stage {stage.label} was traced {ALIKE} times for the same shapes, since a Python value "
        f"in {what} was "
        f"another each time (last {seen}); every new one costs a trace. Give it as a tensor, "
        "torch.tensor(...), "
        "and one trace serves all",
        stacklevel=2,
    )


def _without_numbers(key: Key) -> list[object]:
    """A key with the types of the leaves that are not tensors instead of their values."""

    def shapes(s):
        return [(t.spec, [a if isinstance(a, Aval) else a.type for a in t.leaves]) for t in s]

    return [shapes(part) if isinstance(part, Signature) else part for part in key]


__all__ = ["Signature", "programs_of", "trace"]
