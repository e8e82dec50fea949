# SPDX-License-Identifier: Apache-2.0
"""Traces a stage over fake tensors and splits the graph into programs, for one signature.

Outputs and gradients are traced as one joint graph. The joint function calls
``torch.autograd.grad``, so custom autograd functions, functional collectives and torch.func inside
a stage can be traced. Python that depends on data cannot. This module knows functions and
signatures, no schedules, ranks or microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.fx.traceback import preserve_node_meta

from .. import tree
from ..actions.product import load_pass
from ..errors import FpipeError
from ..stage import Stage
from ..tree import AbstractTree, Aval
from .internals import (
    PLAIN,
    Sizes,
    caching,
    draws,
    empty,
    exclusive,
    fake_inputs,
    function_modes,
    is_fake,
    mutates,
    operator_of,
    pure_on_fakes,
    quiet,
    setting,
    without_autocast,
)
from .operations import Held, Operation, Ref, Value
from .program import Program, Programs
from .signature import Outputs, Signature, call, entering, outputs_of
from .split import Joint, Subgraph, Subgraphs, captured, normalize, split, storages, value_of
from .wrappers import BLOCKS, Block

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Called between forward and backward with the outputs that have a cotangent, the params and x as
#: the function got them, and the cotangents; returns the cotangents to use.
Hook: TypeAlias = Callable[[Tensors, Sequence[Any], Tensors], Tensors]


class InexactError(Exception):
    """A trace that serves several blocks or sizes would change the graph."""


def traced(
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    sizes: Sizes = PLAIN,
    shown: str = "",
) -> Programs:
    """Trace the programs of a stage for one signature. Its outputs ``unused`` have no cotangent.

    ``sizes`` converts the numbers in the trace. ``shown`` describes the signature in messages.
    """
    for argument in signature:
        for aval in argument.avals.values():
            if aval.kind is not None:
                raise load_pass("explain").nested_tensor_error(stage.label, aval)
    if function_modes():
        load_pass("explain").check_function_modes(stage.label)
    shown = shown or str(signature)
    # A trace is cached for all callers, so it must not depend on their modes.
    with quiet(), torch.inference_mode(False), torch.enable_grad():
        try:
            outputs, graph = _recorded(stage, signature, unused, sizes)
            nodes = list(graph.graph.nodes)
            with without_autocast():
                normalize(graph, [*signature.names, *outputs.cotangents])
        except FpipeError:
            raise
        except Exception as error:
            raise load_pass("explain").explain(error, stage.label, shown) from error
        programs = _programs(stage, f"{stage.label} {shown}", signature, outputs, graph, sizes)
        for node in (*nodes, *graph.graph.nodes):
            node.meta.clear()  # a graph is a cycle: its fake tensors would live on
        return programs


def returned(stage: Stage, signature: Signature) -> AbstractTree | None:
    """What a stage returns, found without a trace; None where only a trace can say."""
    with exclusive(), quiet(), torch.inference_mode(False), torch.enable_grad():
        try:
            return outputs_of(stage, signature).y
        except Exception:  # a trace raises what is wrong
            return None


def _recorded(
    stage: Stage, signature: Signature, unused: frozenset[int], sizes: Sizes
) -> tuple[Outputs, fx.GraphModule]:
    """Trace the outputs of a stage and its joint graph. All calls of a block have one trace."""

    def record() -> tuple[Outputs, fx.GraphModule]:
        outputs = replace(outputs_of(stage, signature, sizes), unused=unused)
        return outputs, joint_graph(stage, signature, outputs, sizes)

    calls: Any = None  # the record of all calls of blocks, if there is one

    def on_block(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        blocks = load_pass("blocks.calls")
        calls = calls or blocks.Calls(stage.label, sizes)
        return blocks.called(calls, block, args, kwargs)

    with suppress(InexactError), setting(BLOCKS, on_block):
        outputs, graph = record()
        if calls is not None:
            load_pass("blocks.inlining").inline(graph, calls.calls)
        return outputs, graph
    return record()


# ---- the joint graph ----
def make_graph(
    fn: Callable[..., Any], flat: Sequence[torch.Tensor], sizes: Sizes = PLAIN
) -> fx.GraphModule:
    """Record ``fn`` as a graph without writes, with a placeholder for each tensor of ``flat``."""
    for tensor in flat:
        tensor.grad = None
    with preserve_node_meta():
        graph = make_fx(fn, _allow_non_fake_inputs=True)(*flat)
    with without_autocast():  # the graph has its casts
        if any(map(mutates, filter(None, map(operator_of, graph.graph.nodes)))):
            graph = load_pass("writes").without_writes(graph, flat)
        sizes.inline(graph)
    return graph


def joint_graph(
    stage: Stage,
    signature: Signature,
    outputs: Outputs,
    sizes: Sizes,
    hook: Hook = lambda ends, inputs, cotangents: cotangents,
) -> fx.GraphModule:
    """Trace a stage and its gradients as one graph.

    Its inputs are the tensors of the signature, then the cotangents. It returns the tensors of
    outputs, auxiliary scalar and new state, then the gradients of params and x.
    """
    mode = sizes.mode()
    with mode:
        groups = fake_inputs(signature)
        cotangents = [empty(aval) for aval in outputs.cotangents.values()]
    names = [*(f"dy{j}" for j in outputs.y.avals), *(["daux"] if outputs.aux is not None else [])]
    slots = signature.slots
    cached = torch.is_autocast_cache_enabled()  # make_fx switches it off

    def joint(*flat: Any) -> tuple[Any, ...]:
        arguments = [list(group) for group in groups]
        for (g, i), value in zip(slots, flat, strict=False):
            arguments[g][i] = value
        wrt = [arguments[g][i] for g in (0, 1) for i in signature[g].wanted]
        arguments[1] = entering(signature.x, arguments[1])
        with caching(cached):
            result = call(stage, signature, arguments, outputs.writes_input)
        ends = list(filter(tree.is_tensor, tree.leaves((result.y, result.aux))))
        live = [end for name, end in zip(names, ends, strict=True) if name in outputs.cotangents]
        grads: Sequence[Any] = [None] * len(wrt)
        if live and wrt:
            dys = hook(live, [*arguments[0], *arguments[1]], flat[len(slots) :])
            # A checkpoint inside functional_call would compute again with the module's parameters.
            with without_autocast(), pure_on_fakes(stage.label, "other_parameters_error"):
                grads = torch.autograd.grad(live, wrt, dys, allow_unused=True)
        for grad in grads:
            if grad is not None and grad.layout is not torch.strided:
                raise load_pass("explain").sparse_gradient_error(stage.label, grad.shape)
        return (*ends, *tree.leaves(result.state), *grads)

    with mode:  # the function may create tensors (arange, zeros, ...), which must be fake, too
        flat = [*(groups[g][i] for g, i in slots), *cotangents]
        return make_graph(joint, flat, sizes)


# ---- its programs ----
def _programs(
    stage: Stage,
    label: str,
    signature: Signature,
    outputs: Outputs,
    graph: fx.GraphModule,
    sizes: Sizes,
) -> Programs:
    joint = _joint_of(graph, signature, outputs)
    tensors = captured(graph)
    if any(map(is_fake, tensors.values())):
        load_pass("tables").refuse(stage, signature, tensors.values())
    subgraphs = split(joint)
    behind = {
        name: held._replace(nbytes=sizes.number(held.nbytes))
        for name, held in storages(joint.nodes).items()
    }
    operations = _operations(joint.nodes, sizes)

    def program(letter: str, subgraph: Subgraph) -> Program:
        body = [operations[node] for node in subgraph.nodes if node in operations]
        used = {name for one in body for name in one.inputs}.union(subgraph.outputs)
        inside = {name: value for name, value in tensors.items() if name in used}
        inputs = [name for name in subgraph.inputs if name not in inside]
        return Program.of(letter, body, inputs, subgraph.outputs, inside, stage=label)

    def names(nodes: Iterable[fx.Node | None]) -> tuple[str | None, ...]:
        return tuple(None if node is None else node.name for node in nodes)

    extras = [node.name for node in joint.extras]
    aux = extras.pop(0) if outputs.aux is not None else None
    return Programs(
        program("F", subgraphs.f),
        program("B", subgraphs.b),
        program("I", subgraphs.i),
        program("W", subgraphs.w),
        signature=signature,
        outputs=_with_strides(outputs, filter(None, joint.ys), sizes),
        ys=names(joint.ys),
        aux=aux,
        new_state=tuple(extras),
        dps=names(joint.dps),
        dxs=names(joint.dxs),
        saved=subgraphs.saved,
        kept=subgraphs.kept,
        grad_avals={
            node.name: sizes.aval(Aval.like(value))
            for node in (*joint.dps, *joint.dxs)
            if node is not None and (value := value_of(node)) is not None
        },
        memory=behind,
        fresh=_fresh(joint, behind, subgraphs),
        label=stage.label,
    )


def _joint_of(graph: fx.GraphModule, signature: Signature, outputs: Outputs) -> Joint:
    """The nodes of a joint graph by role."""
    following = iter(next(iter(graph.graph.find_nodes(op="output"))).args[0])

    def by_leaf(leaves: Collection[int], count: int) -> tuple[fx.Node | None, ...]:
        nodes = {leaf: next(following) for leaf in leaves}
        return tuple(map(nodes.get, range(count)))

    state = () if outputs.state is None else outputs.state.avals
    return Joint(
        nodes=tuple(n for n in graph.graph.nodes if n.op in ("placeholder", "call_function")),
        cotangents=frozenset(outputs.cotangents),
        ys=by_leaf(outputs.y.avals, len(outputs.y.leaves)),
        extras=tuple(islice(following, (outputs.aux is not None) + len(state))),
        dps=by_leaf(signature.params.wanted, len(signature.params.leaves)),
        dxs=by_leaf(signature.x.wanted, len(signature.x.leaves)),
    )


def _with_strides(outputs: Outputs, ys: Iterable[fx.Node], sizes: Sizes) -> Outputs:
    """The outputs with the strides of the traced operations and the numbers of the trace."""
    following = iter(ys)

    def traced_aval(aval: Aval) -> Aval:
        value = value_of(next(following))
        return sizes.aval(aval if value is None else Aval.like(value, aval.grad))

    return replace(
        outputs,
        y=outputs.y.with_avals(traced_aval),
        aux=None if outputs.aux is None else sizes.aval(outputs.aux),
        state=None if outputs.state is None else outputs.state.with_avals(sizes.aval),
    )


def _fresh(joint: Joint, behind: Mapping[str, Held], subgraphs: Subgraphs) -> frozenset[str]:
    """The gradients that are alone in their storage, so that others may be added into them."""
    gradients = {node.name: node for node in filter(None, joint.dps)}
    passed_on = {
        *subgraphs.saved,
        *subgraphs.kept,
        *(node.name for node in filter(None, joint.dxs)),
    }
    uses = [node.name for node in filter(None, joint.dps)]
    uses += passed_on - gradients.keys()
    users = Counter(behind[name].root for name in uses if name in behind)
    return frozenset(
        name
        for name, node in gradients.items()
        if node.op == "call_function"
        and not draws(node)
        and _dense(node)
        and name in behind
        and not behind[name].given
        and users[behind[name].root] == 1
    )


def _dense(node: fx.Node) -> bool:
    """Whether no two elements of a value are at one place in memory."""
    value = value_of(node)
    return value is not None and all(
        stride > 0 or n <= 1 for n, stride in zip(value.shape, value.stride(), strict=True)
    )


# ---- its operations ----
def _operations(nodes: Iterable[fx.Node], sizes: Sizes) -> dict[fx.Node, Operation]:
    """The operations of a graph as records."""
    values = {node: _abstract(node.meta.get("val"), sizes) for node in nodes}
    operations: dict[fx.Node, Operation] = {}

    def argument(value: Any) -> Any:
        return Ref(value.name) if isinstance(value, fx.Node) else sizes.number(value)

    for node, value in values.items():
        if node.op == "call_function":
            assert callable(node.target)
            operations[node] = Operation(
                node.name,
                node.target,
                map_aggregate(node.args, argument),
                map_aggregate(node.kwargs, argument),
                tuple(used.name for used in node.all_input_nodes),
                tuple(values.get(used) for used in node.all_input_nodes),
                value,
            )
    return operations


def _abstract(value: object, sizes: Sizes) -> Value:
    if isinstance(value, torch.Tensor):
        return sizes.aval(Aval.like(value)) if value.layout is torch.strided else None
    if isinstance(value, (list, tuple)):
        return tuple(_abstract(item, sizes) for item in value)
    return None
