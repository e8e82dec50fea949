# SPDX-License-Identifier: Apache-2.0
"""Pipelines derived from a pipeline: its stages and its loss wrapped, everything else as
configured.

Knows stages and configurations; no plan and no register.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ... import tree
from ...stage import Stage, keyword_only
from ...tree import Tree

Function = Callable[..., Any]


def wrapped(stage: Stage, wrap: Callable[[Function], Function], *, like: bool = True) -> Stage:
    """The stage with another function, made from its own; with ``like``, the function that predicts
    its results too.
    """

    def both(fn):
        return _with_sides_of(wrap(fn), fn)

    predicts = both(stage.like) if like and stage.like is not None else None
    return replace(
        stage, fn=both(stage.fn), like=predicts, aux_loss=False, ties=(), name=stage.label
    )


def _with_sides_of(call: Function, fn: Function) -> Function:
    """``call`` with a signature that has the side inputs of ``fn``."""
    sides = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keyword_only(fn)]
    positional = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
    call.__signature__ = inspect.Signature([positional, *sides])  # type: ignore[attr-defined]
    return call


class Chosen:
    """Some leaves of a tree, by a predicate or a flag for each leaf: ``leaves``, and the tree
    ``around`` others.

    >>> chosen = Chosen({"a": 1, "b": 2}, [False, True])
    >>> chosen.leaves, chosen.around([5])
    ([2], {'a': 1, 'b': 5})
    """

    def __init__(self, value: Tree, chosen: Callable[[Any], bool] | Sequence[bool]):
        self._all, self._spec = tree.flatten(value)
        flags = map(chosen, self._all) if callable(chosen) else chosen
        self._indices = [
            i for i, (_, flag) in enumerate(zip(self._all, flags, strict=True)) if flag
        ]
        self.leaves: list[Any] = [self._all[i] for i in self._indices]

    def around(self, leaves: Sequence[Any], rest: Any = ...) -> Tree:
        """The tree with other leaves in place of the chosen ones; and ``rest`` in place of all
        others.
        """
        full = list(self._all) if rest is ... else [rest] * len(self._all)
        for i, leaf in zip(self._indices, leaves, strict=True):
            full[i] = leaf
        return tree.unflatten(self._spec, full)
