# SPDX-License-Identifier: Apache-2.0
"""``fpipe.Microbatches``, how their losses become one, and results joined to a batch.

Knows no stages and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from .. import tree
from ..actions.product import load_pass
from ..errors import BatchError, checked
from ..stage import keyword_only
from ..tree import Tree


@dataclass(frozen=True)
class Absent:
    """A leaf, or a whole argument, that another process has; see ``fpipe.elsewhere``."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def stand_in(self) -> Absent | torch.Tensor:
        """A tensor of the shape without data, where the shape is known."""
        return (
            self if self.shape is None else torch.empty(self.shape, dtype=self.dtype, device="meta")
        )


@checked
class Microbatches:
    """Already split pytrees, which may differ in shape; passed in place of a batch.

    With ``count`` they come late: microbatch k is taken from an iterator right before the first
    action that reads it, so a step begins with the first rollout of a sampler. Microbatches that
    come late have one shape. Those that were taken are kept, so the value can be passed to further
    calls. Each process takes what its stages read; for the shapes it takes the first microbatch in
    any case. If an iterator ends early, raises or gives another shape, all ranks raise BatchError
    at the end of that call, and can go on with the next one.

    Args:
        parts: one pytree for each microbatch; with ``count`` an iterator of them, whose n-th item
            is microbatch n on every process, or ``fpipe.elsewhere()``.
        count: how many microbatches the iterator gives; further ones stay in it.
        weights: with ``count``, the numbers that the function of ``fpipe.weighted`` would return,
            if they are known before. Without them gradients are divided by the sum of all weights
            at the end of the step, where last bits may differ.

    Raises:
        BatchError: if there is none, or ``parts`` is no list; with ``count``, if it is no number or
            ``parts`` no iterator.

    >>> mbs = Microbatches([torch.ones(2), torch.ones(3)])
    >>> len(mbs), mbs[1].shape
    (2, torch.Size([3]))
    >>> rollouts = (torch.full((2,), float(k)) for k in range(4))
    >>> late = Microbatches(rollouts, count=3)
    >>> late[1], late
    (tensor([1., 1.]), Microbatches(..., count=3), of which 2 were taken)
    """

    __slots__ = ("parts",)

    def __new__(
        cls,
        parts: Iterable[Tree] | Absent = (),
        count: int | None = None,
        weights: Sequence[float] | None = None,
    ):
        if count is not None or weights is not None:
            cls = load_pass("late").Late
        return super().__new__(cls)

    def __init__(self, parts: Iterable[Tree] | Absent, *late: object, **more: object):
        if isinstance(parts, (str, Mapping, torch.Tensor)) or not isinstance(parts, Iterable):
            raise BatchError(
                f"Microbatches takes a list with one pytree for each microbatch, not {parts!r:.80}"
                "; such as x.chunk(8) of a tensor x"
            )
        self.parts = tuple(parts)
        if not self.parts:
            raise BatchError("Microbatches([]) is empty; give at least one microbatch")

    @property
    def late(self) -> Microbatches | None:
        """Itself, if its microbatches come late."""
        return None

    @property
    def shapes(self) -> Sequence[Tree]:
        """For each microbatch, a pytree that has its shape."""
        return self.parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Tree:
        return self.parts[index]

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"Microbatches({list(self.parts)!r})"


class Weighted:
    """A reduction that weights each microbatch's loss; see ``fpipe.weighted``."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.sides = keyword_only(fn)

    def __repr__(self) -> str:
        return "fpipe.weighted(...)"


#: How the losses of microbatches become one.
Reduction: TypeAlias = Literal["mean", "sum"] | Weighted


def merge(parts: Sequence[Tree], axis: int = 0) -> Tree:
    """The inverse of ``split``: tensor leaves joined along the first axis, other leaves taken from
    the first part.

    With ``axis=1`` the inverse of a cut into slices. Tensors that lack the axis are stacked along
    it.

    >>> merge([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    flat = [tree.flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise BatchError(
            "the microbatches' outputs have different structures and cannot be joined into one "
            "batch"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree.unflatten(spec, [_merge_leaf(column, axis) for column in columns])


def _merge_leaf(column: Sequence[Any], axis: int) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return first
    column = [t.to(first.device) for t in column]  # replicas of a stage may be on several
    try:
        if first.dim() <= axis:
            return torch.stack(column, min(axis, first.dim()))
        if len(column) > 1:
            return torch.cat(column, axis)
        return first
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in column)
        if axis:
            remedy = "return tensors that are alike but for their second axis"
            raise BatchError(
                f"outputs of slices of shapes {shapes} do not join; {remedy}"
            ) from error
        raise BatchError(
            f"outputs of shapes {shapes} do not join along their first axis; pass "
            "fpipe.Microbatches to get them apart"
        ) from error


def joined(parts: Sequence[Tree], slices: int, whole: bool) -> Tree:
    """Results by microbatch, or by slice of each, in the form of the batch: one pytree where it was
    ``whole``.
    """
    if slices > 1:
        parts = [merge(parts[first : first + slices], 1) for first in range(0, len(parts), slices)]
    if whole:
        return merge(parts)
    return Microbatches(parts)
