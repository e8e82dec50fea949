# SPDX-License-Identifier: Apache-2.0
"""Batch arguments cut into microbatches, and the weights of their losses.

The first axis of every tensor leaf of a batch is the batch axis; leaves that are not tensors are
passed to every microbatch as they are. Knows no stages and no ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..actions.product import load_pass
from ..errors import BatchError
from ..tree import AbstractTree, Tree
from . import mistakes
from .microbatches import Absent, Microbatches


def count(batches: Sequence[Tree], microbatches: int | None) -> int:
    """The number of microbatches of a call: that of its ``Microbatches``, else that of the
    pipeline.

    >>> count([Microbatches([1, 2, 3]), torch.ones(4)], 4)
    3
    """
    counts = {len(batch) for batch in batches if isinstance(batch, Microbatches)}
    if len(counts) == 1:
        return counts.pop()
    if counts:
        raise BatchError(
            f"the arguments hold {sorted(counts)} microbatches; give every argument the same number"
        )
    if microbatches is None:
        raise BatchError(
            "how many microbatches? say pipeline(..., microbatches=8) or pass "
            "fpipe.Microbatches([...])"
        )
    return microbatches


def _stand_ins(leaves: list[Any], name: str) -> tuple[list[Any], bool]:
    """Replace leaves that are elsewhere by stand-ins; also returns whether there are any."""
    if Absent not in map(type, leaves):
        return leaves, False
    return load_pass("elsewhere.arguments").stand_ins(leaves, name)


def _can_cut(leaf: Tensor, parts: int, shared_scalars: bool) -> bool:
    """Whether a tensor can be cut into equal parts, or every microbatch may share it."""
    if leaf.dim() == 0:
        return shared_scalars
    return leaf.layout is torch.strided and leaf.shape[0] % parts == 0


def _split_leaf(leaf: Any, parts: int) -> Sequence[Any]:
    """The parts of a leaf. ``chunk`` returns equal ones, since their number divides the rows."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] == 0:
        return [leaf] * parts
    return leaf.chunk(parts)


class Parts:
    """A batch argument, cut into microbatches.

    ``rows[m]`` are the leaves of microbatch m, and ``structures[m]`` is its structure. ``leaves``
    are the leaves as they were passed, and ``structure`` is the structure of the batch, or the
    structures of its ``Microbatches``. The constructor checks the batch. Its rows are cut when they
    are first read, since most ranks read none.

    * ``uniform``: all rows have the same shapes, so the first row describes all.
    * ``lengths``: the numbers of rows of what is cut here.
    * ``absent``: another process has the argument. Its tensors have no data on this one.
    * ``descriptions``: then, its microbatches in abstract form as the other process has them, or
      the first one, which describes all.
    * ``shared_scalars``: a tensor without axes is passed to every microbatch. Otherwise it is an
      error.
    * ``late``: the ``Microbatches`` that come late. All rows are those of the first.
    * ``slices``: each row is one slice of a microbatch. Leaves with two axes or more are cut along
      the second one; every slice gets the others whole.

    >>> Parts(torch.arange(4), 2, "x").rows
    [(tensor([0, 1]),), (tensor([2, 3]),)]
    """

    late: Microbatches | None = None

    def __init__(
        self, batch: Tree, parts: int, name: str, shared_scalars: bool = False, slices: int = 1
    ):
        self.name = name
        self.uniform = not isinstance(batch, Microbatches)
        self.slices = slices
        self.lengths = set[int]()
        self.descriptions: Sequence[AbstractTree] = ()
        self.leaves: list[Any] = []
        self.absent = False
        trees = {name: batch}
        if not self.uniform:
            self.late = batch.late
            trees = {f"{name}[{m}]": part for m, part in enumerate(batch.shapes)}
        structures = []
        for where, each in trees.items():
            leaves, structure = tree.flatten(each)
            leaves, absent = _stand_ins(leaves, where)
            for leaf in filter(tree.is_tensor, leaves):
                if leaf.is_nested:
                    raise mistakes.nested(name)
                if self.uniform and not _can_cut(leaf, parts, shared_scalars):
                    raise mistakes.uncut(leaf, parts, name)
                if self.uniform and not absent:
                    self.lengths.update(leaf.shape[:1])
            if slices > 1:
                load_pass("slicing").check(leaves, structure, where, slices)
            self.leaves += leaves
            self.absent |= absent
            structures.append(structure)
        self.structure = structures[0] if self.uniform else tuple(structures)
        if self.uniform:
            structures *= parts
        self.structures = [structure for structure in structures for _ in range(slices)]

    @cached_property
    def rows(self) -> Sequence[Sequence[Any]]:
        """The leaves of every microbatch: views of the caller's tensors."""
        structures = self.structures[:: self.slices]  # of whole microbatches
        rows: list[Sequence[Any]] = [()] * len(structures)
        if not self.uniform:
            remaining = iter(self.leaves)
            rows = [list(islice(remaining, structure.num_leaves)) for structure in structures]
        elif self.leaves:
            columns = [_split_leaf(leaf, len(structures)) for leaf in self.leaves]
            rows = list(zip(*columns, strict=True))
        if self.slices == 1:
            return rows
        sliced = load_pass("slicing").sliced
        return [part for row in rows for part in sliced(row, self.slices)]

    def described(self, descriptions: Sequence[AbstractTree]) -> Parts:
        """The same argument with the descriptions of another process."""
        parts = copy(self)
        parts.descriptions = descriptions
        return parts

    def abstract(self, mb: int, grad: bool = False) -> AbstractTree:
        """One microbatch in abstract form; ``grad``: whether floating leaves want gradients."""
        if not self.descriptions:
            return AbstractTree.flat(self.structures[mb], self.rows[mb], grad)
        found = self.descriptions[mb if len(self.descriptions) > 1 else 0]
        return found.with_avals(lambda aval: aval._replace(grad=grad and aval.differentiable))

    def tree(self, mb: int) -> Tree:
        """One microbatch as a pytree."""
        return tree.unflatten(self.structures[mb], self.rows[mb])


@dataclass(frozen=True)
class Weights:
    """The weights of the microbatches' losses: a common number, or a tensor for each.

    ``loss_scale`` multiplies gradients in addition, but not the value.
    """

    common: float | None
    by_microbatch: Sequence[Tensor]
    loss_scale: float | Tensor | None

    def cotangent(self, mb: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The cotangent of a microbatch's loss."""
        weight = self.by_microbatch[mb] if self.common is None else self.common
        if self.loss_scale is not None:
            weight = weight * self.loss_scale
        if isinstance(weight, Tensor):
            return weight.to(device, dtype)
        return _constant(weight, dtype, device)

    def terms(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """Multiply each microbatch's loss by its weight."""
        if self.common is not None:  # torch.func.jvp of a product with a number is float64
            return [loss * torch.full_like(loss, self.common) for loss in losses]
        terms = []
        for weight, loss in zip(self.by_microbatch, losses, strict=True):
            weight = weight.to(loss.dtype)
            # The loss of a microbatch of weight 0 may be NaN: the mean of no values.
            terms.append(torch.where(weight == 0, 0, loss * weight))
        return terms


@lru_cache(maxsize=256)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # later calls may save it for a backward
        return torch.tensor(number, dtype=dtype, device=device)


# ---- scalars ----
# On a CPU, scalars are added as Python's numbers: a few operations of torch on single elements cost
# as much as a small stage. Python's numbers are float64. A sum or a product of two float32 numbers
# that is computed in float64, then rounded to float32, has the bits of the operation in float32.

#: The dtypes that are added as Python's numbers, and whether each result is rounded to float32.
_NARROW = {torch.float64: False, torch.float32: True}


def added(values: Sequence[Tensor], weight: float | None = None) -> Tensor:
    """Multiply scalars by the weight, and add them in order.

    The result has the bits of one process that runs the microbatches in order and adds each loss.

    >>> added([torch.tensor(1.0), torch.tensor(2.0)], 0.5)
    tensor(1.5000)
    """
    device = values[0].device
    dtype = values[0].dtype
    narrow = _NARROW.get(dtype)
    if narrow is not None and all(v.is_cpu and v.dtype is dtype for v in values):
        total = _in_python([value.item() for value in values], weight, narrow)
        return torch.full((), total, dtype=dtype, device="cpu")  # the default may be another device
    row = torch.stack([value.to(device) for value in values])
    if weight is not None:
        row.mul_(weight)
    total = row[0].clone()
    for value in row[1:]:
        total.add_(value)
    return total


def _in_python(numbers: Sequence[float], weight: float | None, narrow: bool) -> float:
    """``added`` of Python's numbers; ``narrow`` rounds each result to float32."""
    if weight is not None:
        weight = c_float(weight).value if narrow else weight
        numbers = [number * weight for number in numbers]
        numbers = array("f", numbers) if narrow else numbers
    total = numbers[0]
    for number in numbers[1:]:
        total += number
        total = c_float(total).value if narrow else total
    return total
