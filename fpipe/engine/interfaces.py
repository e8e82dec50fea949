# SPDX-License-Identifier: Apache-2.0
"""Interfaces of stages as data for other ranks, and back.

Structures and abstract tensors are data already; dataclasses, and leaves that are not tensors, are
converted here. This module must not know groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StageError
from ..lowering.value_graph import Interface
from ..tree import AbstractLeaf, AbstractTree, Aval, Static, Structure

#: Fields of an AbstractTree and of an Interface.
TreeData = tuple[Structure, tuple[Any, ...], bool, tuple[tuple[int, int], ...]]
Data = tuple[TreeData, tuple[Any, ...], TreeData | None]


def as_data(interface: Interface) -> Data:
    """An interface as data.

    >>> import torch
    >>> y = AbstractTree.of({"y": torch.ones(2), "n": 3})
    >>> interface = Interface(y, (None, 0), (None,), (False, True), (True,), (True, False))
    >>> from_data(as_data(interface)) == interface
    True
    """
    plain = tuple([getattr(interface, name) for name in _PLAIN])
    state = interface.state
    return tree_data(interface.y), plain, None if state is None else tree_data(state)


def from_data(data: Data) -> Interface:
    """The interface that :func:`as_data` converted."""
    y, plain, state = data
    state = None if state is None else tree_from_data(state)
    return Interface(tree_from_data(y), **dict(zip(_PLAIN, plain, strict=True)), state=state)


def news_as_data(news: Sequence[Mapping[int, Interface]]) -> list[dict[int, Data]]:
    """Interfaces of stages, by kind of microbatch, as data."""
    return [{stage: as_data(new) for stage, new in of_kind.items()} for of_kind in news]


def news_from_data(news: Any) -> list[Mapping[int, Interface]]:
    """The interfaces that :func:`news_as_data` converted."""
    return [{stage: from_data(new) for stage, new in of_kind.items()} for of_kind in news]


_PLAIN = ("ys", "dxs", "dys", "reads_x", "reads_dy", "aux", "leaves")


def tree_data(tree: AbstractTree) -> TreeData:
    """An abstract tree as data."""
    return tree.spec, tuple(map(_leaf, tree.leaves)), tree.computed, tree.repeats


def tree_from_data(data: TreeData) -> AbstractTree:
    """The abstract tree that :func:`tree_data` converted."""
    spec, rows, computed, repeats = data
    leaves = [row if isinstance(row, Aval) else Static.of(*row) for row in rows]
    return AbstractTree(spec, tuple(leaves), computed, repeats)


def _leaf(leaf: AbstractLeaf) -> Any:
    """An abstract tensor as it is; another leaf in a list of one."""
    if isinstance(leaf, Static):
        return [leaf.value]
    if leaf.kind is not None:
        raise StageError(
            f"a stage returns or keeps a {leaf}, and only ordinary tensors go to other ranks; "
            "return its inner tensors"
        )
    return leaf
