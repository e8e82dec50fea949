"""A word for every leaf: masks and labels, told by functions, by patterns of names, or by prefixes of the tree.

Knows nothing of what the words mean to a transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import optree

from ..errors import TransformError
from ..tree import NAMESPACE, Tree, matches, names
from ._places import Places, brief

#: a function of the parameters, patterns such as ``["*.norm", "0.*"]``, or a tree of bools (a prefix will do)
Mask: TypeAlias = Callable[[Tree], Any] | Sequence[str] | Tree
#: a function of the parameters, ``{pattern: label}`` (the first that fits counts), or a tree of labels (or a prefix)
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
        return _by_name(tree, lambda name: _first(name, labels))
    return _spread(labels, tree)


def flags(at: Places, mask: Mask | None, params: Tree) -> list[bool]:
    """A mask at the places of the gradients; no mask is True everywhere."""
    if mask is None:
        return [True] * len(at.leaves)
    return [bool(flag) for flag in at.of(mask_of(mask, params), "the mask")]


def _by_name(tree: Tree, word: Callable[[str], Any]) -> Tree:
    spec = optree.tree_structure(tree, namespace=NAMESPACE)
    return optree.tree_unflatten(spec, [word(name) for name in names(tree)])


def _first(name: str, labels: Mapping[str, str]) -> str:
    for pattern, label in labels.items():
        if matches(name, [pattern]):
            return label
    raise TransformError(f"no pattern of {list(labels)} fits {name!r}; end with a pattern '*' for all the rest")


def _spread(words: Any, tree: Tree) -> Tree:
    if callable(words):
        words = words(tree)
    if isinstance(words, (list, tuple)) and type(words) is type(tree) and len(words) == len(tree):
        pairs = zip(words, tree, strict=True)  # words may know stages that live elsewhere
        words = type(tree)([None if part is None else word for word, part in pairs])
    try:
        return optree.tree_broadcast_prefix(words, tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    except ValueError as error:
        raise TransformError(
            f"these labels do not fit the parameters: {brief(error)}; give a function of the parameters, patterns of "
            f"names such as '0.*' or '*.norm', or a tree with a label wherever the parameters have a leaf or a subtree"
        ) from error
