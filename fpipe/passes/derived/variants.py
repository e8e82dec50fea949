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
from ...engine.config import Config
from ...errors import StageError
from ...stage import Stage, keyword_only
from ...tree import Tree

Function = Callable[..., Tree]


def refuse(config: Config, what: str, *kinds: str) -> None:
    """Raise StageError if a pipeline has one of the properties for which ``what`` is not
    defined.
    """
    present = {
        "tied parameters": config.tied,
        "state": config.stateful,
        "carries": config.carries,
        "slices": config.slices > 1,
        "dp=": config.copies is not None,
        "a weighted reduction": config.reduction not in ("mean", "sum"),
    }
    for kind in kinds:
        if present[kind]:
            raise StageError(f"{what} of a pipeline with {kind} is not defined; build one without")


def first(result: Tree) -> Tree:
    """What a loss returned, without the auxiliary values beside it."""
    return result[0] if isinstance(result, tuple) else result


def wrapped(stage: Stage, wrap: Callable[[Function], Function], *, like: bool = True) -> Stage:
    """The stage with another function, made from its own; with ``like``, the function that predicts
    its results too.
    """

    def both(fn: Function) -> Function:
        call: Any = wrap(fn)
        # the signature has the side inputs of the function
        sides = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keyword_only(fn)
        ]
        positional = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        call.__signature__ = inspect.Signature([positional, *sides])
        return call

    predicts = both(stage.like) if like and stage.like is not None else None
    return replace(
        stage, fn=both(stage.fn), like=predicts, aux_loss=False, ties=(), name=stage.label
    )


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
        self._indices = [i for i, flag in enumerate(flags) if flag]
        self.leaves: list[Any] = [self._all[i] for i in self._indices]

    def around(self, leaves: Sequence[object], rest: object = ...) -> Tree:
        """The tree with other leaves in place of the chosen ones; and ``rest`` in place of all
        others.
        """
        full = list(self._all) if rest is ... else [rest] * len(self._all)
        for i, leaf in zip(self._indices, leaves, strict=True):
            full[i] = leaf
        return tree.unflatten(self._spec, full)
