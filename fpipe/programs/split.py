# SPDX-License-Identifier: Apache-2.0
"""Splits one traced joint function into the four programs F, B, I and W.

    F   what the outputs need, and every random draw
    I   what the input gradients need beyond F
    W   what the parameter gradients need beyond F and I
    B   I and W in the order in which they were traced

A program reads values of earlier programs by name: an output of F is "saved", one of I is "kept".
Views are passed on like other values, since they use no memory. Two kinds of values are computed
again: those that depend on no input, and values inside a recompute region that are not random
draws. This module knows graphs alone, no tensors, stages or ranks.

Before the split, ``normalize`` names placeholders after their roles (``p0..`` parameters, ``x0..``
inputs, ``k0..`` side inputs, ``t0..`` state, ``dy0..`` cotangents), and removes operations that
compute nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..actions.product import load_pass
from ..tree import arriving
from .internals import draws, storage_id
from .operations import Held


@dataclass(frozen=True)
class Joint:
    """The nodes of a traced forward and backward, and those of its results.

    ``extras`` are the auxiliary scalar and the new state. ``ys``, ``dps`` and ``dxs`` have one
    entry for each leaf. It is ``None`` where an output is no tensor, or where no gradient flows.
    """

    nodes: tuple[fx.Node, ...]
    cotangents: frozenset[str]
    ys: tuple[fx.Node | None, ...]
    extras: tuple[fx.Node, ...]
    dps: tuple[fx.Node | None, ...]
    dxs: tuple[fx.Node | None, ...]


class Subgraph(NamedTuple):
    """The nodes of one program, in order, and the names of its inputs and outputs."""

    nodes: Sequence[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Subgraphs(NamedTuple):
    """The programs of a joint graph. ``saved`` is held from F to I or B, ``kept`` from I to W."""

    f: Subgraph
    b: Subgraph
    i: Subgraph
    w: Subgraph
    saved: tuple[str, ...]
    kept: tuple[str, ...]


def split(joint: Joint) -> Subgraphs:
    """Split a joint graph into four programs."""
    nodes = joint.nodes
    input_free = _input_free(nodes)
    ends = [*filter(None, joint.ys), *joint.extras, *filter(draws, nodes)]
    forward = _ancestors(ends, lambda node: False)
    forward |= _items(nodes, forward)
    savable = _savable(forward) - input_free

    def available(node: fx.Node) -> bool:
        """Whether the backward has a value without computing it."""
        return node.op == "placeholder" or node in savable

    def computed_for(gradients: Iterable[fx.Node | None]) -> set[fx.Node]:
        computed = _ancestors(filter(None, gradients), available)
        return computed | {item for item in _items(nodes, computed) if not available(item)}

    def in_order(part: set[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node in part]

    for_inputs = computed_for(joint.dxs)
    for_weights = computed_for(joint.dps)
    f = in_order(forward)
    b = in_order(for_inputs | for_weights)
    i = in_order(for_inputs)
    w = in_order(for_weights - (for_inputs - input_free))
    dxs = _names(joint.dxs)
    dps = _names(joint.dps)
    saved = tuple(name for name in _read(b, dps + dxs) if name not in joint.cotangents)
    kept = _read(w, dps)
    return Subgraphs(
        _subgraph(f, (*_names((*joint.ys, *joint.extras)), *saved)),
        _subgraph(b, dps + dxs),
        _subgraph(i, dxs + kept),
        _subgraph(w, dps),
        saved,
        kept,
    )


def _read(nodes: Sequence[fx.Node], results: Iterable[str]) -> tuple[str, ...]:
    """The names that a program must get: those that it reads, and results that it does not
    compute.
    """
    computed = set(_names(nodes))
    return _unique((*_free(nodes), *(name for name in results if name not in computed)))


def _subgraph(nodes: Sequence[fx.Node], results: Iterable[str]) -> Subgraph:
    """The program of these nodes; it returns those of the results that it computes."""
    computed = set(_names(nodes))
    return Subgraph(nodes, _free(nodes), tuple(n for n in _unique(results) if n in computed))


def _input_free(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on no input and draw nothing: cheap to compute again, expensive to hold."""
    found: set[fx.Node] = set()
    for node in nodes:
        computed = node.op == "call_function" and not draws(node)
        if computed and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _savable(forward: set[fx.Node]) -> set[fx.Node]:
    """The forward values that may be saved. Of a recompute region these are random draws and values
    that the forward uses outside the region.
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
    """The items of computed tuples: programs pass on the items of a tuple."""
    return {n for n in nodes if n.target is operator.getitem and n.args[0] in computed}


def _ancestors(ends: Iterable[fx.Node], available: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The call nodes that must run to compute ``ends`` from the values that are available."""
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


# ---- values of nodes ----
VIEW = torch.ops.aten.view.default
_T = torch.ops.aten.t.default
_IDENTITY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}

#: Parts of the names of operations that the pass ``operators`` replaces.
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


#: Placeholders, by the first letter of their names, whose memory is the caller's: it must not
#: change.
_SHARED = {"p": "a parameter", "k": "a side input"}

#: The key of a node's meta that identifies its storage. Calls of one block share fake tensors, and
#: have this key instead.
STORAGE = "fpipe_storage"


def value_of(node: object) -> Tensor | None:
    """The fake tensor that a node stands for, if it is one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def argument(node: fx.Node, index: int) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def shared(node: fx.Node) -> str | None:
    """The description of a node into which stages must not write: "a parameter", "a side input" or
    "a captured tensor".
    """
    if node.op == "get_attr":
        return "a captured tensor"
    return _SHARED.get(node.name[0]) if node.op == "placeholder" else None


def annotation(node: fx.Node, key: str) -> object | None:
    """The annotation ``key`` of a node, if it was recorded under one."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def storage(node: fx.Node, value: Tensor) -> Hashable:
    """The identity of the storage of a node's value."""
    return node.meta.get(STORAGE) or storage_id(value)


def storages(nodes: Iterable[fx.Node]) -> dict[str, Held]:
    """The storage of each value, named after the first value in it."""
    roots: dict[Hashable, str] = {}
    held: dict[str, Held] = {}
    for node in nodes:
        value = value_of(node)
        if value is None or value.layout is not torch.strided:
            continue
        root = node.name
        if root.startswith("wait_tensor"):  # it returns the tensor that it waited for
            root = held[str(node.args[0])].root
        root = roots.setdefault(storage(node, value), root)
        nbytes = value.untyped_storage().nbytes()
        held[node.name] = held.get(root) or Held(root, nbytes, node.op == "placeholder")
    return held


def captured(graph: fx.GraphModule) -> dict[str, Any]:
    """The captured tensors and modules of a graph, by name."""
    found = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()  # it was used under no_grad, or detached
        found[node.name] = value
    return found


def normalize(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the inputs of a traced graph, and simplify it."""
    name_inputs(graph, names)
    special = any(part in str(n.target) for n in graph.graph.nodes for part in _SPECIAL)
    if special:
        load_pass("operators").replace_writes_and_convolutions(graph)
    remove_identities(graph)
    if graph.graph.find_nodes(op="call_function", target=VIEW):
        load_pass("views").remove_views(graph)
    if special:
        load_pass("operators").spell_out(graph)
    copy_shared_outputs(graph)


def name_inputs(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Name the placeholders, and rename other nodes that have such a name."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    reserved = {*names, "box", "lit"}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and node.name in reserved:
            node.name = f"{node.name}_"
    for placeholder, name in zip(placeholders, names, strict=True):
        placeholder.name = placeholder.target = name


def remove_identities(graph: fx.GraphModule) -> None:
    """Remove aliases and double transposes, then dead code."""
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
    """Copy results that share memory with parameters, side inputs, state or captured tensors, and
    computed results with gaps in memory: these would arrive with other strides.
    """
    output = next(iter(graph.graph.find_nodes(op="output")))
    clones: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        value = value_of(node)
        state = node.op == "placeholder" and node.name[0] == "t"
        gaps = False
        if value is not None:
            came = arriving(value.shape, value.stride())
            strides = zip(value.shape, value.stride(), came, strict=True)
            gaps = any(size > 1 and step != new for size, step, new in strides)
        if not (shared(node) or state or (gaps and node.op == "call_function")):
            continue
        with graph.graph.inserting_before(output):
            clones[node] = graph.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        if value is not None:
            clones[node].meta["val"] = value.clone(memory_format=torch.contiguous_format)
    output.args = ([clones.get(n, n) for n in output.args[0]],)
    graph.graph.lint()
