# SPDX-License-Identifier: Apache-2.0
"""Calls of the units of a model: a function observes them, and what they return has leaves.

A call returns its output and what it writes into dicts that it was passed. This module must not
know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from ... import tree
from ...errors import StageError
from ...tree import Tree
from ..module_function import as_node

Forward: TypeAlias = Callable[..., Tree]
#: A function of a unit's name, forward, arguments and keyword arguments that returns its output.
Observer: TypeAlias = Callable[[str, Forward, Sequence[Tree], Mapping[str, Tree]], Tree]

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
        return observer(unit, forward, args, kwargs)


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


# ---- what calls return ----
def _dicts_in(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> dict[str, dict]:
    """Return the dicts among the arguments of a call.

    >>> _dicts_in([1, {}], {"more": {2: 3}})
    {'1': {}, 'more': {2: 3}}
    """
    named = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    return {name: value for name, value in named.items() if type(value) is dict}


def flat_call(
    forward: Forward, args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> tuple[list[Tree], tree.Structure]:
    """Run a call; return leaves and structure of its output and of the new entries of dicts."""
    dicts = _dicts_in(args, kwargs)
    before = {name: dict(entries) for name, entries in dicts.items()}
    out = forward(*args, **kwargs)
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, dict) and type(item) is not dict:
            as_node(type(item))
    written = dict[str, dict]()
    for name, entries in dicts.items():
        new = {k: v for k, v in entries.items() if before[name].get(k, entries) is not v}
        if new:
            written[name] = new
    return tree.flatten((out, written))


def output_of(
    structure: tree.Structure,
    leaves: Sequence[Tree],
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
) -> Tree:
    """Return the output of a call from its leaves; the entries that it writes are written."""
    out, written = tree.unflatten(structure, leaves)
    dicts = _dicts_in(args, kwargs)
    for name, entries in written.items():
        dicts[name].update(entries)
    return out


def result_of(out: Tree) -> Tensor:
    """Return the tensor that the last stage returns: logits, or the last hidden state."""
    named = (getattr(out, name, None) for name in ("logits", "last_hidden_state"))
    for leaf in (*named, *tree.leaves(out)):
        if isinstance(leaf, Tensor):
            return leaf
    raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")
