# SPDX-License-Identifier: Apache-2.0
"""Fewer views in a traced graph, with the same results. Loaded when a graph has a view.

A sum that keeps its axes for a view to drop them drops them itself: the gradient of each bias is
such a sum. Elementwise operations between a view and its inverse are done without both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..programs.internals import draws, mutates, operator_of
from ..programs.split import VIEW, argument, value_of

_SUM = torch.ops.aten.sum.dim_IntList


def remove_views(graph: fx.GraphModule) -> None:
    """Remove views that are not needed."""
    for node in list(graph.graph.nodes):
        if node.target is VIEW and _drops_axes(node):
            total = argument(node, 0)
            node.target = _SUM
            node.args = (*total.args[:2], False)
            node.kwargs = total.kwargs
            graph.graph.erase_node(total)
        elif _elementwise(node):
            _apply_before_views(node)


def _drops_axes(view: fx.Node) -> bool:
    """Whether a view only drops the axes that a sum kept."""
    total = view.args[0] if view.args else None  # an erased view has no arguments
    if not isinstance(total, fx.Node) or total.target is not _SUM:
        return False
    if len(total.users) > 1 or len(total.args) != 3 or not total.args[2]:
        return False
    kept = total.meta["val"]
    axes: Any = total.args[1] or ()
    summed = {axis % kept.dim() for axis in axes}
    rest = [size for axis, size in enumerate(kept.shape) if axis not in summed]
    return bool(summed) and same(view.meta["val"].shape, rest)


def _elementwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same elements of its inputs, without random
    numbers.
    """
    op = operator_of(node)
    return op is not None and torch.Tag.pointwise in op.tags and not mutates(op) and not draws(node)


def _apply_before_views(node: fx.Node) -> None:
    """Apply an elementwise operation to the inputs of the views that it reads, and view the result.

    Where the result is viewed back in the shape of those inputs, both views go.
    """
    views = node.all_input_nodes
    value = value_of(node)
    if value is None or not views or any(view.target is not VIEW for view in views):
        return
    sources = [argument(view, 0) for view in views]
    flat = _common_shape(sources, value.numel())
    shape = _common_shape(views, value.numel())
    if flat is None or shape is None or not value.is_contiguous() or not same(shape, value.shape):
        return
    views_back = [user for user in node.users if _is_view(user, flat)]
    if not views_back and not all(_elementwise(user) for view in views for user in view.users):
        return
    for view, source in zip(views, sources, strict=True):
        node.replace_input_with(view, source)
    node.meta["val"] = value.view(flat)
    with node.graph.inserting_after(node):
        viewed = node.graph.call_function(VIEW, (node,))
    viewed.args = (node, list(value.shape))  # sizes may be symbols, which call_function warns of
    viewed.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(viewed, delete_user_cb=lambda user: user is not viewed)
    for view in views_back:
        view.replace_all_uses_with(node)
        node.graph.erase_node(view)
    for view in (viewed, *views):
        if not view.users:
            node.graph.erase_node(view)


def _common_shape(nodes: Sequence[fx.Node], count: int) -> tuple[int, ...] | None:
    """The shape of values that are all contiguous, of one shape and of ``count`` elements."""
    shape: tuple[int, ...] | None = None
    for node in nodes:
        value = value_of(node)
        if value is None or not value.is_contiguous():
            return None
        shape = tuple(value.shape) if shape is None else shape
        if not statically_known_true(value.numel() == count) or not same(value.shape, shape):
            return None
    return shape


def _is_view(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = value_of(node)
    return node.target is VIEW and value is not None and same(value.shape, shape)


def same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal for all sizes that the trace may have."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )
