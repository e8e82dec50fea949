# SPDX-License-Identifier: Apache-2.0
"""Splits one traced joint function into the four programs F, B, I and W.

    F   what the outputs need, and every random draw
    I   what the input gradients need beyond F
    W   what the parameter gradients need beyond F and I
    B   I and W in the order in which they were traced

A value that a later program needs is passed on under its name: an input, an output of F ("saved"),
or an output of I ("kept"). Views use no memory of their own, so they are passed on like anything
else. Constants that depend on no input are computed again; so is a value inside a recompute region,
random draws excepted. Knows graphs alone, no tensors, stages or ranks.

First the graph is made normal: placeholders are named after their role (``p0..`` parameters,
``x0..`` inputs, ``k0..`` side inputs, ``t0..`` state, ``dy0..`` cotangents), and what computes
nothing is removed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ..actions.product import feature
from ..tree import arriving
from .held import Held
from .internals import draws, storage_id


@dataclass(frozen=True)
class Joint:
    """The nodes of a traced forward and backward, and those of its results.

    ``extras`` are auxiliary scalar and new state. ``ys``, ``dps`` and ``dxs`` have one entry for
    each leaf: ``None`` for an output that is no tensor, and where no gradient flows.
    """

    nodes: tuple[fx.Node, ...]
    cotangents: frozenset[str]
    ys: tuple[fx.Node | None, ...]
    extras: tuple[fx.Node, ...]
    dps: tuple[fx.Node | None, ...]
    dxs: tuple[fx.Node | None, ...]


class Piece(NamedTuple):
    """The nodes of one program, in order, and the names of its inputs and outputs."""

    nodes: Sequence[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Pieces(NamedTuple):
    """The programs of a joint graph. ``saved``: held from F to I or B; ``kept``: held from I to
    W.
    """

    f: Piece
    b: Piece
    i: Piece
    w: Piece
    saved: tuple[str, ...]
    kept: tuple[str, ...]


def split(joint: Joint) -> Pieces:
    """Split ``joint`` in four."""
    nodes = joint.nodes
    constant = _constants(nodes)
    ends = [*filter(None, joint.ys), *joint.extras, *filter(draws, nodes)]
    forward = _ancestors(ends, lambda node: False)
    forward |= _items(nodes, forward)
    savable = _savable(forward) - constant

    def available(node: fx.Node) -> bool:  # in the backward without computing it
        return node.op == "placeholder" or node in savable

    def needed(gradients: Sequence[fx.Node | None]) -> set[fx.Node]:
        computed = _ancestors([node for node in gradients if node is not None], available)
        return computed | {item for item in _items(nodes, computed) if not available(item)}

    for_inputs = needed(joint.dxs)
    for_weights = needed(joint.dps)
    dxs = _names(joint.dxs)
    dps = _names(joint.dps)
    f, b, i, w = (
        [node for node in nodes if node in part]
        for part in (
            forward,
            for_inputs | for_weights,
            for_inputs,
            for_weights - (for_inputs - constant),
        )
    )
    b_computes = set(_names(b))
    w_computes = set(_names(w))
    passed_on = (*_free(b), *(end for end in dps + dxs if end not in b_computes))
    saved = _unique(name for name in passed_on if name not in joint.cotangents)
    kept = _unique((*_free(w), *(name for name in dps if name not in w_computes)))
    return Pieces(
        _piece(f, (*_names((*joint.ys, *joint.extras)), *saved)),
        _piece(b, dps + dxs),
        _piece(i, dxs + kept),
        _piece(w, dps),
        saved,
        kept,
    )


def _piece(nodes: Sequence[fx.Node], results: Iterable[str]) -> Piece:
    """A program that returns those of the results that it computes."""
    computed = set(_names(nodes))
    return Piece(nodes, _free(nodes), tuple(n for n in _unique(results) if n in computed))


def _constants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on no input and draw nothing: cheap to compute again, expensive to hold."""
    constant: set[fx.Node] = set()
    for node in nodes:
        computed = node.op == "call_function" and not draws(node)
        if computed and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    return constant


def _savable(forward: set[fx.Node]) -> set[fx.Node]:
    """Forward values that may be saved: outside recompute regions all; inside, random draws and
    what leaves the region in the forward.
    """
    regions = {node: annotation(node, "fpipe_remat") for node in forward}
    savable = set()
    for node, region in regions.items():
        source = node.args[0] if node.target is operator.getitem else node
        leaves = any(user in forward and regions[user] != region for user in node.users)
        if region is None or leaves or (isinstance(source, fx.Node) and draws(source)):
            savable.add(node)
    return savable


def _items(nodes: Iterable[fx.Node], computed: set[fx.Node]) -> set[fx.Node]:
    """The items of the tuples that are computed: a tuple is passed on by its items."""
    return {n for n in nodes if n.target is operator.getitem and n.args[0] in computed}


def _ancestors(ends: Iterable[fx.Node], available: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """All call nodes on which ``ends`` depend, without those that are available and what only they
    depend on.
    """
    seen: set[fx.Node] = set()
    stack = [node for node in ends if not available(node)]
    while stack:
        node = stack.pop()
        if node not in seen and node.op != "placeholder":
            seen.add(node)
            stack += [used for used in node.all_input_nodes if not available(used)]
    return {node for node in seen if node.op == "call_function"}


def _free(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The names that a program reads and does not compute; captured tensors are part of the
    program.
    """
    computed = set(_names(nodes))
    used = _unique(u.name for node in nodes for u in node.all_input_nodes if u.op != "get_attr")
    return tuple(name for name in used if name not in computed)


def _names(nodes: Iterable[fx.Node | None]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if node is not None)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


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
