# SPDX-License-Identifier: Apache-2.0
"""Removes writes from a traced graph.

Torch's own removal of writes traces the graph again, and takes operations apart whose kernels have
other last bits than their parts, such as ``binary_cross_entropy_with_logits``. Most writes need no
such care: nothing reads the memory afterwards but through the tensor that is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from ..programs.internals import TorchOp, mutates, operator_of
from ..programs.split import STORAGE, storage, value_of
from .views import same

_SERIAL = count()


def without_writes(graph: fx.GraphModule, flat: Sequence[Tensor]) -> fx.GraphModule:
    """A graph of functions of ``flat`` that computes the same; writes into inputs come last in it,
    as ``copy_``.
    """
    nodes = list(graph.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    left = False
    for node in nodes:
        op = operator_of(node)
        if op is not None and mutates(op):
            left |= not _replaced(node, op, places)
    if not left:
        return graph
    # Run node by node, the graph passes annotations on to the nodes recorded from them.
    annotated = any("custom" in node.meta for node in graph.graph.nodes)
    again = fx.Interpreter(graph).run if annotated else graph
    functional = torch.func.functionalize(again, remove="mutations")
    with torch.no_grad(), preserve_node_meta():
        return make_fx(functional, _allow_non_fake_inputs=True)(*(t.detach() for t in flat))


def _replaced(node: fx.Node, op: TorchOp, places: Mapping[fx.Node, int]) -> bool:
    """Replace one write into a temporary that nothing else shows later on."""
    source = node.args[0] if node.args else None
    functional = without_write(op)
    if functional is None or not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    before = value_of(source)
    after = value_of(node)
    if before is None or after is None:
        return False
    memory = storage(source, before)

    def later(other: fx.Node) -> bool:
        return places[other] > places[node]

    values = [(other, value_of(other)) for other in places]
    sharing = [n for n, value in values if value is not None and storage(n, value) == memory]
    for other in sharing:
        if later(other) or other in (node, source):
            continue
        if other.op != "call_function" or any(map(later, other.users)):
            return False
    mode = getattr(after, "fake_mode", None)
    if mode is None:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    with mode:
        new = functional(*args, **kwargs)
    alike = new.dtype == after.dtype and same(new.shape, after.shape)
    if not alike or not same(new.stride(), after.stride()):
        return False
    node.target = functional
    key = ("written", next(_SERIAL))
    for other in sharing:  # what shows this memory from here on shows the new tensor
        if other is node or later(other):
            other.meta[STORAGE] = key
    node.meta["val"] = new
    source.replace_all_uses_with(node, delete_user_cb=later)
    return True


def without_write(op: TorchOp) -> TorchOp | None:
    """The form of an operation that returns a new tensor instead of writing into its first
    argument, and no other.

    >>> without_write(torch.ops.aten.div_.Scalar)
    <OpOverload(op='aten.div', overload='Scalar')>
    """
    name = op._opname
    aliases = [argument.alias_info for argument in op._schema.arguments]
    writes = [place for place, alias in enumerate(aliases) if alias and alias.is_write]
    if writes != [0] or op.namespace != "aten" or not name.endswith("_"):
        return None
    functional = getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None)
    if not isinstance(functional, TorchOp) or mutates(functional):
        return None
    # pow_.Scalar takes a tensor and a number, pow.Scalar a number and a tensor
    return functional if _types(functional) == _types(op) else None


def _types(op: TorchOp) -> list[tuple[str, str]]:
    """The names and types of an operation's arguments."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]
