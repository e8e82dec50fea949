# SPDX-License-Identifier: Apache-2.0
"""Calls of the units of a model: a function observes them, and what they return has leaves.

A call returns its output and what it writes into dicts that it was passed. This module must not
know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from ... import tree
from ...errors import StageError
from ...tree import Tree
from ..module_function import as_node

Forward: TypeAlias = Callable[..., Tree]


class Call(NamedTuple):
    """A call of a unit."""

    unit: str
    forward: Forward
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]

    @property
    def dicts(self) -> dict[str, dict]:
        """The dicts among its arguments.

        >>> Call("", print, (1, {}), {"more": {2: 3}}).dicts
        {'1': {}, 'more': {2: 3}}
        """
        named = {str(index): value for index, value in enumerate(self.args)} | self.kwargs
        return {name: value for name, value in named.items() if type(value) is dict}

    def run(self) -> tuple[list[Tree], tree.Structure]:
        """Return leaves and structure of its output and of the new entries of dicts."""
        before = [(name, entries, dict(entries)) for name, entries in self.dicts.items()]
        out = self.forward(*self.args, **self.kwargs)
        if isinstance(out, (tuple, list)):
            items = out
        else:
            items = [out]
        for item in items:
            if isinstance(item, dict) and type(item) is not dict:
                as_node(type(item))
        written = dict[str, dict]()
        for name, entries, old in before:
            new = {k: v for k, v in entries.items() if k not in old or old[k] is not v}
            if new:
                written[name] = new
        return tree.flatten((out, written))


def returned(call: Call, structure: tree.Structure, leaves: Sequence[Tree]) -> Tree:
    """Do what a call does, by the leaves that :meth:`Call.run` returned: write the new entries into
    the dicts that it was passed, and return its output.

    >>> more = {}
    >>> leaves, structure = tree.flatten(("out", {"more": {"key": "entry"}}))
    >>> returned(Call("", print, (), {"more": more}), structure, leaves), more
    ('out', {'key': 'entry'})
    """
    out, written = tree.unflatten(structure, leaves)
    dicts = call.dicts
    for name, entries in written.items():
        dicts[name].update(entries)
    return out


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
    for leaf in (*named, *tree.leaves(out)):
        if isinstance(leaf, Tensor):
            return leaf
    raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")
