# SPDX-License-Identifier: Apache-2.0
"""Calls of the units of a model, which a function observes.

This module must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from ...errors import StageError
from ...tree import Tree

Forward: TypeAlias = Callable[..., Tree]


class Call(NamedTuple):
    """A call of a unit."""

    unit: str
    forward: Forward
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


#: A function of a call that returns its output.
Observer: TypeAlias = Callable[[Call], Tree]

#: What observes the calls of units that are not inside of another unit.
_OBSERVER: ContextVar[Observer | None] = ContextVar("_OBSERVER", default=None)


def observe(module: nn.Module, unit: str) -> None:
    """Let an observer see the calls of a module."""
    module.forward = partial(_observed_call, unit, module.forward)


def _observed_call(unit: str, forward: Forward, *args: Tree, **kwargs: Tree) -> Tree:
    observer = _OBSERVER.get()
    if observer is None:
        return forward(*args, **kwargs)
    with observed_by(None):
        return observer(Call(unit, forward, args, kwargs))


@contextmanager
def observed_by(observer: Observer | None) -> Iterator[None]:
    """Return a context in which calls of units are observed."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def is_between_units() -> bool:
    """Return whether the code between observed units runs."""
    return _OBSERVER.get() is not None


def result_of(out: Tree) -> Tensor:
    """Return the tensor that the last stage returns: logits, or the last hidden state."""
    named = (getattr(out, name, None) for name in ("logits", "last_hidden_state"))
    for leaf in (*named, out):
        if isinstance(leaf, Tensor):
            return leaf
    raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")
