# SPDX-License-Identifier: Apache-2.0
"""The cotangents of a pullback: checked against the outputs as ``torch.func.vjp`` does, and cut
into microbatches.

Knows calls and abstract outputs; no plan and no register.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from .. import tree
from ..errors import BatchError
from ..lowering.value_graph import spec_of
from ..tree import AbstractLeaf, AbstractTree, Aval, Tree, contiguous
from .arguments import Call
from .microbatches import Microbatches

#: By leaf of the outputs; None for leaves that carry no gradient.
Row: TypeAlias = Sequence[torch.Tensor | None]


def cotangents(call: Call, units: Sequence[AbstractTree], dy: Tree) -> list[Row]:
    """The leaves of ``dy`` by microbatch, or by slice of each. Nothing is consumed, so that an
    error leaves the pullback as it was. ``units`` are the outputs.

    ``dy`` has the form of the outputs. A leaf may be ``None`` for zeros; so may the whole where the
    outputs are not on this process.
    """
    config = call.config
    if dy is None and config.placement.rank_of(config.stages - 1) not in config.group.here:
        return [() for _ in units]
    slices = call.x.slices
    outputs = (
        units
        if slices == 1
        else [_whole(units[n : n + slices]) for n in range(0, len(units), slices)]
    )
    if call.x.uniform and not isinstance(dy, Microbatches):
        columns = [
            _cut(leaf, avals)
            for leaf, avals in zip(
                _leaves(dy, outputs[0]), zip(*(y.leaves for y in outputs), strict=True), strict=True
            )
        ]
        rows = list(zip(*columns, strict=True)) or [() for _ in outputs]
    else:
        parts = list(dy) if isinstance(dy, (Microbatches, list, tuple)) else []
        if len(parts) != len(outputs):
            raise BatchError(
                f"dy must be Microbatches of {len(outputs)} parts, one for each microbatch of the "
                "outputs; "
                f"got {len(parts) or type(dy).__name__}"
            )
        rows = [_leaves(part, y) for part, y in zip(parts, outputs, strict=True)]
    devices = {"cpu", *(config.group.device(rank).type for rank in config.group.here)}
    checked = [
        [_checked(leaf, aval, devices) for leaf, aval in zip(row, y.leaves, strict=True)]
        for row, y in zip(rows, outputs, strict=True)
    ]
    if any(y.wanted for y in outputs) and not any(
        leaf is not None for row in checked for leaf in row
    ):
        raise BatchError(
            "dy is None for every output that carries a gradient; give one tensor at least"
        )
    rows = (
        checked
        if slices == 1
        else [
            part
            for m, row in enumerate(checked)
            for part in _sliced(row, units[m * slices : (m + 1) * slices])
        ]
    )
    return [
        [_zeros(aval) if leaf is None else leaf for leaf, aval in zip(row, y.leaves, strict=True)]
        for row, y in zip(rows, units, strict=True)
    ]


def on_replicas(call: Call, units: Sequence[AbstractTree], rows: list[Row]) -> list[Row]:
    """The rows of the first rank of the last stage on the others too, where it has replicas on
    several processes.

    Each of them has all outputs, but runs a part of the microbatches. Every process calls this.
    """
    config = call.config
    ranks = config.placement.ranks_of(config.stages - 1)
    if len(ranks) < 2 or config.local:
        return rows
    here, out = ranks[0] in config.group.here, list[Row]()
    for row, y in zip(rows, units, strict=True):
        indices = [index for index, aval in y.avals.items() if aval.grad]
        given = tuple(leaf for leaf in row if leaf is not None) if here else None
        shared = config.group.share(
            given, tuple(spec_of(y.avals[index]) for index in indices), ranks[0]
        )
        known = dict(zip(indices, shared, strict=True))
        out.append([known.get(index) for index in range(len(y.leaves))])
    return out


def _whole(slices: Sequence[AbstractTree]) -> AbstractTree:
    """The output of a microbatch from those of its slices, which are joined along the second axis,
    or stacked there.
    """

    def joined(column: Sequence[AbstractLeaf]) -> AbstractLeaf:
        first, shapes = column[0], [leaf.shape for leaf in column if isinstance(leaf, Aval)]
        if not isinstance(first, Aval):
            return first
        axis = min(1, len(first.shape))
        size = sum(shape[1] for shape in shapes) if len(first.shape) > 1 else len(shapes)
        shape = (*first.shape[:axis], size, *first.shape[2:])
        grad = any(isinstance(leaf, Aval) and leaf.grad for leaf in column)
        return first._replace(shape=shape, stride=contiguous(shape), grad=grad)

    return replace(
        slices[0], leaves=tuple(map(joined, zip(*(y.leaves for y in slices), strict=True)))
    )


def _sliced(row: Row, slices: Sequence[AbstractTree]) -> Iterable[Row]:
    """The cotangents of a microbatch by slice: the inverse of how its outputs were joined."""

    def cut(
        leaf: torch.Tensor | None, column: Sequence[AbstractLeaf]
    ) -> Sequence[torch.Tensor | None]:
        shapes = [one.shape for one in column if isinstance(one, Aval)]
        if leaf is None:
            return [None] * len(column)
        parts = (
            leaf.split([shape[1] for shape in shapes], 1)
            if len(shapes[0]) > 1
            else leaf.unbind(len(shapes[0]))
        )
        return [
            part if isinstance(y, Aval) and y.grad else None
            for part, y in zip(parts, column, strict=True)
        ]

    columns = zip(*(y.leaves for y in slices), strict=True)
    return zip(*map(cut, row, columns), strict=True) if row else [()] * len(slices)


def _leaves(dy: Tree, y: AbstractTree) -> list[Any]:
    """The leaves of ``dy``, which has the structure of ``y`` but for ``None`` in place of
    leaves.
    """
    try:
        return y.spec.flatten_up_to(dy)  # type: ignore[arg-type]
    except ValueError as error:
        raise BatchError(
            f"dy does not have the structure of the outputs: {str(error)[:200]}; give a tree of "
            "the same structure, "
            "with None for leaves that have no cotangent"
        ) from error


def _cut(leaf: Any, avals: Sequence[AbstractLeaf]) -> Sequence[Any]:
    """A leaf of the whole batch by microbatch: the inverse of how the outputs were joined."""
    if not isinstance(leaf, torch.Tensor) or not all(
        isinstance(aval, Aval) and aval.differentiable for aval in avals
    ):
        return [leaf] * len(avals)
    shapes = [aval.shape for aval in avals if isinstance(aval, Aval)]
    rows = [shape[0] if shape else 1 for shape in shapes]
    whole = (sum(rows), *shapes[0][1:])
    if tuple(leaf.shape) != whole:
        raise BatchError(
            f"dy has a leaf of shape {list(leaf.shape)} where the output is {list(whole)}; make "
            "them alike"
        )
    return leaf.split(rows) if shapes[0] else leaf.unbind()


def _checked(leaf: Any, y: AbstractLeaf, devices: set[str]) -> torch.Tensor | None:
    """A leaf that fits; None where the output carries no gradient."""
    if leaf is None or not isinstance(y, Aval) or not y.differentiable:
        return None
    if not isinstance(leaf, torch.Tensor) or tuple(leaf.shape) != y.shape or leaf.dtype != y.dtype:
        what = tree.describe([leaf]) if isinstance(leaf, torch.Tensor) else _in_short(leaf)
        raise BatchError(
            f"dy has the leaf {what} per microbatch where the output is {y}; give a tensor of its "
            "shape and dtype, or "
            "None for zeros"
        )
    if leaf.device.type not in devices:
        raise BatchError(
            f"dy has a leaf on {leaf.device}; give tensors on the CPU or where the rank is"
        )
    return leaf if y.grad else None


def _in_short(leaf: object) -> str:
    """A leaf that is no tensor, for a message; a container may hold a whole batch."""
    numbers = isinstance(leaf, (int, float, complex, str))
    return f"the {type(leaf).__name__} {leaf!r}" if numbers else f"a {type(leaf).__name__}"


def _zeros(y: AbstractLeaf) -> torch.Tensor | None:
    """The cotangent of an output that is not used."""
    if not isinstance(y, Aval) or not y.grad:
        return None
    return y.build(
        lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device).zero_()
    )
