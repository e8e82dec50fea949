# SPDX-License-Identifier: Apache-2.0
"""Transforms for a part of the leaves: for them the other leaves are ``None``, as those of stages
elsewhere are.

A transform inside therefore needs no special case. Every one runs on every process, also where it
has no leaf, so that all processes take part in what it asks of them. This module must not know any
single transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import TransformError, checked
from ..tree import Tree, tree_map
from .leaves import Column, Labels, Mask, labels_of, mask_of, places
from .transform import (
    T,
    Transform,
    both_ways,
    identity,
    run,
)


@checked
def masked(inner: Transform, mask: Mask) -> Transform:
    """A transform of the chosen leaves; the updates of the other leaves are returned unchanged.

    Args:
        inner: the transform of the chosen leaves.
        mask: patterns of names such as ``["*.w"]``, a tree of bools (or a prefix), or a function of
            the parameters.

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

    def call(grads, state, params, how):
        after, (state, _) = run(both, grads, (state, ()), params, how)
        return after, state

    return both_ways(lambda params: both.init(params)[0], call)


@checked
def partition(transforms: Mapping[str, Transform], labels: Labels) -> Transform:
    """A transform for each label; the state is the tuple of the transforms' states, in their order.

    Args:
        transforms: by label.
        labels: one for each leaf: ``{pattern: label}`` (the first pattern that fits a leaf's name
            counts), a function of the parameters, or a tree with a label wherever the parameters
            have a leaf or a subtree, for instance one per stage.

    >>> import torch
    >>> from fpipe.transforms import adamw, sgd
    >>> tx = partition({"slow": sgd(0.1), "fast": sgd(1.0)}, {"*.b": "fast", "*": "slow"})
    >>> params = [{"b": torch.ones(1), "w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params), params)[0]
    [{'b': tensor([-1.]), 'w': tensor([-0.1000])}]
    """

    return _by_label(transforms, lambda tree: labels_of(labels, tree))


def _by_label(transforms: Mapping[T, Transform], labels: Callable[[Tree], Tree]) -> Transform:
    def column(at, tree):
        by_leaf = at.of(labels(tree), "the labels")
        unknown = set(by_leaf) - set(transforms)
        if unknown:
            raise TransformError(
                f"labels {sorted(map(str, unknown))} have no transform; there are "
                f"{sorted(map(str, transforms))}: add one, for instance fpipe.transforms.identity()"
            )
        return by_leaf

    def init(params):
        at = places(params)
        by_leaf = column(at, params)
        return tuple(
            tx.init(at.keep([each == label for each in by_leaf]))
            for label, tx in transforms.items()
        )

    def call(grads, state, params, how):
        at = places(grads)
        by_leaf = column(at, grads if params is None else params)
        after: Column = [None] * len(by_leaf)
        states = []
        for (label, tx), part in zip(transforms.items(), state, strict=True):
            chosen = [each == label for each in by_leaf]
            own = None if params is None else at.keep(chosen, params)
            tree, part = run(tx, at.keep(chosen), part, own, how)
            states.append(part)
            if tree is not None:
                new = at.column(tree, "the updates")
                after = [
                    mine if flag else old
                    for mine, old, flag in zip(new, after, chosen, strict=True)
                ]
        return at.tree(after, None if how is None else params), tuple(states)

    return both_ways(init, call)
