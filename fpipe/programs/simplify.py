"""Operations of a traced graph that fewer do in the same bits: on small tensors a call costs more than its sums.

A linear map over more than two axes is traced as one over two, with a view before and a view after. Knows graphs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .program import elementwise

_SUM, _VIEW = torch.ops.aten.sum.dim_IntList, torch.ops.aten.view.default


def shorten(graph: fx.GraphModule) -> None:
    """Take out what is not needed.

    A sum that keeps its axes for a view to drop them drops them itself: the gradient of each bias is one. What is done
    to each element alone, between views there and back, is done without them.

    >>> gm = fx.symbolic_trace(lambda x: x)  # (a traced graph has values in its nodes' meta; this one has none)
    >>> shorten(gm)
    """
    for node in list(graph.graph.nodes):
        if node.target is _VIEW and _drops_axes(node):
            _drop_axes(node)
        elif elementwise(node):
            _do_flat(node)


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


# ---- sums -----------------------------------------------------------------------------------------------------------
def _drops_axes(view: fx.Node) -> bool:
    total = view.args[0]
    if not isinstance(total, fx.Node) or total.target is not _SUM or len(total.users) > 1:
        return False
    made, wanted = _value(total), _value(view)
    if len(total.args) != 3 or not total.args[2] or made is None or wanted is None:
        return False
    axes = {axis % made.dim() for axis in total.args[1] or ()}  # type: ignore[union-attr]
    return bool(axes) and list(wanted.shape) == [size for axis, size in enumerate(made.shape) if axis not in axes]


def _drop_axes(view: fx.Node) -> None:
    total = view.args[0]
    assert isinstance(total, fx.Node)
    view.target = _SUM
    view.args, view.kwargs = (*total.args[:2], False), total.kwargs
    view.graph.erase_node(total)


# ---- views there and back -------------------------------------------------------------------------------------------
def _do_flat(node: fx.Node) -> None:
    """Do it to what the views look at, and look at what comes of it: where it is looked at back again, that is it."""
    inputs, made = node.all_input_nodes, _value(node)
    if made is None or not inputs or any(arg.target is not _VIEW for arg in inputs):
        return
    sources = [arg.args[0] for arg in inputs]
    flat = _one_shape(sources, made.numel())
    if flat is None or not made.is_contiguous() or _one_shape(inputs, made.numel()) != tuple(made.shape):
        return
    if not any(_is_view(user, flat) for user in node.users) and not all(map(_for_elements, inputs)):
        return
    for arg, source in zip(inputs, sources, strict=True):
        node.replace_input_with(arg, source)  # type: ignore[arg-type]
    node.meta["val"] = made.view(flat)
    with node.graph.inserting_after(node):
        seen = node.graph.call_function(_VIEW, (node, list(made.shape)))
    seen.meta = {**node.meta, "val": made}
    node.replace_all_uses_with(seen, delete_user_cb=lambda user: user is not seen)
    for user in [user for user in seen.users if _is_view(user, flat)]:
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    for view in (seen, *inputs):
        if not view.users:
            node.graph.erase_node(view)


def _one_shape(nodes: list[Any], count: int) -> tuple[int, ...] | None:
    """The shape of values that are all contiguous, of one shape and of so many elements."""
    values = [_value(node) for node in nodes]
    shapes = {tuple(value.shape) for value in values if value is not None}
    whole = all(value is not None and value.is_contiguous() and value.numel() == count for value in values)
    return shapes.pop() if whole and len(shapes) == 1 else None


def _is_view(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = _value(node)
    return node.target is _VIEW and value is not None and tuple(value.shape) == shape


def _for_elements(view: fx.Node) -> bool:
    """Whether a view is there for operations on elements alone, and so goes where they all do without it."""
    return all(map(elementwise, view.users))
