# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a traced graph show, and its clean-up.

Placeholders are named after their role: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side inputs,
``t0..`` state, ``dy0..`` cotangents. Knows graphs, no stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..actions.product import feature
from ..tree import arriving
from .internals import storage_id
from .program import Held

VIEW = torch.ops.aten.view.default
_T = torch.ops.aten.t.default
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
    if graph.graph.find_nodes(op="call_function", target=VIEW):
        feature("views").remove_views(graph)
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
