# SPDX-License-Identifier: Apache-2.0
"""Batches of ``torch.distributed.pipelining`` as microbatches of fpipe, and outputs as a batch.

This module must not know stages or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from ... import Microbatches, tree
from ...tree import Tree

#: How each argument is split, by torch's rules.
Specs = tuple[tuple[TensorChunkSpec, ...] | None, dict[str, TensorChunkSpec] | None]


class Batch(NamedTuple):
    """Arguments, keyword arguments and targets of a step, each whole or in Microbatches."""

    number: int
    x: Tree
    kwargs: Tree
    target: Tree  # None where there is none

    def targets(self, loss_kwargs: Mapping[str, Tree]) -> Tree:
        """Return the targets with the keyword arguments of the loss, which are not split.

        Numbers among these become tensors without axes: as numbers they would be part of a trace.
        """
        if self.target is None:
            raise ValueError(
                "the schedule has a loss, and the rank of the last stage got no target; pass "
                "target="
            )
        if not isinstance(self.target, Microbatches) and not loss_kwargs:
            return {"target": self.target, "kwargs": {}}
        numbers = tree.tree_map(_as_tensor, loss_kwargs)
        rows = microbatches(self.target, self.number)
        return Microbatches({"target": row, "kwargs": numbers} for row in rows)


def batch_of(whole: Sequence[Tree], parts: Sequence[Tree], number: int, specs: Specs) -> Batch:
    """Return a batch from (args, kwargs, target), whole and split, as ``step`` takes them."""
    names = ("arg_mbs", "kwarg_mbs", "target_mbs")
    for one, rows, name in zip(whole, parts, names, strict=True):
        if rows is not None and not isinstance(rows, list):
            raise TypeError(f"{name} must be a list but got a {type(rows)}")
        if rows is not None and len(rows) != number:
            raise ValueError(f"Expecting {number} {name} but got {len(rows)}")
        if rows is not None and tree.leaves(one):
            raise ValueError(f"give {name}, or the whole batch, not both")
    (x, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs) = whole, parts
    if arg_mbs is not None or kwarg_mbs is not None:
        x = () if arg_mbs is None else Microbatches(map(tuple, arg_mbs))
        kwargs = Microbatches(kwarg_mbs) if kwarg_mbs and any(kwarg_mbs) else {}
    elif specs != (None, None) or not _is_even((x, kwargs), number):
        rows, sides = split_args_kwargs_into_chunks(x, kwargs, number, *specs)
        if len(rows) != number:
            raise ValueError(
                f"the batch makes {len(rows)} microbatches, not {number}; give tensors with rows"
            )
        x, kwargs = Microbatches(rows), Microbatches(sides) if kwargs else {}
    if target_mbs is not None:
        target = Microbatches(target_mbs)
    elif isinstance(target, torch.Tensor) and not _is_even(target, number):
        target = Microbatches(torch.tensor_split(target, number))
    return Batch(number, x, kwargs, target)


def microbatches(value: Tree, number: int) -> list[Tree]:
    """Return a part of a batch, microbatch by microbatch."""
    if isinstance(value, Microbatches):
        return list(value)
    if not tree.leaves(value):
        return [value] * number
    return [row for (row,) in split_args_kwargs_into_chunks((value,), None, number)[0]]


def _as_tensor(leaf: Tree) -> Tree:
    is_number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    return torch.tensor(leaf) if is_number else leaf


def _is_even(value: Tree, number: int) -> bool:
    """Return whether fpipe splits tensors as torch does: into equal parts of plain tensors."""
    leaves = [leaf for leaf in tree.leaves(value) if not isinstance(leaf, (int, float, str, bool))]
    return all(
        type(leaf) is torch.Tensor and leaf.dim() > 0 and len(leaf) > 0 and not len(leaf) % number
        for leaf in leaves
    )


def merged(outputs: Sequence[Tree], spec: Tree) -> Tree:
    """Return the outputs of the microbatches as one batch."""
    if spec is None and all(isinstance(y, torch.Tensor) and y.dim() > 0 for y in outputs):
        return torch.cat(list(outputs))
    return merge_chunks(list(outputs), spec)
