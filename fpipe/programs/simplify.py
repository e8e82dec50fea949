# SPDX-License-Identifier: Apache-2.0
"""Simplifies a traced graph without changing a bit: on small tensors an operation costs more than its arithmetic.

A linear map over more than two axes is traced as one over two, with a view before and a view after. Knows graphs alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .graphs import argument, value_of
from .program import elementwise

_SUM, _VIEW = torch.ops.aten.sum.dim_IntList, torch.ops.aten.view.default


def simplify(graph: fx.GraphModule) -> None:
    """Remove views that are not needed.

    A sum that keeps its axes for a view to drop them drops them itself: the gradient of each bias is such a sum.
    Elementwise operations between a view and its inverse are done without both.

    >>> gm = fx.symbolic_trace(lambda x: x)  # (a traced graph has values in its nodes' meta; this one has none)
    >>> simplify(gm)
    """
    for node in list(graph.graph.nodes):
        if node.target is _VIEW and _drops_axes(node):
            total = argument(node, 0)
            node.target, node.args, node.kwargs = _SUM, (*total.args[:2], False), total.kwargs
            graph.graph.erase_node(total)
        elif elementwise(node):
            _apply_before_views(node)


def _drops_axes(view: fx.Node) -> bool:
    """Whether a view only drops the axes that a sum kept."""
    total = view.args[0]
    if not isinstance(total, fx.Node) or total.target is not _SUM:  # an erased view has no arguments
        return False
    if len(total.users) > 1 or len(total.args) != 3 or not total.args[2]:
        return False
    kept, dropped, axes = value_of(total), value_of(view), total.args[1]
    if kept is None or dropped is None or not isinstance(axes, (list, tuple)):
        return False
    summed = {axis % kept.dim() for axis in axes if isinstance(axis, int)}
    return bool(summed) and list(dropped.shape) == [n for axis, n in enumerate(kept.shape) if axis not in summed]


def _apply_before_views(node: fx.Node) -> None:
    """Apply an elementwise operation to the inputs of the views that it reads, and view the result.

    Where the result is viewed back in the shape of those inputs, both views go.
    """
    views, value = node.all_input_nodes, value_of(node)
    if value is None or not views or any(view.target is not _VIEW for view in views):
        return
    sources = [argument(view, 0) for view in views]
    flat = _common_shape(sources, value.numel())
    if flat is None or not value.is_contiguous() or _common_shape(views, value.numel()) != tuple(value.shape):
        return
    views_back = [user for user in node.users if _is_view(user, flat)]
    if not views_back and not all(elementwise(user) for view in views for user in view.users):
        return
    for view, source in zip(views, sources, strict=True):
        node.replace_input_with(view, source)
    node.meta["val"] = value.view(flat)
    with node.graph.inserting_after(node):
        viewed = node.graph.call_function(_VIEW, (node, list(value.shape)))
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
    values = [value_of(node) for node in nodes]
    shapes = {tuple(value.shape) for value in values if value is not None}
    whole = all(value is not None and value.is_contiguous() and value.numel() == count for value in values)
    return shapes.pop() if whole and len(shapes) == 1 else None


def _is_view(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = value_of(node)
    return node.target is _VIEW and value is not None and tuple(value.shape) == shape
