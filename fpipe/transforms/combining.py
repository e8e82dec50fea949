# SPDX-License-Identifier: Apache-2.0
"""Transforms for a part of the leaves: for them the other leaves are ``None``, as those of stages elsewhere are.

A transform inside therefore needs no special case. Every one runs on every process, also where it has no leaf, so that
all processes take part in what it asks of them. This module must not know any single transform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TransformError
from ..tree import Tree, leaves
from ._base import Params, State, Transform, Updates
from ._masks import Labels, Mask, flags, labels_of, mask_of
from ._places import Column, Places, places


def masked(inner: Transform, mask: Mask) -> Transform:
    """A transform of the chosen leaves; the updates of the other leaves are returned unchanged.

    Args:
        inner: the transform.
        mask: patterns of names such as ``["*.w"]``, a tree of bools (or a prefix), or a function of the parameters.

    >>> import torch
    >>> from fpipe.transforms import scale
    >>> tx = masked(scale(2.0), ["1.*"])
    >>> params = [{"w": torch.ones(1)}, {"w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params))[0]
    [{'w': tensor([1.])}, {'w': tensor([2.])}]
    """

    def init(params: Params) -> State:
        return inner.init(_only(params, mask_of(mask, params), True))

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        at = places(grads)
        chosen = flags(at, mask, grads if params is None else params)
        column, state = _update_chosen(inner, at, chosen, state, params)
        return at.tree(new if flag else old for flag, new, old in zip(chosen, column, at.leaves, strict=True)), state

    return Transform(init, update, donates=inner.donates)


def partition(transforms: Mapping[str, Transform], labels: Labels) -> Transform:
    """A transform for each label; the state is the tuple of the transforms' states, in their order.

    Args:
        transforms: by label.
        labels: one for each leaf: ``{pattern: label}`` (the first pattern that fits a leaf's name counts), a function
            of the parameters, or a tree with a label wherever the parameters have a leaf or a subtree, for instance
            one per stage.

    >>> import torch
    >>> from fpipe.transforms import adamw, sgd
    >>> tx = partition({"slow": sgd(0.1), "fast": sgd(1.0)}, {"*.b": "fast", "*": "slow"})
    >>> params = [{"b": torch.ones(1), "w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params), params)[0]
    [{'b': tensor([-1.]), 'w': tensor([-0.1000])}]
    """

    def init(params: Params) -> State:
        tree = labels_of(labels, params)
        _check(set(leaves(tree)), transforms)
        return tuple(transform.init(_only(params, tree, label)) for label, transform in transforms.items())

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        at = places(grads)
        by_leaf = at.of(labels_of(labels, grads if params is None else params), "the labels")
        _check(set(by_leaf), transforms)
        columns, states = {}, []
        for (label, transform), part in zip(transforms.items(), state, strict=True):
            chosen = [each == label for each in by_leaf]
            columns[label], part = _update_chosen(transform, at, chosen, part, params)
            states.append(part)
        return at.tree(columns[label][index] for index, label in enumerate(by_leaf)), tuple(states)

    return Transform(init, update, donates=any(transform.donates for transform in transforms.values()))


def _only(tree: Tree, labels: Tree, label: Any) -> Tree:
    """A tree with None for the leaves of other labels."""
    at = places(tree)
    return at.keep([each == label for each in at.of(labels, "the labels")])


def _update_chosen(
    inner: Transform, at: Places, chosen: Sequence[bool], state: State, params: Params
) -> tuple[Column, State]:
    """Run a transform on the chosen leaves: its updates by leaf, None everywhere if it makes no step, and its state."""
    weights = None if params is None else at.keep(chosen, params)
    updates, state = inner.update(at.keep(chosen), state, weights)
    return [None] * len(chosen) if updates is None else at.column(updates, "the updates"), state


def _check(labels: set[Any], transforms: Mapping[str, Transform]) -> None:
    unknown = labels - set(transforms)
    if unknown:
        raise TransformError(
            f"labels {sorted(map(str, unknown))} have no transform; there are {sorted(transforms)}: "
            f"add one, for instance fpipe.identity()"
        )
