# SPDX-License-Identifier: Apache-2.0
"""Clean-up of a traced graph, and what its nodes show: annotations, captured tensors, storages.

Placeholders are named after their role: ``p0..`` parameters, ``x0..`` inputs, ``k0..`` side inputs, ``t0..`` state,
``dy0..`` cotangents. Knows graphs, no stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..tree import arriving
from .explain import write_error
from .internals import storage_id

_T = torch.ops.aten.t.default
_IDENTITY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
#: What the first letter of a placeholder's name means, where its memory belongs to the caller and may not change.
_SHARED = {"p": "a parameter", "k": "a side input"}


class Held(NamedTuple):
    """The memory behind a named value: the first value on its storage, and the storage's size."""

    root: str
    nbytes: int
    given: bool = False  # the storage of an input


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
    """What a node is, in words, if stages may not write into it: a parameter, a side input or a captured tensor."""
    if node.op == "get_attr":
        return "a captured tensor"
    return _SHARED.get(node.name[0]) if node.op == "placeholder" else None


def name_inputs(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the placeholders, and rename every node whose name is taken."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    taken = {*names, "box", "lit"}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node.name = f"{node.name}_"
    for placeholder, name in zip(placeholders, names, strict=True):
        placeholder.name = placeholder.target = name


def clean(graph: fx.GraphModule) -> None:
    """Remove identities and writes back into inputs, then dead code. Splits convolutions' gradients."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _IDENTITY:
            node.replace_all_uses_with(argument(node, 0))
            graph.graph.erase_node(node)
        elif node.target is _T and argument(node, 0).target is _T:
            node.replace_all_uses_with(argument(argument(node, 0), 0))  # transposed twice
        elif node.target is torch.ops.aten.copy_.default:
            if what := shared(argument(node, 0)):
                raise write_error(what)
            node.replace_all_uses_with(argument(node, 1))  # an input or a state, which the stage may overwrite
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten.convolution_backward.default:
            _split_convolution(graph, node)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _split_convolution(graph: fx.GraphModule, node: fx.Node) -> None:
    """Make input and weight gradients of a convolution two operations: they share no work."""
    mask = node.args[10]
    if not isinstance(mask, (list, tuple)) or not mask[0] or not any(mask[1:]):
        return
    gradients = []
    for part in ([mask[0], False, False], [False, *mask[1:]]):
        with graph.graph.inserting_before(node):
            gradients.append(graph.graph.create_node("call_function", node.target, (*node.args[:10], part)))
        gradients[-1].meta = dict(node.meta)
    for item in [user for user in node.users if user.op == "call_function"]:
        item.args = (gradients[item.args[1] != 0], item.args[1])
    graph.graph.erase_node(node)


def copy_shared_outputs(graph: fx.GraphModule) -> None:
    """Copy what is returned and belongs to others (parameters, side inputs, state, captured tensors), and what has
    gaps in memory and would arrive with other strides. An input or a cotangent that is returned stays as it is."""
    output = next(iter(graph.graph.find_nodes(op="output")))
    copies: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        value = value_of(node)
        foreign = shared(node) or (node.op == "placeholder" and node.name[0] == "t")
        if not foreign and (value is None or node.op != "call_function" or not _gaps(value)):
            continue
        with graph.graph.inserting_before(output):
            copies[node] = graph.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        if value is not None:
            copies[node].meta["val"] = value.clone(memory_format=torch.contiguous_format)
    output.args = ([copies.get(n, n) for n in output.args[0]],)
    graph.graph.lint()


def _gaps(value: torch.Tensor) -> bool:
    return tuple(value.stride()) != arriving(tuple(value.shape), tuple(value.stride()))


def constants(graph: fx.GraphModule) -> dict[str, Any]:
    """Captured tensors and modules by name."""
    captured = {n.name: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    # A tensor that requires a gradient was used under no_grad or detached.
    wants = lambda value: isinstance(value, torch.Tensor) and value.requires_grad
    return {name: value.detach() if wants(value) else value for name, value in captured.items()}


def annotation(node: fx.Node, key: str) -> object | None:
    """The annotation ``key`` under which a node was recorded, if any."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def memory(nodes: Iterable[fx.Node]) -> dict[str, Held]:
    """The storage behind each value, named after the first value on it."""
    roots: dict[int, str] = {}
    behind: dict[str, Held] = {}
    for node in nodes:
        value = value_of(node)
        if value is None or value.layout is not torch.strided:
            continue
        waits = node.name.startswith("wait_tensor")  # returns the tensor that it waited for
        root = roots.setdefault(storage_id(value), behind[str(node.args[0])].root if waits else node.name)
        given = behind[root].given if root in behind else node.op == "placeholder"
        behind[node.name] = Held(root, value.untyped_storage().nbytes(), given)
    return behind


def dense(node: fx.Node) -> bool:
    """Whether all elements of a value are at different places in memory."""
    value = value_of(node)
    if value is None:
        return False
    return all(stride > 0 or size <= 1 for size, stride in zip(value.shape, value.stride(), strict=True))
