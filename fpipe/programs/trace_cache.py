"""Where traces are kept: those of each function, as long as it lives, so many of them at most.

A Python number is a part of a trace. One that changes with every call, such as a temperature or the number of a step,
would make each call a new trace: who does that is told. Knows nothing of graphs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import StageError
from ..stage import Stage
from ..tree import Aval, Static
from .signature import Signature
from .stage_programs import Programs

#: How many traces of one function are kept; the oldest goes.
KEPT = 512
#: So many that differ in numbers alone are too many: more than a pipeline has stages that know their own number.
ALIKE = 256


class _Traces(dict[Any, Programs]):
    """Those of one function, the oldest first; and whether its user was told that they are too many."""

    told = False


_WEAKLY: weakref.WeakKeyDictionary[Any, _Traces] = weakref.WeakKeyDictionary()
_STRONGLY: dict[Any, _Traces] = {}
#: Eager programs hold their function, so they are kept as long as somebody uses them.
_EAGER: weakref.WeakValueDictionary[Any, Programs] = weakref.WeakValueDictionary()


def kept(stage: Stage, signature: Signature, under: Any, make: Callable[[Stage, Signature], Programs]) -> Programs:
    """A stage's programs for a signature, made once ``under`` what else they depend on."""
    key = (stage.aux_loss, stage.state, stage.compile, under, signature)
    eager = stage.engine == "eager"
    store: Any = _EAGER if eager else _of(stage.fn)
    key = (*key, stage.fn, stage.like) if eager else key
    try:
        found = store.get(key)
    except TypeError as error:
        raise StageError(
            f"stage {stage.label}: a leaf that is neither a tensor nor hashable came in ({error}); "
            'pass numbers, strings or None, or register its class (optree, namespace="fpipe")'
        ) from error
    if found is None:
        found = store[key] = make(stage, signature)
        if not eager:
            _look_after(store, stage, key)
    return found


def _of(fn: Callable[..., Any]) -> _Traces:
    try:
        return _WEAKLY.setdefault(fn, _Traces())
    except TypeError:  # the function takes no weak reference: hold it by the Stage that holds it
        return _STRONGLY.setdefault(fn, _Traces())


def _look_after(store: _Traces, stage: Stage, key: tuple[Any, ...]) -> None:
    """After one more trace: let the oldest go, and speak up where numbers alone make the difference."""
    if len(store) > KEPT:
        del store[next(iter(store))]
    if store.told or len(store) < ALIKE:
        return
    *rest, signature = key
    shapes = _without_numbers(signature)
    alike = [other for *others, other in store if others == rest and _without_numbers(other) == shapes]
    if len(alike) >= ALIKE:
        store.told = True
        group, index = _differing(alike)
        seen = ", ".join(str(other[group].leaves[index]) for other in alike[-3:])
        what = ("the parameters", "the input", "the side inputs", "the state")[group]
        warnings.warn(
            f"stage {stage.label} was traced {ALIKE} times for the same shapes, since a Python value in {what} was "
            f"another each time (last {seen}); every new one costs a trace. Give it as a tensor, torch.tensor(...), "
            "and one trace serves all",
            stacklevel=2,
        )


def _without_numbers(signature: Signature) -> Any:
    return [(t.spec, [a if isinstance(a, Aval) else a.type for a in t.leaves]) for t in signature]


def _differing(alike: list[Signature]) -> tuple[int, int]:
    """The leaf with the most values."""
    places = [(g, i) for g, t in enumerate(alike[0]) for i, leaf in enumerate(t.leaves) if isinstance(leaf, Static)]
    return max(places, key=lambda place: len({other[place[0]].leaves[place[1]] for other in alike}))
