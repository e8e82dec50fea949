# SPDX-License-Identifier: Apache-2.0
"""Rules for operations that do more than their schemas say, or two things at once.

Loaded when a traced graph has one: writes back into inputs, gradients of convolutions, places in
memory, norms with running statistics, recurrent layers, lazy conjugates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import TraceError
from ..programs.internals import operator_of, returns_views, updates_statistics
from ..programs.split import argument, shared, value_of
from ..programs.tensor_state import resolved
from .explain import write_error

_COPY = torch.ops.aten.copy_.default
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_RNN = torch.ops.aten.mkldnn_rnn_layer.default
#: Operations whose results have a flag in place of numbers.
_LAZY = {"aten._conj.default", "aten._neg_view.default", "aten._efficientzerotensor.default"}


# ---- in a graph as it was traced ----
def replace_writes_and_convolutions(graph: GraphModule) -> None:
    """Remove writes back into inputs, split gradients of convolutions, and refuse places in the
    memory of arguments.
    """
    for node in list(graph.graph.nodes):
        if node.target is _COPY:
            if what := shared(argument(node, 0)):
                raise write_error(what)
            # into an input or a state, which the stage may overwrite
            node.replace_all_uses_with(argument(node, 1))
            graph.graph.erase_node(node)
        elif node.target is _CONVOLUTION:
            _split_convolution(graph, node)
        elif node.target is _AS_STRIDED:
            _check_place(node)


def viewed(view: Node) -> Node:
    """The value whose memory a view shows, through views of views."""
    root = argument(view, 0)
    op = operator_of(root)
    while root.op == "call_function" and op is not None and returns_views(op):
        root = argument(root, 0)
        op = operator_of(root)
    return root


def _check_place(node: Node) -> None:
    """Refuse a place in the memory of an argument: another microbatch begins at another place of
    the same memory.
    """
    root = viewed(node)
    if root.op == "placeholder" and root.name[0] != "d" and (*node.args[3:], None)[0] is not None:
        raise TraceError(
            "a stage calls as_strided with storage_offset= on an argument, whose place in memory "
            "differs from call to call; leave storage_offset out, take a slice first, or use "
            'fpipe.Stage(fn, engine="eager")'
        )


def _split_convolution(graph: GraphModule, node: Node) -> None:
    """Make input and weight gradients of a convolution two operations: they share no work."""
    mask = node.args[10]
    if not isinstance(mask, (list, tuple)) or not mask[0] or not any(mask[1:]):
        return
    gradients = []
    for part in ([mask[0], False, False], [False, *mask[1:]]):
        with graph.graph.inserting_before(node):
            args = (*node.args[:10], part)
            gradient = graph.graph.create_node("call_function", node.target, args)
        gradient.meta = dict(node.meta)
        gradients.append(gradient)
    for item in [user for user in node.users if user.op == "call_function"]:
        item.args = (gradients[item.args[1] != 0], item.args[1])
    graph.graph.erase_node(node)


# ---- in a graph that is simplified ----
def spell_out(graph: GraphModule) -> None:
    """Make updates of running statistics explicit: later readers of a statistic read the new
    value. Resolve lazy tensors that are returned.
    """
    nodes = list(graph.graph.nodes)
    for place, node in enumerate(nodes):
        op = operator_of(node)
        if node.target is _RNN:
            node.args = (node.target, *node.args)
            node.target = keeping
        if op is not None and updates_statistics(op, node.args):
            _return_statistics(graph.graph, node, set(nodes[place + 1 :]))
    _resolve(graph)


def norm(kernel: Callable[..., tuple[object, ...]], *args: Any) -> tuple[object, ...]:
    """Batch norm without writes: the new running statistics are the last two items of the
    result.
    """
    mean = args[3].clone()
    var = args[4].clone()
    return (*kernel(*args[:3], mean, var, *args[5:]), mean, var)


def keeping(kernel: Callable[..., tuple[object, ...]], *args: object) -> tuple[object, ...]:
    """An operation that returns what its backward needs only while autograd records, which programs
    switch off.
    """
    with torch.enable_grad():
        return kernel(*args)


def _return_statistics(graph: Graph, node: Node, later: Container[Node]) -> None:
    old = [argument(node, 3), argument(node, 4)]
    for what in filter(None, map(shared, old)):
        raise TraceError(
            f"a stage keeps running statistics in {what} and updates them in place; stages are "
            "pure functions: use fpipe.Stage(fn, state=True) with fn(params, state, x) -> (y, "
            "state)"
        )
    results = node.meta["val"]
    values = [torch.empty_like(statistic.meta["val"]) for statistic in old]
    with graph.inserting_before(node):
        pure = graph.call_function(norm, (node.target, *node.args))  # type: ignore[arg-type]
        new = [
            graph.call_function(operator.getitem, (pure, len(results) + index)) for index in (0, 1)
        ]
    pure.meta = {**node.meta, "val": (*results, *values)}
    node.replace_all_uses_with(pure)
    for statistic, item, value in zip(old, new, values, strict=True):
        item.meta = {"val": value}
        statistic.replace_all_uses_with(item, delete_user_cb=lambda user: user in later)
    graph.erase_node(node)


def _resolve(graph: GraphModule) -> None:
    """Resolve lazy tensors that are returned, such as conjugates: a message contains numbers, not
    flags of a tensor.
    """
    output = next(iter(graph.graph.find_nodes(op="output")))
    if _LAZY.isdisjoint(str(node.target) for node in graph.graph.nodes):
        return
    numbers: dict[Node, Node] = {}
    for node in dict.fromkeys(output.args[0]):
        value = value_of(node)
        if value is not None and node.op == "call_function":
            with graph.graph.inserting_before(output):
                numbers[node] = graph.graph.call_function(resolved, (node,))
            numbers[node].meta["val"] = value
    output.args = ([numbers.get(n, n) for n in output.args[0]],)
