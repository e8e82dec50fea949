# SPDX-License-Identifier: Apache-2.0
"""Microbatches cut into slices along the second axis, that of the sequence (``slices=``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..engine.parts import Parts
from ..errors import BatchError
from ..tree import Tree


def check(leaves: Sequence[Any], structure: tree.Structure, name: str, slices: int) -> None:
    """Raise BatchError where a leaf cannot be cut into equal slices."""
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] % slices:
            where = ".".join(map(str, path))
            raise BatchError(
                f"{name}{f' has the leaf {where!r}' if where else ' is a tensor'} of shape "
                f"{list(leaf.shape)}, and {slices} slices do not divide the {leaf.shape[1]} of its "
                f"second axis; pad it to {-(-leaf.shape[1] // slices) * slices}, or change slices="
            )


def sliced(row: Sequence[Any], slices: int) -> Sequence[Sequence[Any]]:
    """The leaves of a microbatch by slice: views along the second axis of those that have one, the
    others as they are.

    >>> sliced([torch.arange(4)[None], 7], 2)
    [(tensor([[0, 1]]), 7), (tensor([[2, 3]]), 7)]
    """

    def cut(leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return [leaf] * slices
        size = leaf.shape[1] // slices
        return [leaf.narrow(1, step * size, size) for step in range(slices)]

    return list(zip(*map(cut, row), strict=True)) or [()] * slices


def gradients(parts: Sequence[Tree], x: Parts) -> Sequence[Tree]:
    """The gradients of x by microbatch, from those by slice: added for leaves that every slice gets
    whole, in the order of the backwards.
    """
    if x.slices == 1:
        return parts
    gradients = []
    for first in range(0, len(parts), x.slices):
        structure = x.structures[first]
        rows = [structure.flatten_up_to(part) for part in parts[first : first + x.slices]]
        columns = zip(*rows, strict=True)
        gradients.append(tree.unflatten(structure, map(_whole, x.rows[first], columns)))
    return gradients


def _whole(leaf: Any, column: Sequence[Any]) -> Any:
    """The gradient of a leaf, from those by slice."""
    if column[0] is None:
        return None
    if isinstance(leaf, Tensor) and leaf.dim() > 1:
        return torch.cat(list(column), 1)
    return reduce(torch.add, reversed(column))
