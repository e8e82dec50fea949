# SPDX-License-Identifier: Apache-2.0
"""The cotangents of a pullback: checked against the outputs as ``torch.func.vjp`` does, and cut
into microbatches.

Knows calls and abstract outputs; no plan and no register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from .. import tree
from ..errors import BatchError
from ..lowering.value_graph import spec_of
from ..tree import AbstractLeaf, AbstractTree, Aval, Tree
from .arguments import Call
from .microbatches import Microbatches

#: By leaf of the outputs; None for leaves that carry no gradient.
Row: TypeAlias = Sequence[Tensor | None]


def cotangents(call: Call, planned: Sequence[AbstractTree], dy: Tree) -> list[Row]:
    """The leaves of ``dy`` by microbatch, or by slice of each. Nothing is consumed, so that an
    error leaves the pullback as it was. ``planned`` are the outputs.

    ``dy`` has the form of the outputs. A leaf may be ``None`` for zeros; so may the whole where the
    outputs are not on this process.
    """
    config = call.config
    if dy is None and config.placement.rank_of(config.stages - 1) not in config.group.here:
        return [() for _ in planned]
    slices = call.x.slices
    sliced = [planned[n : n + slices] for n in range(0, len(planned), slices)]
    outputs = planned if slices == 1 else list(map(_whole, sliced))
    rows = _rows(dy, outputs, call.x.uniform)
    devices = {"cpu", *(config.group.device(rank).type for rank in config.group.here)}
    rows = [
        [_checked(leaf, aval, devices) for leaf, aval in zip(row, y.leaves, strict=True)]
        for row, y in zip(rows, outputs, strict=True)
    ]
    if any(y.wanted for y in outputs) and all(leaf is None for row in rows for leaf in row):
        raise BatchError(
            "dy is None for every output that carries a gradient; give one tensor at least"
        )
    if slices > 1:
        pairs = zip(rows, sliced, strict=True)
        rows = [part for row, ys in pairs for part in _cut(row, ys, 1)]
    return [list(map(_filled, row, y.leaves)) for row, y in zip(rows, planned, strict=True)]


def _rows(dy: Tree, outputs: Sequence[AbstractTree], uniform: bool) -> list[Sequence[Any]]:
    """The leaves of ``dy`` by microbatch; a tensor of the whole batch is cut."""
    if uniform and not isinstance(dy, Microbatches):
        return _cut(_leaves(dy, outputs[0]), outputs, 0)
    parts = list(dy) if isinstance(dy, (Microbatches, list, tuple)) else []
    if len(parts) != len(outputs):
        raise BatchError(
            f"dy must be Microbatches of {len(outputs)} parts, one for each microbatch of the "
            f"outputs; got {len(parts) or type(dy).__name__}"
        )
    return list(map(_leaves, parts, outputs))


def on_replicas(call: Call, planned: Sequence[AbstractTree], rows: list[Row]) -> list[Row]:
    """The rows of the first rank of the last stage on the others too, where it has replicas on
    several processes.

    Each of them has all outputs, but runs a part of the microbatches. Every process calls this.
    """
    config = call.config
    ranks = config.placement.ranks_of(config.stages - 1)
    if len(ranks) < 2 or config.local:
        return rows
    here = ranks[0] in config.group.here
    out = list[Row]()
    for row, y in zip(rows, planned, strict=True):
        avals = {index: aval for index, aval in y.avals.items() if aval.grad}
        given = tuple(leaf for leaf in row if leaf is not None) if here else None
        shared = config.group.share(given, tuple(map(spec_of, avals.values())), ranks[0])
        by_leaf = dict(zip(avals, shared, strict=True))
        out.append([by_leaf.get(index) for index in range(len(y.leaves))])
    return out


def _whole(slices: Sequence[AbstractTree]) -> AbstractTree:
    """The output of a microbatch from those of its slices."""

    def joined(column: Sequence[AbstractLeaf]) -> AbstractLeaf:
        avals = [leaf for leaf in column if isinstance(leaf, Aval)]
        if not avals:
            return column[0]
        return avals[0]._replace(shape=_joined(avals, 1), grad=any(y.grad for y in avals))

    columns = zip(*(y.leaves for y in slices), strict=True)
    return replace(slices[0], leaves=tuple(map(joined, columns)))


def _joined(parts: Sequence[Aval], axis: int) -> tuple[int, ...]:
    """The shape of tensors that are joined along an axis, or stacked there."""
    first = parts[0].shape
    size = sum(part.shape[axis] for part in parts) if axis < len(first) else len(parts)
    return (*first[:axis], size, *first[axis + 1 :])


def _cut(row: Sequence[Any], parts: Sequence[AbstractTree], axis: int) -> list[Sequence[Any]]:
    """The leaves of outputs by part: the inverse of how the outputs of ``parts`` were joined."""
    columns = zip(*(y.leaves for y in parts), strict=True)
    cut = [_cut_leaf(leaf, column, axis) for leaf, column in zip(row, columns, strict=True)]
    return list(zip(*cut, strict=True)) or [() for _ in parts]


def _cut_leaf(leaf: Any, column: Sequence[AbstractLeaf], axis: int) -> Sequence[Any]:
    avals = [y for y in column if isinstance(y, Aval) and y.differentiable]
    if not _is_dense(leaf) or len(avals) < len(column):
        return [leaf] * len(column)
    whole = _joined(avals, axis)
    if tuple(leaf.shape) != whole:
        raise BatchError(
            f"dy has a leaf of shape {list(leaf.shape)} where the output is {list(whole)}; make "
            "them alike"
        )
    axes = len(avals[0].shape)
    if axis < axes:
        return leaf.split([y.shape[axis] for y in avals], axis)
    return leaf.unbind(axes)


def _leaves(dy: Tree, y: AbstractTree) -> list[Any]:
    """The leaves of ``dy``, which has the structure of ``y`` but for ``None`` in place of
    leaves.
    """
    try:
        return y.structure.flatten_up_to(dy)  # type: ignore[arg-type]
    except ValueError as error:
        raise BatchError(
            f"dy does not have the structure of the outputs: {str(error)[:200]}; give a tree of "
            "the same structure, with None for leaves that have no cotangent"
        ) from error


def _checked(leaf: Any, y: AbstractLeaf, devices: set[str]) -> Tensor | None:
    """A leaf that fits; None where the output carries no gradient."""
    if leaf is None or not isinstance(y, Aval) or not y.differentiable:
        return None
    if not _is_dense(leaf) or tuple(leaf.shape) != y.shape or leaf.dtype != y.dtype:
        raise BatchError(
            f"dy has the leaf {_described(leaf)} per microbatch where the output is {y}; give a "
            "dense tensor of its shape and dtype, or None for zeros"
        )
    if leaf.device.type not in devices:
        raise BatchError(
            f"dy has a leaf on {leaf.device}; give tensors on the CPU or where the rank is"
        )
    return leaf if y.grad else None


def _is_dense(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf is a tensor with strides; others cannot be cut, and some have no shape."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _described(leaf: object) -> str:
    """A leaf for a message; a container may hold a whole batch."""
    if _is_dense(leaf):
        return tree.describe([leaf])
    kind = type(leaf).__name__
    if isinstance(leaf, (int, float, complex, str)):
        return f"the {kind} {leaf!r}"
    return f"a {kind}"


def _filled(leaf: Tensor | None, y: AbstractLeaf) -> Tensor | None:
    """The cotangent of an output that carries a gradient: zeros where it is not given."""
    if not isinstance(y, Aval) or not y.grad:
        return None
    if leaf is not None:
        return leaf
    return y.build(
        lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device).zero_()
    )
