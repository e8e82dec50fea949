# SPDX-License-Identifier: Apache-2.0
"""Where a tree has leaves, and the leaves of other trees at the same places.

Gradients have ``None`` for stages on other processes and for frozen leaves, where parameters and state may have a leaf.
This module aligns such trees, groups leaves by device and dtype so that a kernel runs once for each group, and decides
whether autograd records. It must not know ranks or any single transform.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..errors import TransformError
from ..programs.functorch import wrapped
from ..tree import NAMESPACE, Structure, Tree, is_floating, names, tree_map
from . import _foreach as F

#: One value per leaf, in the order of the leaves.
Column: TypeAlias = list[Any]


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
        if any(leaf is None for leaf in column):
            missing = [index for index, leaf in enumerate(column) if leaf is None]
            raise TransformError(
                f"{what} has None where the gradients have a leaf: {', '.join(self.names(missing))}; "
                f"pass the trees of one pipeline, each with one entry per stage"
            )
        return column

    def column(self, other: Tree, what: str) -> Column:
        """What another tree has at these places, None and whole subtrees included."""
        everything = self._flat(other, what)
        return [everything[index] for index in self.where]

    def tree(self, leaves: Iterable[Any], base: Tree = None) -> Tree:
        """A tree with these leaves; at other places what ``base`` has there, or None."""
        column = [None] * self.spec.num_leaves if base is None else list(self._flat(base, "the state"))
        for index, leaf in zip(self.where, leaves, strict=True):
            column[index] = leaf
        return optree.tree_unflatten(self.spec, column)

    def keep(self, flags: Sequence[bool], tree: Tree = None) -> Tree:
        """This tree, or another one at its places, with None where a flag is false."""
        leaves = self.leaves if tree is None else self.of(tree, "params")
        return self.tree([leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)])

    def names(self, indices: Iterable[int]) -> list[str]:
        """The dotted names of some of the leaves."""
        every = names(optree.tree_unflatten(self.spec, range(self.spec.num_leaves)))
        return [every[self.where[index]] for index in indices]

    def _flat(self, other: Tree, what: str) -> Column:
        try:
            return self.spec.flatten_up_to(other)
        except ValueError as error:
            raise TransformError(
                f"{what} does not have the form of the gradients: {brief(error)}; pass the trees of one pipeline, "
                f"each with one entry per stage"
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


def by_kind(kernel: Callable[..., Sequence[Column]], first: list[Tensor], *rest: Column) -> list[Column]:
    """Run a kernel on columns, once for each device and dtype in the first; its columns, in the original order.

    >>> columns = [torch.ones(2), torch.ones(2).double(), torch.zeros(3)]
    >>> by_kind(lambda xs: print(len(xs)) or [xs], columns)[0] == columns
    2
    1
    True
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, leaf in enumerate(first):
        kinds.setdefault((leaf.device, leaf.dtype), []).append(index)
    if len(kinds) <= 1:
        return list(kernel(first, *rest))
    merged: list[Column] = []
    for indices in kinds.values():
        parts = kernel(*([column[i] for i in indices] for column in (first, *rest)))
        merged = merged or [[None] * len(first) for _ in parts]
        for column, part in zip(merged, parts, strict=True):
            for index, leaf in zip(indices, part, strict=True):
                column[index] = leaf
    return merged


def map_kinds(kernel: Callable[..., Column], first: list[Tensor], *rest: Column) -> Column:
    """:func:`by_kind` for a kernel that returns one column."""
    return by_kind(lambda *columns: [kernel(*columns)], first, *rest)[0]


@contextmanager
def recording(*columns: Iterable[Any]) -> Iterator[None]:
    """Autograd records only where an argument requires a gradient: meta-gradients work, and loops keep no graph.

    >>> with recording([torch.ones(1)]):
    ...     torch.is_grad_enabled()
    False
    """
    tensors = [leaf for column in columns for leaf in column if isinstance(leaf, Tensor)]
    carried = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors)
    # forward mode and vmap do not set requires_grad
    with torch.set_grad_enabled(carried), F.transformed() if wrapped(*tensors) else nullcontext():
        yield


def zeros(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros for every leaf that can carry a gradient, None for the others."""
    return tree_map(lambda leaf: torch.zeros_like(leaf, dtype=dtype) if is_floating(leaf) else None, params)


def count() -> Tensor:
    """A counter at zero: a tensor, because a state has only tensors, and on the CPU, where reading it is fast."""
    return torch.zeros((), dtype=torch.int64)
