# SPDX-License-Identifier: Apache-2.0
"""Puts the operations of blocks in the place of their calls in a traced graph.

The result is the graph that a trace without blocks records, node by node. Knows graphs, no stages.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.fx import GraphModule, Node, map_arg

from ...programs.internals import operator_of, returns_views, storage_id
from ...programs.split import STORAGE, argument, storage, value_of
from ...programs.tracing import InexactError
from .calls import BACKWARD, FORWARD, HERE, Call, Graph

_ADD = torch.ops.aten.add.Tensor


def inline(graph: GraphModule, calls: Mapping[int, Call]) -> None:
    """Replace the calls of blocks by their operations.

    Raises:
        InexactError: gradients would be added in another order than without blocks.
    """
    bodies: dict[int, _Body] = {}
    # of results of calls -> of the operations in their place
    storages: dict[Hashable, Hashable] = {}
    for node in list(graph.graph.nodes):
        if node.target is FORWARD:
            call = calls[node.args[1]]
            body = bodies[call.number] = _Body.of(graph, call, node.args[0])
            _replace(node, _forward(body, node), storages)
        elif node.target is BACKWARD and node.args[1] != HERE:
            _replace(node, _backward(bodies[node.args[1]], node, node.args[0]), storages)
        elif node.op != "output" and storages and (value := value_of(node)) is not None:
            key = storage(node, value)
            if key in storages:
                node.meta[STORAGE] = storages[key]


@dataclass(frozen=True, eq=False)
class _Body:
    """The operations of one call, while they are put into a graph.

    ``nodes``: of the block's graph -> of the graph around it; ``storages`` likewise. ``constants``
    are the storages of captured tensors and their views, ``regions`` the recompute regions of this
    call.
    """

    into: GraphModule
    graph: Graph
    number: int
    rest: Iterator[Node]
    nodes: dict[Node, Node]
    storages: dict[Hashable, Hashable] = field(default_factory=dict)
    constants: dict[object, Hashable] = field(default_factory=dict)
    regions: dict[object, object] = field(default_factory=dict)

    @classmethod
    def of(cls, into: GraphModule, call: Call, arguments: Sequence[Node]) -> _Body:
        """A call with its arguments; nothing is put into the graph."""
        graph = call.forward()
        nodes = dict(zip(graph.inputs, arguments, strict=False))
        body = cls(into, graph, call.number, iter(graph.graph.graph.nodes), nodes)
        for inner, outer in nodes.items():
            _same_storage(body.storages, inner, outer)
        return body


def _forward(body: _Body, call: Node) -> list[Node]:
    """Put the forward in front of its call; returns its outputs."""
    with body.into.graph.inserting_before(call):
        for node in body.rest:
            if node.target is BACKWARD or node.op == "output":
                break
            _put(body, node, call)
    return [body.nodes[node] for node in body.graph.outputs]


def _backward(body: _Body, call: Node, cotangents: Sequence[Node]) -> list[Node]:
    """Put the backward in front of its call; returns the gradients."""
    for inner, outer in zip(reversed(body.graph.inputs), reversed(cotangents), strict=False):
        body.nodes[inner] = outer
        _same_storage(body.storages, inner, outer)
    with body.into.graph.inserting_before(call):
        for node in body.rest:
            if node.target is operator.getitem and argument(node, 0).target is BACKWARD:
                body.nodes[node] = cotangents[cast("int", node.args[1])]
                _same_storage(body.storages, node, body.nodes[node])
            elif node.op != "output":
                _put(body, node, call)
    gradients = []
    for node, uses in zip(body.graph.gradients, body.graph.uses, strict=True):
        if node is None:
            continue
        if uses > 1 and _added_last(call, len(gradients)):
            raise InexactError("a value that a block uses several times is used behind it, too")
        gradients.append(body.nodes[node])
    return gradients


def _put(body: _Body, node: Node, call: Node) -> None:
    if node.op == "placeholder":
        return
    if node.op == "get_attr":
        body.nodes[node] = _constant(body, node)
        return
    copy = body.nodes[node] = body.into.graph.create_node(node.op, node.target, name=node.name)
    copy.args, copy.kwargs = map_arg((node.args, node.kwargs), body.nodes.__getitem__)
    copy.meta = {"val": node.meta.get("val")}
    custom = {**call.meta.get("custom", {}), **node.meta.get("custom", {})}
    if "fpipe_remat" in node.meta.get("custom", {}):  # a region of this call alone
        region = custom["fpipe_remat"]
        custom["fpipe_remat"] = body.regions.setdefault(region, object())
    if custom:
        copy.meta["custom"] = custom
    value = value_of(node)
    if value is not None:
        key = storage(node, value)
        op = operator_of(node)
        source = node.args[0] if op is not None and returns_views(op) and node.args else None
        if source in body.constants:  # a view of a captured tensor
            body.constants[node] = body.storages[key] = body.constants[source]
        copy.meta[STORAGE] = body.storages.get(key, (body.number, key))


def _constant(body: _Body, node: Node) -> Node:
    """A captured tensor of the block, as one of the graph."""
    name = f"block_constant{body.number}_{node.name}"
    value = getattr(body.graph.graph, str(node.target))
    setattr(body.into, name, value)
    copy = body.into.graph.create_node("get_attr", name)
    copy.meta = dict(node.meta)
    if isinstance(value, torch.Tensor):
        body.constants[node] = ("captured", storage_id(value))
    return copy


def _same_storage(storages: dict[Hashable, Hashable], before: Node, after: Node) -> None:
    """Enter that a node has the memory of another one, which comes in its place."""
    one = value_of(before)
    other = value_of(after)
    if one is not None and other is not None:
        storages[storage(before, one)] = storage(after, other)


def _replace(call: Node, results: Sequence[Node], storages: dict[Hashable, Hashable]) -> None:
    """Use the results in place of the items of a call."""
    for item in list(call.users):
        result = results[cast("int", item.args[1])]
        _same_storage(storages, item, result)
        item.replace_all_uses_with(result)
        call.graph.erase_node(item)
    call.graph.erase_node(call)


def _added_last(call: Node, place: int) -> bool:
    """Whether a gradient of a call is added to one that was there before."""
    items = [item for item in call.users if item.args[1] == place]
    return any(
        user.target is _ADD and user.args[1] is item and user.args[0] is not item
        for item in items
        for user in item.users
    )
