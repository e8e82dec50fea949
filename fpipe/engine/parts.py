# SPDX-License-Identifier: Apache-2.0
"""Batch arguments cut into microbatches, and the weights of their losses.

The first axis of every tensor leaf of a batch is the batch axis; leaves that are not tensors are
passed to every microbatch as they are. Knows no stages and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import islice
from typing import Any

import torch

from .. import tree
from ..actions.product import feature
from ..errors import BatchError
from ..tree import Tree
from .microbatches import Absent, Microbatches


def count(batches: Sequence[Tree], microbatches: int | None) -> int:
    """The number of microbatches of a call: that of its ``Microbatches``, else that of the
    pipeline.

    >>> count([Microbatches([1, 2, 3]), torch.ones(4)], 4)
    3
    """
    counts = {len(b) for b in batches if isinstance(b, Microbatches)}
    if len(counts) > 1:
        raise BatchError(
            f"the arguments hold {sorted(counts)} microbatches; give every argument the same number"
        )
    if counts:
        return counts.pop()
    if microbatches is None:
        raise BatchError(
            "how many microbatches? say pipeline(..., microbatches=8) or pass "
            "fpipe.Microbatches([...])"
        )
    return microbatches


def split(batch: Tree, parts: int, name: str = "the batch") -> list[Tree]:
    """Cut a batch into ``parts`` equal pytrees (views of the user's tensors).

    >>> [b["x"].tolist() for b in split({"x": torch.arange(4), "flag": True}, 2)]
    [[0, 1], [2, 3]]
    """
    if isinstance(batch, Microbatches):
        if len(batch) != parts:
            raise BatchError(
                f"{name} holds {len(batch)} microbatches where {parts} are run; give it {parts}"
            )
        return list(batch)
    flat = Parts(batch, parts, name)
    return [flat.tree(mb) for mb in range(parts)]


def _stand_ins(leaves: list[Any], name: str) -> tuple[list[Any], bool]:
    """Leaves with stand-ins for those that are elsewhere, and whether the argument is."""
    if not any(isinstance(leaf, Absent) for leaf in leaves):
        return leaves, False
    return feature("elsewhere.arguments").stand_ins(leaves, name)


def _check_leaf(leaf: Any, parts: int, name: str, shared_scalars: bool) -> None:
    """Raise BatchError where a leaf cannot be cut into equal parts."""
    if not isinstance(leaf, torch.Tensor) or (shared_scalars and leaf.dim() == 0):
        return
    if leaf.layout is not torch.strided:
        raise BatchError(
            f"{name} holds a tensor of layout {leaf.layout}, which cannot be cut into {parts} "
            "microbatches; "
            "pass fpipe.Microbatches([...]), or to_dense() of it"
        )
    if leaf.dim() == 0:
        raise BatchError(
            f"{name} holds a tensor without axes, which cannot be cut into {parts} microbatches; "
            "give it a batch axis, or pass a Python number to give every microbatch the same"
        )
    if leaf.shape[0] % parts:
        raise BatchError(
            f"{name} has {leaf.shape[0]} rows, which {parts} microbatches do not divide; change "
            "the batch or "
            "microbatches=, or pass fpipe.Microbatches([...]) of any sizes"
        )


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
        self.name, self.uniform, self.slices = name, not isinstance(batch, Microbatches), slices
        if self.uniform:
            leaves, self.structure = tree.flatten(batch)
            self.leaves, self.absent = _stand_ins(leaves, name)
            self.specs = [self.structure] * (parts * slices)
            for leaf in self.leaves:
                _check_leaf(leaf, parts, name, shared_scalars)
            if slices > 1:
                feature("slicing").check(self.leaves, self.structure, name, slices)
        else:
            flat = [
                (*tree.flatten(part), f"{name}[{m}]")
                for m, part in enumerate(split(batch, parts, name))
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

    def scale(self, mb: int, like: torch.Tensor) -> float | torch.Tensor:
        """The factor of a microbatch's loss."""
        return self.number if self.number is not None else self.each[mb].to(like.dtype)

    def sum(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The total of the microbatches' losses: each weighted, then added in order."""
        weighted = [self._weighted(mb, loss) for mb, loss in enumerate(losses)]
        return reduce(lambda total, loss: total + loss.to(total.device), weighted)

    def _weighted(self, mb: int, loss: torch.Tensor) -> torch.Tensor:
        scale = self.scale(mb, loss)
        if not isinstance(scale, torch.Tensor):
            return loss * scale
        return torch.where(scale == 0, 0, loss * scale)  # a mean over nothing is NaN

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
