# SPDX-License-Identifier: Apache-2.0
"""Batches of ``torch.distributed.pipelining`` as microbatches of fpipe.

This module must not know stages or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    split_args_kwargs_into_chunks,
)

from ... import Microbatches, tree
from ...tree import Tree

#: How each argument is split, by torch's rules.
Specs = tuple[tuple[TensorChunkSpec, ...] | None, dict[str, TensorChunkSpec] | None]


class Batch(NamedTuple):
    """Arguments, keyword arguments and targets of a step by microbatches; None where there are
    none.
    """

    x: Microbatches | None
    kwargs: Microbatches | None
    target: Microbatches | None

    def with_loss_kwargs(self, loss_kwargs: Mapping[str, Tree]) -> Batch:
        """Return the batch with targets that have the keyword arguments of the loss, unsplit.

        Numbers among these become tensors without axes: as numbers they would be part of a trace.
        """
        if self.target is None:
            raise ValueError(
                "the schedule has a loss, and the rank of the last stage got no target; pass "
                "target="
            )
        numbers = tree.tree_map(_as_tensor, loss_kwargs)
        rows = ({"target": row, "kwargs": numbers} for row in self.target)
        return self._replace(target=Microbatches(rows))


def batch_of(whole: Sequence[Tree], parts: Sequence[Tree], number: int, specs: Specs) -> Batch:
    """Return a batch from (args, kwargs, target), whole and split, as ``step`` takes them."""
    names = ("arg_mbs", "kwarg_mbs", "target_mbs")
    for one, rows, name in zip(whole, parts, names, strict=True):
        if rows is None:
            continue
        if not isinstance(rows, list):
            raise TypeError(f"{name} must be a list but got a {type(rows)}")
        if len(rows) != number:
            raise ValueError(f"Expecting {number} {name} but got {len(rows)}")
        if tree.leaves(one):
            raise ValueError(f"give {name}, or the whole batch, not both")
    args, kwargs, target = whole
    arg_mbs, kwarg_mbs, target_mbs = parts
    if arg_mbs is None and kwarg_mbs is None:
        arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, number, *specs)
    if target_mbs is None and target is not None:
        target_mbs = [row for (row,) in split_args_kwargs_into_chunks((target,), None, number)[0]]
    rows = None if arg_mbs is None else list(map(tuple, arg_mbs))
    return Batch(*(_microbatches(part, number) for part in (rows, kwarg_mbs, target_mbs)))


def _microbatches(rows: list[Tree] | None, number: int) -> Microbatches | None:
    if rows is None or not tree.leaves(rows):
        return None
    if len(rows) != number:
        raise ValueError(
            f"the batch makes {len(rows)} microbatches, not {number}; give tensors with rows"
        )
    return Microbatches(rows)


def _as_tensor(leaf: Tree) -> Tree:
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        return torch.tensor(leaf)
    return leaf
