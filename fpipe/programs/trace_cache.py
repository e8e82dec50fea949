# SPDX-License-Identifier: Apache-2.0
"""The cache of traces: those of each function, as long as it lives, up to a limit.

A Python number is a part of a signature. One that differs in every call, such as a temperature or the number of a step,
would make each call a new trace; the user is warned of it. Knows signatures, no graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, MutableMapping
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..errors import StageError
from ..stage import Stage
from ..tree import Aval, Static
from .autocast import Ambient
from .losses import LossCall
from .signature import Signature
from .stage_programs import Programs

#: How many traces of one function are cached; the oldest is dropped.
KEPT = 512
#: The number of traces that differ in numbers alone at which the user is warned.
ALIKE = 256

Key: TypeAlias = tuple[Hashable, ...]


class _Traces(dict[Key, Programs]):
    """The traces of one function, the oldest first."""

    warned = False


_WEAK: WeakKeyDictionary[Callable[..., object], _Traces] = WeakKeyDictionary()
_STRONG: dict[Callable[..., object], _Traces] = {}  # of functions that cannot be referenced weakly
#: Eager programs refer to their function, so they are cached as long as they are in use.
_EAGER: WeakValueDictionary[Key, Programs] = WeakValueDictionary()


def cached(
    stage: Stage, signature: Signature, ambient: Ambient, trace: Callable[[Stage, Signature], Programs]
) -> Programs:
    """A stage's programs for a signature and the autocast that is on, traced where they are not in the cache."""
    key: Key = (stage.aux_loss, stage.state, stage.compile, ambient, signature)
    eager = stage.engine == "eager"
    if eager:
        key = (*key, stage.fn, stage.like)
    fn = stage.fn
    if isinstance(fn, LossCall):  # created for each use; the loss itself is the function that lives
        fn, key = fn.loss, (*key, fn.has_aux)
    store: MutableMapping[Key, Programs] = _EAGER if eager else _traces_of(fn)
    try:
        programs = store.get(key)
    except TypeError as error:
        raise StageError(
            f"stage {stage.label}: a leaf that is neither a tensor nor hashable came in ({error}); "
            'pass numbers, strings or None, or register its class (optree, namespace="fpipe")'
        ) from error
    if programs is None:
        programs = store[key] = trace(stage, signature)
        if isinstance(store, _Traces):
            _limit(store, stage, key)
    return programs


def _traces_of(fn: Callable[..., object]) -> _Traces:
    try:
        return _WEAK.setdefault(fn, _Traces())
    except TypeError:
        return _STRONG.setdefault(fn, _Traces())


def _limit(store: _Traces, stage: Stage, key: Key) -> None:
    """After one more trace: drop the oldest beyond the limit, and warn where only numbers make the difference."""
    if len(store) > KEPT:
        del store[next(iter(store))]
    if store.warned or len(store) < ALIKE:
        return
    wanted = _without_numbers(key)
    alike = [s for other in store if _without_numbers(other) == wanted for s in other if isinstance(s, Signature)]
    if len(alike) < ALIKE:
        return
    store.warned = True
    places = [(g, i) for g, t in enumerate(alike[0]) for i, leaf in enumerate(t.leaves) if isinstance(leaf, Static)]
    group, index = max(places, key=lambda place: len({other[place[0]].leaves[place[1]] for other in alike}))
    seen = ", ".join(str(other[group].leaves[index]) for other in alike[-3:])
    what = ("the parameters", "the input", "the side inputs", "the state")[group]
    warnings.warn(
        f"stage {stage.label} was traced {ALIKE} times for the same shapes, since a Python value in {what} was "
        f"another each time (last {seen}); every new one costs a trace. Give it as a tensor, torch.tensor(...), "
        "and one trace serves all",
        stacklevel=2,
    )


def _without_numbers(key: Key) -> list[object]:
    """A key with the types of the leaves that are not tensors instead of their values."""
    shapes = lambda s: [(t.spec, [a if isinstance(a, Aval) else a.type for a in t.leaves]) for t in s]
    return [shapes(part) if isinstance(part, Signature) else part for part in key]
