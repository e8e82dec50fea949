"""Transforms for a part of the leaves: the others are ``None`` for them, as a stage that lives elsewhere is.

A transform inside therefore needs no case of its own. Every one runs on every process, also where it has no leaf, so
that what it asks of other processes is asked by all. Knows no single transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TransformError
from ..tree import Tree, leaves
from ._base import State, Transform
from ._labels import Labels, Mask, labels_of, mask_of
from ._late import donating
from ._places import Column, Places, places


def masked(inner: Transform, mask: Mask) -> Transform:
    """A transform of the chosen leaves; the others' updates pass as they are.

    >>> import torch
    >>> from fpipe.transforms import scale
    >>> tx = masked(scale(2.0), ["1.*"])
    >>> params = [{"w": torch.ones(1)}, {"w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params))[0]
    [{'w': tensor([1.])}, {'w': tensor([2.])}]
    """

    def init(params: Tree) -> State:
        return inner.init(_part(params, mask_of(mask, params), True))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        words = at.of(mask_of(mask, grads if params is None else params), "the mask")
        after = list(at.leaves)
        state = _run(inner, at, [bool(word) for word in words], state, params, after)
        return at.tree(after), state

    donating(update, inner.update)
    return Transform(init, update)


def partition(transforms: Mapping[str, Transform], labels: Labels) -> Transform:
    """A transform for each label; ``labels`` gives every leaf one.

    Labels are ``{pattern: label}`` (the first pattern that fits a leaf's name counts), a function of the parameters,
    or a tree with a label wherever the parameters have a leaf or a subtree, for instance one per stage. The state is
    the tuple of the transforms' states, in their order.

    >>> import torch
    >>> from fpipe.transforms import adamw, sgd
    >>> tx = partition({"slow": sgd(0.1), "fast": sgd(1.0)}, {"*.b": "fast", "*": "slow"})
    >>> params = [{"b": torch.ones(1), "w": torch.ones(1)}]
    >>> tx.update(params, tx.init(params), params)[0]
    [{'b': tensor([-1.]), 'w': tensor([-0.1000])}]
    """

    def init(params: Tree) -> State:
        words = labels_of(labels, params)
        _check(set(leaves(words)), transforms)
        return tuple(transform.init(_part(params, words, label)) for label, transform in transforms.items())

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        words = at.of(labels_of(labels, grads if params is None else params), "the labels")
        _check(set(words), transforms)
        after: Column = list(at.leaves)
        states = []
        for (label, transform), part in zip(transforms.items(), state, strict=True):
            states.append(_run(transform, at, [word == label for word in words], part, params, after))
        return at.tree(after), tuple(states)

    donating(update, *(transform.update for transform in transforms.values()))
    return Transform(init, update)


def _part(tree: Tree, words: Tree, label: Any) -> Tree:
    """A tree with None where another word stands."""
    at = places(tree)
    return at.keep([word == label for word in at.of(words, "the labels")])


def _run(inner: Transform, at: Places, chosen: list[bool], state: State, params: Tree, after: Column) -> State:
    """Update the chosen leaves; their updates go into ``after``, and None where there is no step."""
    weights = None if params is None else at.keep(chosen, params)
    updates, state = inner.update(at.keep(chosen), state, weights)
    column = [None] * len(after) if updates is None else at.column(updates, "the updates")
    if updates is not None:
        column = [column[index] for index in at.where]
    for spot, flag in enumerate(chosen):
        if flag:
            after[spot] = column[spot]
    return state


def _check(words: set[Any], transforms: Mapping[str, Transform]) -> None:
    unknown = words - set(transforms)
    if unknown:
        raise TransformError(
            f"labels {sorted(map(str, unknown))} have no transform; there are {sorted(transforms)}: "
            f"add one, fpipe.for instance identity()"
        )
