# SPDX-License-Identifier: Apache-2.0
"""Batch norm's updates of running statistics as values.

Its kernels write into the statistics although their schemas declare them as plain inputs. ``spell_out`` replaces each
such operation by one that returns the new statistics. Knows graphs, no stages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..errors import TraceError
from .graphs import argument, shared, value_of
from .internals import Op, argument_names, name_of, operator_of

_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
#: The arguments that the kernels write into.
STATISTICS = ("running_mean", "running_var")


def updates_statistics(op: Op, arguments: Mapping[str, Any]) -> bool:
    """Whether an operation writes into running statistics against its schema."""
    return name_of(op) in _NORMS and bool(arguments["training"]) and arguments["running_mean"] is not None


def norm(kernel: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """Batch norm without writes: the new running statistics are the last two items of the result."""
    mean, var = args[3].clone(), args[4].clone()
    return (*kernel(*args[:3], mean, var, *args[5:]), mean, var)


def spell_out(graph: fx.GraphModule) -> None:
    """Make updates of running statistics explicit: later readers of a statistic read the new value."""
    for node in list(graph.graph.nodes):
        op = operator_of(node)
        names = [] if op is None else argument_names(op)
        if op is not None and updates_statistics(op, dict(zip(names, node.args, strict=False))):
            _replace(graph.graph, node)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    later = set()
    following = node.next
    while following.op != "root":
        later.add(following)
        following = following.next
    with graph.inserting_before(node):
        pure = graph.call_function(norm, (node.target, *node.args))  # type: ignore[arg-type]
    node.replace_all_uses_with(pure)
    old = [argument(node, 3), argument(node, 4)]
    count = len(node.meta["val"])
    new_values = [torch.empty_like(value) for o in old if (value := value_of(o)) is not None]
    pure.meta = {**node.meta, "val": (*node.meta["val"], *new_values)}
    for index, (statistic, value) in enumerate(zip(old, new_values, strict=True), count):
        if what := shared(statistic):
            raise TraceError(
                f"a stage keeps running statistics in {what} and updates them in place; stages are pure functions: "
                "use fpipe.Stage(fn, state=True) with fn(params, state, x) -> (y, state)"
            )
        with graph.inserting_before(node):
            new = graph.call_function(operator.getitem, (pure, index))
        new.meta = {"val": value}
        statistic.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
    graph.erase_node(node)
