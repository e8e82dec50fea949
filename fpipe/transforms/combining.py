# SPDX-License-Identifier: Apache-2.0
"""Transforms for a part of the leaves: for them the other leaves are ``None``, as those of stages
elsewhere are.

A transform inside therefore needs no special case. Every one runs on every process, also where it
has no leaf, so that all processes take part in what it asks of them. This module must not know any
single transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, tree_map
from ._base import Params, State, Transform, Updates, identity, refuse_shared, run_step
from ._optimizer import weights_of
from ._places import Column, Labels, Mask, Places, labels_of, mask_of, places


def masked(inner: Transform, mask: Mask) -> Transform:
    """A transform of the chosen leaves; the updates of the other leaves are returned unchanged.

    Args:
        inner: the transform.
        mask: patterns of names such as ``["*.w"]``, a tree of bools (or a prefix), or a function of
            the parameters.

    Returns:
        A ``Transform``.

    >>> import torch
    >>> from fpipe.transforms import scale
    >>> tx = masked(scale(2.0), ["1.*"])
    >>> params = [{"w": torch.ones(1)}, {"w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params))[0]
    [{'w': tensor([1.])}, {'w': tensor([2.])}]
    """

    both = _by_label(
        {True: inner, False: identity()}, lambda tree: tree_map(bool, mask_of(mask, tree))
    )

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        updates, (after, _) = both.update(grads, (state, ()), params)
        return updates, after

    def in_one_pass(
        grads: Updates, state: State, params: Params, donate: bool, factor: Tensor | None
    ) -> tuple[Params, State]:
        params, (after, _) = run_step(both, grads, (state, ()), params, donate, factor)
        return params, after

    return Transform(
        lambda params: both.init(params)[0], update, donates=inner.donates, in_one_pass=in_one_pass
    )


def partition(transforms: Mapping[str, Transform], labels: Labels) -> Transform:
    """A transform for each label; the state is the tuple of the transforms' states, in their order.

    Args:
        transforms: by label.
        labels: one for each leaf: ``{pattern: label}`` (the first pattern that fits a leaf's name
            counts), a function of the parameters, or a tree with a label wherever the parameters
            have a leaf or a subtree, for instance one per stage.

    Returns:
        A ``Transform``.

    >>> import torch
    >>> from fpipe.transforms import adamw, sgd
    >>> tx = partition({"slow": sgd(0.1), "fast": sgd(1.0)}, {"*.b": "fast", "*": "slow"})
    >>> params = [{"b": torch.ones(1), "w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params), params)[0]
    [{'b': tensor([-1.]), 'w': tensor([-0.1000])}]
    """

    return _by_label(transforms, lambda tree: labels_of(labels, tree))


def _by_label(transforms: Mapping[Any, Transform], labels: Callable[[Tree], Tree]) -> Transform:
    def column(at: Places, tree: Tree) -> Column:
        by_leaf = at.of(labels(tree), "the labels")
        unknown = set(by_leaf) - set(transforms)
        if unknown:
            raise TransformError(
                f"labels {sorted(map(str, unknown))} have no transform; there are "
                f"{sorted(transforms)}: "
                f"add one, for instance fpipe.identity()"
            )
        return by_leaf

    def init(params: Params) -> State:
        at = places(params)
        by_leaf = column(at, params)
        return tuple(
            tx.init(at.keep([each == label for each in by_leaf]))
            for label, tx in transforms.items()
        )

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        at = places(grads)
        by_leaf, columns, states = column(at, grads if params is None else params), {}, []
        for (label, transform), part in zip(transforms.items(), state, strict=True):
            chosen = [each == label for each in by_leaf]
            weights = None if params is None else at.keep(chosen, params)
            updates, part = transform.update(at.keep(chosen), part, weights)
            columns[label] = (
                [None] * len(chosen) if updates is None else at.column(updates, "the updates")
            )
            states.append(part)
        return at.tree(columns[label][index] for index, label in enumerate(by_leaf)), tuple(states)

    donates = any(transform.donates for transform in transforms.values())
    return Transform(
        init, update, donates=donates, in_one_pass=partial(_parts_in_one_pass, transforms, column)
    )


def _parts_in_one_pass(
    transforms: Mapping[Any, Transform],
    column: Callable[[Places, Tree], Column],
    grads: Updates,
    state: State,
    params: Params,
    donate: bool,
    factor: Tensor | None,
) -> tuple[Params, State]:
    at = places(grads)
    weights, by_leaf, columns, states = weights_of(at, params, "a step"), column(at, params), {}, []
    if donate:
        refuse_shared(at, weights)
    for (label, transform), part in zip(transforms.items(), state, strict=True):
        chosen = [each == label for each in by_leaf]
        after, part = run_step(
            transform, at.keep(chosen), part, at.keep(chosen, params), donate, factor
        )
        columns[label] = at.column(after, "params")
        states.append(part)
    return at.tree(
        (columns[label][index] for index, label in enumerate(by_leaf)), base=params
    ), tuple(states)
