"""Operations of a traced graph that another one does in the same bits, at less cost. Knows graphs alone."""

from __future__ import annotations

import torch
from torch import fx

_SUM, _VIEW = torch.ops.aten.sum.dim_IntList, torch.ops.aten.view.default


def shorten(graph: fx.GraphModule) -> None:
    """A sum that keeps its axes for a view to drop them is a sum that drops them: each bias's gradient is one.

    >>> gm = fx.symbolic_trace(lambda x: x)  # (a traced graph has values in its nodes' meta; this one has none)
    >>> shorten(gm)
    """
    for node in list(graph.graph.nodes):
        if node.target is _VIEW and _drops_axes(node):
            total = node.args[0]
            assert isinstance(total, fx.Node)
            node.target = _SUM
            node.args, node.kwargs = (*total.args[:2], False), total.kwargs
            graph.graph.erase_node(total)


def _drops_axes(view: fx.Node) -> bool:
    total = view.args[0]
    if not isinstance(total, fx.Node) or total.target is not _SUM or len(total.users) > 1:
        return False
    made, wanted = total.meta.get("val"), view.meta.get("val")
    if len(total.args) != 3 or not total.args[2] or not isinstance(made, torch.Tensor):
        return False
    axes = {axis % made.dim() for axis in total.args[1] or ()}  # type: ignore[union-attr]
    left = [size for axis, size in enumerate(made.shape) if axis not in axes]
    return bool(axes) and isinstance(wanted, torch.Tensor) and list(wanted.shape) == left
