# SPDX-License-Identifier: Apache-2.0
"""Where a tree has leaves, and the leaves, masks and labels of other trees at the same places.

Gradients have ``None`` for stages on other processes and for frozen leaves, where parameters and
state may have a leaf. This module aligns such trees, groups leaves by device and dtype so that a
kernel runs once for each group, and decides whether autograd records. It must not know ranks or any
single transform.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..errors import TransformError
from ..programs.internals import setting
from ..programs.tensor_state import wrapped
from ..tree import NAMESPACE, Structure, Tree, is_floating, matches, names, tree_map, unmatched
from . import foreach as F

#: One value per leaf, in the order of the leaves.
Column: TypeAlias = list[Tree]
#: a function of the parameters, patterns such as ``["*.norm", "0.*"]``, or a tree of bools (or a
#: prefix of one)
Mask: TypeAlias = Callable[[Tree], Tree] | Sequence[str] | Tree
#: a function of the parameters, ``{pattern: label}`` (the first match counts), or a tree of labels
#: (or a prefix of one)
Labels: TypeAlias = Callable[[Tree], Tree] | Mapping[str, str] | Tree


class Places(NamedTuple):
    """The leaves of a tree and their positions in it.

    >>> at = places([None, {"w": 1, "frozen": None}])
    >>> at.leaves, at.of([{"w": 8}, {"w": 2, "frozen": 9}], "params")
    ([1], [2])
    >>> at.tree([5]), at.tree([5], base=[None, {"w": 2, "frozen": 9}])
    ([None, {'w': 5, 'frozen': None}], [None, {'w': 5, 'frozen': 9}])
    """

    spec: Structure
    where: list[int]
    leaves: Column

    def of(self, other: Tree, what: str) -> Column:
        """The leaves of another tree at these places; ``what`` names that tree in errors."""
        column = self.column(other, what)
        missing = [index for index, leaf in enumerate(column) if leaf is None]
        if missing:
            raise TransformError(
                f"{what} has None where the gradients have a leaf: "
                f"{', '.join(self.names(missing))}; pass the trees of one pipeline, each with one "
                "entry per stage"
            )
        for index, (leaf, mine) in enumerate(zip(column, self.leaves, strict=True)):
            if getattr(leaf, "shape", None) not in (None, getattr(mine, "shape", None)):
                raise TransformError(
                    f"{what} has shape {list(leaf.shape)} at {self.names([index])[0]!r}, and the "
                    f"gradient {list(mine.shape)}; pass the gradients of these parameters"
                )
        return column

    def column(self, other: Tree, what: str) -> Column:
        """What another tree has at these places, None and whole subtrees included."""
        everything = self._flat(other, what)
        return [everything[index] for index in self.where]

    def tree(self, leaves: Iterable[object], base: Tree = None) -> Tree:
        """A tree with these leaves; at other places what ``base`` has there, or None."""
        column: Column = [None] * self.spec.num_leaves
        if base is not None:
            column = list(self._flat(base, "the state"))
        for index, leaf in zip(self.where, leaves, strict=True):
            column[index] = leaf
        return optree.tree_unflatten(self.spec, column)

    def keep(self, flags: Sequence[bool], tree: Tree = None) -> Tree:
        """This tree, or another one at its places, with None where a flag is false."""
        leaves = self.leaves if tree is None else self.of(tree, "params")
        return self.tree([leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)])

    def stages(self) -> list[int]:
        """The stage of each leaf: its index in a list with one entry per stage, 0 in any other
        tree.
        """
        if self.spec.type not in (list, tuple):
            return [0] * len(self.leaves)
        paths = self.spec.paths()
        return [paths[index][0] for index in self.where]

    def all_names(self) -> list[str]:
        """The dotted names of all places, with and without a leaf."""
        return names(optree.tree_unflatten(self.spec, range(self.spec.num_leaves)))

    def names(self, indices: Iterable[int]) -> list[str]:
        """The dotted names of some of the leaves."""
        every = self.all_names()
        return [every[self.where[index]] for index in indices]

    def missing(self) -> list[str]:
        """The dotted names of the places without a leaf."""
        present = set(self.where)
        return [name for index, name in enumerate(self.all_names()) if index not in present]

    def _flat(self, other: Tree, what: str) -> Column:
        try:
            return self.spec.flatten_up_to(other)
        except ValueError as error:
            raise TransformError(
                f"{what} does not have the form of the gradients: {brief(error)}; pass the trees "
                "of one pipeline, each with one entry per stage"
            ) from error


def places(tree: Tree) -> Places:
    """Flatten a tree once."""
    column, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    where = [index for index, leaf in enumerate(column) if leaf is not None]
    return Places(spec, where, [column[index] for index in where])


def brief(error: Exception) -> str:
    """optree's message about two trees, without the tensors in it.

    >>> brief(ValueError("list arity mismatch; expected: 2, got: 1; list: [tensor([1., 2.])]."))
    'list arity mismatch; expected: 2, got: 1'
    """
    return re.split(r"; \w+: [\[({]|, got (?:tensor|[\[({])", str(error))[0].rstrip(".")[:300]


def kind(leaf: Tensor) -> Hashable:
    """What the leaves of one kernel have in common: device, dtype, and the mesh of a DTensor."""
    return leaf.device, leaf.dtype, F.mesh_of(leaf)


def by_kind(
    kernel: Callable[..., Sequence[Column]],
    *columns: Column,
    keys: Sequence[Hashable] | None = None,
) -> list[Column]:
    """Run a kernel on columns, once for each key, by default each kind in the first column.

    The result is the kernel's columns in the original order.

    >>> columns = [torch.ones(2), torch.ones(2).double(), torch.zeros(3)]
    >>> by_kind(lambda xs: print(len(xs)) or [xs], columns)[0] == columns
    2
    1
    True
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, leaf in enumerate(columns[0]):
        groups[kind(leaf) if keys is None else keys[index]].append(index)
    merged = []
    for indices in groups.values():
        parts = kernel(*([column[i] for i in indices] for column in columns))
        merged = merged or [[None] * len(columns[0]) for _ in parts]
        for column, part in zip(merged, parts, strict=True):
            for index, leaf in zip(indices, part, strict=True):
                column[index] = leaf
    return merged


def map_kinds(
    kernel: Callable[..., Column], *columns: Column, keys: Sequence[Hashable] | None = None
) -> Column:
    """:func:`by_kind` for a kernel that returns one column, and that is not called without
    leaves.
    """
    if columns[0]:
        return by_kind(lambda *parts: [kernel(*parts)], *columns, keys=keys)[0]
    return []


def scaled(leaves: list[Tensor], factor: float | Tensor | None) -> list[Tensor]:
    """Every leaf times a number, or times a tensor without axes in the leaf's dtype; None stands
    for 1.
    """

    def kernel(xs):
        if isinstance(factor, Tensor):
            return F.mul(xs, factor.to(xs[0].device, xs[0].dtype))
        return F.mul(xs, factor)

    if factor is None:
        return leaves
    return map_kinds(kernel, leaves)


@contextmanager
def recording(*columns: Iterable[object]) -> Iterator[None]:
    """Autograd records only where an argument requires a gradient: meta-gradients work, and loops
    keep no graph.

    >>> with recording([torch.ones(1)]):
    ...     torch.is_grad_enabled()
    False
    """
    tensors = [leaf for column in columns for leaf in column if isinstance(leaf, Tensor)]
    recorded = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors)
    # forward mode and vmap do not set requires_grad
    transformed = F.TRANSFORMED.get() or wrapped(*tensors)
    with setting(F.TRANSFORMED, transformed), torch.set_grad_enabled(recorded):
        yield


def zeros(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros for every leaf that can carry a gradient, None for the others."""
    return tree_map(
        lambda leaf: torch.zeros_like(leaf, dtype=dtype) if is_floating(leaf) else None, params
    )


def count() -> Tensor:
    """A counter at zero: a tensor, because a state has only tensors, and on the CPU, where reading
    it is fast.
    """
    return torch.zeros((), dtype=torch.int64)


# ---- masks and labels ----
def mask_of(mask: Mask, tree: Tree) -> Tree:
    """True or False for each leaf.

    >>> params = [{"b": 2, "w": 1}, None, {"w": 3}]
    >>> mask_of(["*.w"], params)
    [{'b': False, 'w': True}, None, {'w': True}]
    >>> mask_of([True, {"any": False}, False], params)
    [{'b': True, 'w': True}, None, {'w': False}]
    """
    if isinstance(mask, str):
        raise TransformError(f"mask={mask!r}; give a list of patterns such as [{mask!r}]")
    if isinstance(mask, (list, tuple)) and mask and all(isinstance(item, str) for item in mask):
        return _by_name({**dict.fromkeys(mask, True), "*": False}, tree)
    return _spread(mask, tree)


def labels_of(labels: Labels, tree: Tree) -> Tree:
    """A label for each leaf.

    >>> params = [{"b": 2, "w": 1}, None, {"w": 3}]
    >>> labels_of({"0.*": "first", "*": "rest"}, params)
    [{'b': 'first', 'w': 'first'}, None, {'w': 'rest'}]
    >>> labels_of(["first", "second", "third"], params)
    [{'b': 'first', 'w': 'first'}, None, {'w': 'third'}]
    """
    if not isinstance(labels, Mapping) or isinstance(tree, Mapping):
        return _spread(labels, tree)
    return _by_name(labels, tree)


def flags(at: Places, mask: Mask | None, params: Tree) -> list[bool]:
    """A mask at the places of the gradients; without a mask, True everywhere."""
    if mask is None:
        return [True] * len(at.leaves)
    return [bool(flag) for flag in at.of(mask_of(mask, params), "the mask")]


def _by_name(labels: Mapping[str, object], tree: Tree) -> Tree:
    """The label of the first pattern that fits, for each leaf.

    A pattern that matches no leaf is a mistake, unless it may match one of a stage on another
    process.
    """
    at = places(tree)
    every = at.names(range(len(at.leaves)))
    column: Column = []
    for name in every:
        fitting = [label for pattern, label in labels.items() if matches(name, [pattern])]
        if not fitting:
            raise TransformError(
                f"no pattern of {list(labels)} fits {name!r}; end with a pattern '*' for all the "
                "rest"
            )
        column.append(fitting[0])
    fault = unmatched(labels, every) and unmatched(labels, every, at.missing())
    if fault and at.spec.num_leaves:
        raise TransformError(
            f"pattern {fault}; a pattern is the path of a leaf or a subtree, as '0.norm' or "
            "'*.bias'"
        )
    return at.tree(column)


def _spread(labels: Tree, tree: Tree) -> Tree:
    """Labels from a function of the tree, or from a tree of which each label covers a leaf or a
    subtree.
    """
    if callable(labels):
        labels = labels(tree)
    if (
        isinstance(labels, (list, tuple))
        and type(labels) is type(tree)
        and len(labels) == len(tree)
    ):
        pairs = zip(labels, tree, strict=True)  # there may be labels for stages on other processes
        labels = type(tree)([None if part is None else label for label, part in pairs])
    try:
        return optree.tree_broadcast_prefix(labels, tree, namespace=NAMESPACE)  # type: ignore[arg-type]
    except ValueError as error:
        raise TransformError(
            f"these labels do not fit the parameters: {brief(error)}; give a function of the "
            "parameters, patterns of names such as '0.*' or '*.norm', or a tree with a label "
            "wherever the parameters have a leaf or a subtree"
        ) from error
