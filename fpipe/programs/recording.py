# SPDX-License-Identifier: Apache-2.0
"""Records what a function does to fake tensors, as a graph without writes.

Torch's own removal of writes traces the graph again, and takes operations apart whose kernels have
other last bits than their parts, such as ``binary_cross_entropy_with_logits``. Most writes need no
such care: nothing reads the memory afterwards but through the tensor that is written. Knows graphs,
no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from .graphs import STORAGE, storage, value_of
from .internals import Op, mutates, operator_of, without_write
from .symbols import computed, is_symbolic, known

_SERIAL = count()


def make_graph(fn: Callable[..., Any], flat: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Record what ``fn`` does to tensors as a graph without mutations; one placeholder for each
    tensor.
    """
    for tensor in flat:
        tensor.grad = None
    with preserve_node_meta():
        graph = make_fx(fn, _allow_non_fake_inputs=True)(*flat)
    if not _without_writes(graph):
        annotated = any("custom" in node.meta for node in graph.graph.nodes)
        # Run node by node, the graph passes annotations on to the nodes recorded from them.
        again = (lambda *args: fx.Interpreter(graph).run(*args)) if annotated else graph
        functional = torch.func.functionalize(again, remove="mutations")
        with torch.no_grad(), preserve_node_meta():
            graph = make_fx(functional, _allow_non_fake_inputs=True)(*(t.detach() for t in flat))
    _inline_numbers(graph)
    return graph


def _inline_numbers(graph: fx.GraphModule) -> None:
    """Put symbolic numbers themselves in place of the nodes that compute them."""
    numbers = {n: computed(n) for n in graph.graph.nodes if is_symbolic(n.meta.get("val"))}
    if not numbers:
        return
    for node in graph.graph.nodes:
        if node not in numbers:

            def inline(used):
                return numbers.get(used, used)

            node.args, node.kwargs = fx.map_arg(node.args, inline), fx.map_arg(node.kwargs, inline)
    for node in reversed(numbers):
        graph.graph.erase_node(node)


# ---- writes ----
def _without_writes(graph: fx.GraphModule) -> bool:
    """Replace each write into a temporary that nothing else shows later on; returns whether no
    write is left.
    """
    nodes = list(graph.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    left = False
    for node in nodes:
        op = operator_of(node)
        if op is not None and mutates(op):
            left |= not _replaced(node, op, places)
    return not left


def _replaced(node: fx.Node, op: Op, places: Mapping[fx.Node, int]) -> bool:
    """Replace one write, if it is simple."""
    source, functional = node.args[0] if node.args else None, without_write(op)
    if functional is None or not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    before, after = value_of(source), value_of(node)
    if before is None or after is None:
        return False
    memory = storage(source, before)

    def later(one):
        return places[one] > places[node]

    shown = [
        each
        for each in places
        if (value := value_of(each)) is not None and storage(each, value) == memory
    ]
    others = [each for each in shown if places[each] < places[node] and each is not source]
    if any(each.op != "call_function" or any(map(later, each.users)) for each in others):
        return False
    new = _value(node, functional)
    if new is None or new.dtype != after.dtype or not _same_layout(new, after):
        return False
    node.target = functional
    key = ("written", next(_SERIAL))
    for each in shown:  # what shows this memory from here on shows the new tensor
        if each is node or later(each):
            each.meta[STORAGE] = key
    node.meta["val"] = new
    source.replace_all_uses_with(node, delete_user_cb=later)
    return True


def _value(node: fx.Node, op: Op) -> torch.Tensor | None:
    """What the operation returns for the values of a node's arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    value = value_of(node)
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return None
    with mode:
        new = op(*args, **kwargs)
    return new if isinstance(new, torch.Tensor) else None


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = [
        *zip(one.shape, other.shape, strict=False),
        *zip(one.stride(), other.stride(), strict=False),
    ]
    return one.dim() == other.dim() and all(known(a == b) for a, b in pairs)
