# SPDX-License-Identifier: Apache-2.0
"""Batch arguments cut into microbatches, and the weights of their losses.

The first axis of every tensor leaf of a batch is the batch axis; leaves that are not tensors are
passed to every microbatch as they are. Knows no stages and no ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import torch

from .. import tree
from ..actions.product import feature
from ..tree import Tree
from . import mistakes
from .microbatches import Absent, Microbatches, count_of, each_of


def count(batches: Sequence[Tree], microbatches: int | None) -> int:
    """The number of microbatches of a call: that of its ``Microbatches``, else that of the
    pipeline.

    >>> count([Microbatches([1, 2, 3]), torch.ones(4)], 4)
    3
    """
    given = [batch for batch in batches if isinstance(batch, Microbatches)]
    if given or microbatches is None:
        return count_of(given)
    return microbatches


def _stand_ins(leaves: list[Any], name: str) -> tuple[list[Any], bool]:
    """Leaves with stand-ins for those that are elsewhere, and whether the argument is."""
    if not any(isinstance(leaf, Absent) for leaf in leaves):
        return leaves, False
    return feature("elsewhere.arguments").stand_ins(leaves, name)


def _can_cut(leaf: torch.Tensor, parts: int, shared_scalars: bool) -> bool:
    """Whether a tensor has equal parts, or is the same for all."""
    if leaf.dim() == 0:
        return shared_scalars
    return leaf.layout is torch.strided and leaf.shape[0] % parts == 0


def _split_leaf(leaf: Any, parts: int) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not leaf.shape[0]:
        return [leaf] * parts
    return leaf.chunk(parts)  # equal ones, since they divide the rows


class Parts:
    """A batch argument as flat leaves, microbatch by microbatch: ``rows[m]`` under ``specs[m]``.

    ``leaves`` are those that were passed, and ``structure`` is that of the batch, or of each of its
    parts. ``uniform`` says that all rows have one shape, so that the first row describes all. A
    batch is checked at once but cut only when its rows are read: most ranks read none. With
    ``shared_scalars`` a tensor without axes is the same for every microbatch; without it, it is an
    error. ``absent``: another process has it, and tensors have no data here. With ``slices`` each
    row is one slice of a microbatch: leaves with two axes or more are cut along the second one, and
    others are those of all slices.

    >>> Parts(torch.arange(4), 2, "x").rows
    [(tensor([0, 1]),), (tensor([2, 3]),)]
    """

    def __init__(
        self, batch: Tree, parts: int, name: str, shared_scalars: bool = False, slices: int = 1
    ):
        self.name = name
        self.uniform = not isinstance(batch, Microbatches)
        self.slices = slices
        if self.uniform:
            leaves, self.structure = tree.flatten(batch)
            self.leaves, self.absent = _stand_ins(leaves, name)
            self.specs = [self.structure] * (parts * slices)
            for leaf in filter(tree.is_tensor, self.leaves):
                if not _can_cut(leaf, parts, shared_scalars):
                    raise mistakes.uncut(leaf, parts, name)
            if slices > 1:
                feature("slicing").check(self.leaves, self.structure, name, slices)
        else:
            flat = [
                (*tree.flatten(part), f"{name}[{m}]")
                for m, part in enumerate(each_of(batch, parts, name))
            ]
            rows = [_stand_ins(leaves, which) for leaves, _, which in flat]
            self.leaves = [leaf for leaves, _ in rows for leaf in leaves]
            self.absent = any(absent for _, absent in rows)
            for (leaves, _), (_, spec, which) in zip(rows, flat, strict=True) if slices > 1 else ():
                feature("slicing").check(leaves, spec, which, slices)
            self.structure = tuple(spec for _, spec, _ in flat)
            self.specs = [spec for spec in self.structure for _ in range(slices)]

    @property
    def unknown(self) -> bool:
        """Whether it is elsewhere and its shapes are not known here."""
        return self.absent and any(isinstance(leaf, Absent) for leaf in self.leaves)

    @cached_property
    def rows(self) -> Sequence[Sequence[Any]]:
        """The leaves of every microbatch: views of the caller's tensors."""
        if not self.uniform:
            following = iter(self.leaves)
            whole = self.specs[:: self.slices]
            rows: list[Sequence[Any]] = [list(islice(following, spec.num_leaves)) for spec in whole]
        else:
            parts = len(self.specs) // self.slices
            columns = [_split_leaf(leaf, parts) for leaf in self.leaves]
            rows = list(zip(*columns, strict=True)) if columns else [()] * parts
        if self.slices == 1:
            return rows
        sliced = feature("slicing").sliced
        return [part for row in rows for part in sliced(row, self.slices)]

    def tree(self, mb: int) -> Tree:
        """One microbatch as a pytree."""
        return tree.unflatten(self.specs[mb], self.rows[mb])


@dataclass(frozen=True)
class Weights:
    """The weight of each microbatch's loss: one number for all, or a tensor each.

    Gradients, not the value, are multiplied by ``loss_scale`` too.
    """

    number: float | None
    each: Sequence[torch.Tensor] = ()
    loss_scale: float | torch.Tensor | None = None

    def cotangent(self, mb: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The cotangent of a microbatch's loss."""
        weight = self.number if self.number is not None else self.each[mb]
        weight = weight if self.loss_scale is None else weight * self.loss_scale
        return (
            weight.to(device, dtype)
            if isinstance(weight, torch.Tensor)
            else _constant(weight, dtype, device)
        )


@lru_cache(maxsize=256)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype, device=device)


# ---- scalars ----
# On a CPU they go through Python's own numbers, since a few operations on single elements cost as
# much as a small stage. A product or a sum of two float32 numbers, taken in float64 and rounded
# once, has the bits of float32's own.

#: The dtypes whose numbers can be computed with here, and how they are rounded: Python's own are
#: float64.
_NARROW = {torch.float64: False, torch.float32: True}


def added(values: Sequence[torch.Tensor], weight: float | None = None) -> torch.Tensor:
    """Their sum, in order, each times the weight: as one process that runs the microbatches in turn
    adds them.

    >>> added([torch.tensor(1.0), torch.tensor(2.0)], 0.5)
    tensor(1.5000)
    """
    where = values[0].device
    dtype = values[0].dtype
    narrow = _NARROW.get(dtype)
    if narrow is not None and all(value.is_cpu and value.dtype is dtype for value in values):
        total = _in_python([value.item() for value in values], weight, narrow)
        return torch.full((), total, dtype=dtype, device="cpu")  # whatever the default device is
    row = torch.stack([value.to(where) for value in values])
    total, *rest = (row if weight is None else row.mul_(weight)).unbind()
    total = total.clone()
    for value in rest:
        total.add_(value)
    return total


def _in_python(numbers: Sequence[float], weight: float | None, narrow: bool) -> float:
    if weight is not None:
        weight = c_float(weight).value if narrow else weight
        numbers = [number * weight for number in numbers]
        numbers = array("f", numbers) if narrow else numbers
    total = numbers[0]
    for number in numbers[1:]:
        total += number
        total = c_float(total).value if narrow else total
    return total
