# SPDX-License-Identifier: Apache-2.0
"""Masks and labels: a bool or a string for every leaf, from functions, patterns of names, or prefixes of the tree.

This module must not know what a transform does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import optree

from ..errors import TransformError
from ..tree import NAMESPACE, Tree, matches, names
from ._places import Places, brief

#: a function of the parameters, patterns such as ``["*.norm", "0.*"]``, or a tree of bools (or a prefix of one)
Mask: TypeAlias = Callable[[Tree], Any] | Sequence[str] | Tree
#: a function of the parameters, ``{pattern: label}`` (the first match counts), or a tree of labels (or a prefix of one)
Labels: TypeAlias = Callable[[Tree], Any] | Mapping[str, str] | Tree


def mask_of(mask: Mask, tree: Tree) -> Tree:
    """True or False for each leaf.

    >>> params = [{"b": 2, "w": 1}, None, {"w": 3}]
    >>> mask_of(["*.w"], params)
    [{'b': False, 'w': True}, None, {'w': True}]
    >>> mask_of([True, {"any": False}, False], params)
    [{'b': True, 'w': True}, None, {'w': False}]
    """
    if isinstance(mask, (list, tuple)) and mask and all(isinstance(item, str) for item in mask):
        return _by_name(tree, lambda name: matches(name, mask))
    return _spread(mask, tree)


def labels_of(labels: Labels, tree: Tree) -> Tree:
    """A label for each leaf.

    >>> params = [{"b": 2, "w": 1}, None, {"w": 3}]
    >>> labels_of({"0.*": "first", "*": "rest"}, params)
    [{'b': 'first', 'w': 'first'}, None, {'w': 'rest'}]
    >>> labels_of(["first", "second", "third"], params)
    [{'b': 'first', 'w': 'first'}, None, {'w': 'third'}]
    """
    if isinstance(labels, Mapping) and not isinstance(tree, Mapping):
        return _by_name(tree, lambda name: _first_match(name, labels))
    return _spread(labels, tree)


def flags(at: Places, mask: Mask | None, params: Tree) -> list[bool]:
    """A mask at the places of the gradients; without a mask, True everywhere."""
    if mask is None:
        return [True] * len(at.leaves)
    return [bool(flag) for flag in at.of(mask_of(mask, params), "the mask")]


def _by_name(tree: Tree, label: Callable[[str], Any]) -> Tree:
    """A tree with ``label(name)`` for each leaf: the one place where patterns meet the names of a tree."""
    spec = optree.tree_structure(tree, namespace=NAMESPACE)
    return optree.tree_unflatten(spec, [label(name) for name in names(tree)])


def _first_match(name: str, labels: Mapping[str, str]) -> str:
    for pattern, label in labels.items():
        if matches(name, [pattern]):
            return label
    raise TransformError(f"no pattern of {list(labels)} fits {name!r}; end with a pattern '*' for all the rest")


def _spread(labels: Any, tree: Tree) -> Tree:
    """Labels from a function of the tree, or from a tree of which each label covers a leaf or a subtree."""
    if callable(labels):
        labels = labels(tree)
    if isinstance(labels, (list, tuple)) and type(labels) is type(tree) and len(labels) == len(tree):
        pairs = zip(labels, tree, strict=True)  # there may be labels for stages on other processes
        labels = type(tree)([None if part is None else label for label, part in pairs])
    try:
        return optree.tree_broadcast_prefix(labels, tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    except ValueError as error:
        raise TransformError(
            f"these labels do not fit the parameters: {brief(error)}; give a function of the parameters, patterns of "
            f"names such as '0.*' or '*.norm', or a tree with a label wherever the parameters have a leaf or a subtree"
        ) from error
