# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a traced graph show, and its clean-up: fewer operations with the same results.

Placeholders are named after their role: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side inputs,
``t0..`` state, ``dy0..`` cotangents. Knows graphs, no stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..actions.product import feature
from ..tree import arriving
from .internals import draws, mutates, operator_of, storage_id
from .program import Held

_T = torch.ops.aten.t.default
_SUM = torch.ops.aten.sum.dim_IntList
_VIEW = torch.ops.aten.view.default
_IDENTITY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
#: Parts of the names of operations that have rules of their own, in the pass ``operators``.
_SPECIAL = (
    "aten.copy_",
    "aten.convolution_backward",
    "aten.as_strided",
    "batch_norm",
    "aten.mkldnn_rnn_layer",
    "aten._conj",
    "aten._neg_view",
    "aten._efficientzerotensor",
)
#: What the first letter of a placeholder's name means, where its memory belongs to the caller and
#: may not change.
_SHARED = {"p": "a parameter", "k": "a side input"}
#: The key of a node's meta that identifies its storage, where another call of the same block shares
#: its fake tensor.
STORAGE = "fpipe_storage"


# ---- what nodes show ----
def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor that a node stands for, if it is one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, index: int) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def shared(node: fx.Node) -> str | None:
    """What a node is, in words, if stages may not write into it: a parameter, a side input or a
    captured tensor.
    """
    if node.op == "get_attr":
        return "a captured tensor"
    return _SHARED.get(node.name[0]) if node.op == "placeholder" else None


def annotation(node: fx.Node, key: str) -> object | None:
    """The annotation ``key`` under which a node was recorded, if any."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def storage(node: fx.Node, value: torch.Tensor) -> Hashable:
    """What identifies the storage of a node's value; calls of one block share the fake tensors of
    its trace.
    """
    return node.meta.get(STORAGE) or storage_id(value)


def memory(nodes: Iterable[fx.Node]) -> dict[str, Held]:
    """The storage behind each value, named after the first value on it."""
    roots: dict[Hashable, str] = {}
    behind: dict[str, Held] = {}
    for node in nodes:
        value = value_of(node)
        if value is None or value.layout is not torch.strided:
            continue
        waits = node.name.startswith("wait_tensor")  # returns the tensor that it waited for
        root = roots.setdefault(
            storage(node, value), behind[str(node.args[0])].root if waits else node.name
        )
        behind[node.name] = behind.get(root) or Held(
            root, value.untyped_storage().nbytes(), node.op == "placeholder"
        )
    return behind


def constants(graph: fx.GraphModule) -> dict[str, Any]:
    """Captured tensors and modules by name."""
    captured = {n.name: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    # A tensor that requires a gradient was used under no_grad or detached.
    return {
        name: v.detach() if isinstance(v, torch.Tensor) and v.requires_grad else v
        for name, v in captured.items()
    }


# ---- clean-up ----
def normalize(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the inputs of a graph as it was traced, and clean it up."""
    name_inputs(graph, names)
    special = any(part in str(n.target) for n in graph.graph.nodes for part in _SPECIAL)
    if special:
        feature("operators").replace_writes_and_convolutions(graph)
    remove_identities(graph)
    simplify(graph)
    if special:
        feature("operators").spell_out(graph)
    copy_shared_outputs(graph)


def name_inputs(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the placeholders, and rename every node whose name is taken."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    taken = {*names, "box", "lit"}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node.name = f"{node.name}_"
    for placeholder, name in zip(placeholders, names, strict=True):
        placeholder.name = placeholder.target = name


def remove_identities(graph: fx.GraphModule) -> None:
    """Remove aliases and what is transposed twice, then dead code."""
    for node in list(graph.graph.nodes):
        if node.target in _IDENTITY:
            node.replace_all_uses_with(argument(node, 0))
            graph.graph.erase_node(node)
        elif node.target is _T and argument(node, 0).target is _T:
            node.replace_all_uses_with(argument(argument(node, 0), 0))
    graph.graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output")
    )


def copy_shared_outputs(graph: fx.GraphModule) -> None:
    """Copy what is returned and belongs to others (parameters, side inputs, state, captured
    tensors), and what has gaps in memory and would arrive with other strides. An input or a
    cotangent that is returned stays as it is.
    """
    output = next(iter(graph.graph.find_nodes(op="output")))
    copies: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        value = value_of(node)
        foreign = shared(node) or (node.op == "placeholder" and node.name[0] == "t")
        gaps = value is not None and tuple(value.stride()) != arriving(value.shape, value.stride())
        if not foreign and not (gaps and node.op == "call_function"):
            continue
        with graph.graph.inserting_before(output):
            copies[node] = graph.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        if value is not None:
            copies[node].meta["val"] = value.clone(memory_format=torch.contiguous_format)
    output.args = ([copies.get(n, n) for n in output.args[0]],)
    graph.graph.lint()


# ---- views ----
def simplify(graph: fx.GraphModule) -> None:
    """Remove views that are not needed.

    A sum that keeps its axes for a view to drop them drops them itself: the gradient of each bias
    is such a sum. Elementwise operations between a view and its inverse are done without both.

    >>> gm = fx.symbolic_trace(lambda x: x)  # (
    ...     a traced graph has values in its nodes' meta; this one has none)
    >>> simplify(gm)
    """
    for node in list(graph.graph.nodes):
        if node.target is _VIEW and _drops_axes(node):
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
    kept = value_of(total)
    dropped = value_of(view)
    axes = total.args[1]
    if kept is None or dropped is None or not isinstance(axes, (list, tuple)):
        return False
    summed = {axis % kept.dim() for axis in axes if isinstance(axis, int)}
    return bool(summed) and _same(
        dropped.shape, [n for axis, n in enumerate(kept.shape) if axis not in summed]
    )


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
    if value is None or not views or any(view.target is not _VIEW for view in views):
        return
    sources = [argument(view, 0) for view in views]
    flat = _common_shape(sources, value.numel())
    shape = _common_shape(views, value.numel())
    if flat is None or shape is None or not value.is_contiguous() or not _same(shape, value.shape):
        return
    views_back = [user for user in node.users if _is_view(user, flat)]
    if not views_back and not all(_elementwise(user) for view in views for user in view.users):
        return
    for view, source in zip(views, sources, strict=True):
        node.replace_input_with(view, source)
    node.meta["val"] = value.view(flat)
    with node.graph.inserting_after(node):
        viewed = node.graph.call_function(_VIEW, (node,))
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
    values = [value for node in nodes if (value := value_of(node)) is not None]
    if len(values) < len(nodes):
        return None
    shape = tuple(values[0].shape)
    alike = all(
        value.is_contiguous()
        and statically_known_true(value.numel() == count)
        and _same(value.shape, shape)
        for value in values
    )
    return shape if alike else None


def _is_view(node: fx.Node, shape: tuple[int, ...]) -> bool:
    value = value_of(node)
    return node.target is _VIEW and value is not None and _same(value.shape, shape)


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal for all sizes that the trace may have."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )
