# SPDX-License-Identifier: Apache-2.0
"""The traces of functions that cannot be referenced weakly. Knows functions and traces alone."""

from __future__ import annotations

from collections.abc import Callable

from ..programs.cache import Traces

#: Of how many functions traces are cached.
FUNCTIONS = 256
#: Each function with its traces, by identity, the least recently used first.
_STRONG: dict[int, tuple[Callable[..., object], Traces]] = {}


def traces_of(fn: Callable[..., object]) -> Traces:
    """The traces of a function; those of the least recently used one are dropped."""
    _, store = _STRONG.pop(id(fn), (fn, Traces()))
    _STRONG[id(fn)] = fn, store
    if len(_STRONG) > FUNCTIONS:
        _STRONG.pop(next(iter(_STRONG)), None)
    return store
