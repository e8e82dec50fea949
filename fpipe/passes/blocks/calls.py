# SPDX-License-Identifier: Apache-2.0
"""Traces a block once for all its calls with equal arguments, while the stage around it is traced.

In the trace of the stage a call of a block is one operation, and so is its backward. ``inlining``
puts the operations of the block's own trace in their place, so the graph is the one without blocks.
A call that cannot be one operation runs as if it were no block. Knows fake tensors and graphs, no
stages, schedules or ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node, get_gradient_edge

from ... import tree
from ...programs.internals import (
    KERNELS,
    PLAIN,
    RULES,
    Sizes,
    ambient,
    caching,
    empty,
    mutates,
    operator_of,
    transforming,
)
from ...programs.signature import LITERALS, Outputs, Signature, outputs_of
from ...programs.split import storage, value_of
from ...programs.tracing import InexactError, joint_graph
from ...programs.wrappers import Block
from ...stage import Stage
from ...tree import AbstractTree, Aval, Structure, Tree
from ..eager.autograd_split import walk
from ..operators import viewed
from .outside import outside

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("block(Tensor[] tensors, int call) -> Tensor[]")
_LIBRARY.define("block_backward(Tensor[] cotangents, int call) -> Tensor[]")
#: A call of a block in a graph, and its backward. In a block's own graph the second one, with
#: ``HERE`` as its call, hands the cotangents through: the operations behind it are those of the
#: backward.
FORWARD = torch.ops.fpipe.block.default
BACKWARD = torch.ops.fpipe.block_backward.default
HERE = -1

Key: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """The operations of a block: forward, and backward for some cotangents.

    ``outputs`` and ``gradients`` are its results; ``uses`` counts the gradients that are added up
    in each of these.
    """

    graph: fx.GraphModule
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    uses: tuple[int, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """Its inputs: the tensors of the call, then the cotangents."""
        return self.graph.graph.find_nodes(op="placeholder")


@dataclass(frozen=True, eq=False)
class Definition:
    """A block for arguments of one shape, as a stage.

    Its params are the tensors that are leaves of autograd, its x all others. ``captured`` is what
    the function of the user, ``written``, had closed over; ``cached``: whether autocast has a
    cache. ``graphs`` are its graphs by the cotangents. ``refused`` says why no graph is exact.
    """

    stage: Stage
    signature: Signature
    outputs: Outputs
    written: Callable[..., object]
    captured: tuple[object, ...]
    cached: bool
    graphs: dict[Key, Graph] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


#: The definitions of a block by its arguments; None where its calls cannot be one operation.
Definitions: TypeAlias = WeakKeyDictionary[Block, dict[Key, Definition | None]]


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of blocks in the trace of one stage, by number.

    ``definitions`` are those of this trace, where its sizes are symbolic.
    """

    label: str
    sizes: Sizes
    calls: dict[int, Call] = field(default_factory=dict)
    definitions: Definitions = field(default_factory=WeakKeyDictionary)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a block in the trace of a stage. ``traced`` is its graph, once it has a
    backward.
    """

    number: int
    definition: Definition
    within: Calls
    traced: list[Graph] = field(default_factory=list)

    def forward(self) -> Graph:
        """The graph of the call; without a backward where it has none."""
        if self.traced:
            return self.traced[0]
        return _graph(self, (None,) * len(self.definition.outputs.y.leaves))


_NUMBERS = count()
#: How many definitions of one block are kept; the oldest is dropped.
KEPT = 64
#: The definitions of each block without symbolic sizes.
_SHARED: Definitions = WeakKeyDictionary()


def called(
    within: Calls,
    block: Block,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Tree:
    """The result of a call of a block while a stage is traced."""
    leaves, spec = tree.flatten((args, kwargs))
    tensors = list({id(leaf): leaf for leaf in leaves if tree.is_tensor(leaf)}.values())
    tensors.sort(key=lambda tensor: not tensor.is_leaf)
    definition = _definition(within, block, leaves, spec, tensors)
    if definition is None or definition.refused:
        return block.fn(*args, **kwargs)
    call = Call(next(_NUMBERS), definition, within)
    within.calls[call.number] = _CALLS[call.number] = call
    return tree.unflatten(definition.outputs.y.structure, list(_Function.apply(call, *tensors)))


def _definition(
    within: Calls,
    block: Block,
    leaves: Sequence[object],
    spec: Structure,
    tensors: Sequence[Tensor],
) -> Definition | None:
    """What a block is for some arguments; ``None`` where its call cannot be one operation."""
    if transforming() or not torch.is_grad_enabled() or ambient():  # backwards have no autocast
        return None
    if not all(tree.is_tensor(leaf) or isinstance(leaf, LITERALS) for leaf in leaves):
        return None
    avals = [Aval.like(t, t.requires_grad) for t in tensors]
    strided = all(t.layout is torch.strided for t in tensors)
    if not strided or any(aval.kind is not None for aval in avals):
        return None
    place = {id(t): i for i, t in enumerate(tensors)}
    arguments = tuple(place[id(leaf)] if tree.is_tensor(leaf) else (leaf,) for leaf in leaves)
    count = sum(t.is_leaf for t in tensors)
    fn = block.fn
    captured = _captured(fn)
    # Tracing itself changes autocast's cache and the modes of functions.
    cached = torch.is_autocast_cache_enabled()
    state = cached, torch.get_default_dtype(), *(kernel() for kernel in KERNELS)
    around = state, tuple(map(id, captured))
    types = tuple(map(type, leaves))  # 1, 1.0 and True are equal
    key = (spec, arguments, types, tuple(map(_key, avals)), count, around)
    shared = _SHARED if within.sizes is PLAIN else within.definitions
    definitions = shared.setdefault(block, {})
    if key in definitions:
        return definitions[key]

    def on_tensors(params: list[Tensor], x: list[Tensor]) -> Tree:
        given = [*params, *x]
        values = [given[a] if isinstance(a, int) else a[0] for a in arguments]
        args, kwargs = tree.unflatten(spec, values)
        return fn(*args, **kwargs)

    stage = Stage(on_tensors, name=within.label)
    side = AbstractTree.of({})
    state = AbstractTree.of(None)
    signature = Signature(_tree(avals[:count]), _tree(avals[count:]), side, state)
    outputs = _outputs_of(stage, signature, within.sizes)
    definitions[key] = outputs and Definition(stage, signature, outputs, fn, captured, cached)
    if len(definitions) > KEPT:
        del definitions[next(iter(definitions))]
    return definitions[key]


def _tree(avals: Sequence[Aval]) -> AbstractTree:
    return AbstractTree(tree.flatten([0] * len(avals))[1], tuple(avals), computed=True)


def _outputs_of(stage: Stage, signature: Signature, sizes: Sizes) -> Outputs | None:
    """The results of a block; ``None`` where its calls cannot be one operation."""
    try:
        with outside():
            outputs = outputs_of(stage, signature, sizes)
    except Exception:  # the call without a block raises it again
        return None
    y = outputs.y
    whole = y.avals and len(y.avals) == len(y.leaves) and not y.repeats
    if whole and not outputs.writes_input:
        return outputs
    return None


def _key(aval: Aval) -> tuple[Hashable, ...]:
    """An abstract tensor for comparisons: of symbolic sizes their text."""
    sizes = map(str, (*aval.shape, "strides", *aval.stride))
    return (*sizes, aval.dtype, aval.device, aval.grad)


def _captured(fn: Callable[..., object]) -> tuple[object, ...]:
    """What a function has closed over: another value makes another function."""
    return tuple(cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())


# ---- the operations in the stage's trace ----
#: The calls in traces that are going on, by number.
_CALLS: WeakValueDictionary[int, Call] = WeakValueDictionary()


class _Function(torch.autograd.Function):
    """A call of a block as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call, *tensors = args
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = FORWARD(tensors, call.number)
        wanted = call.definition.outputs.y.wanted
        ctx.mark_non_differentiable(*(t for j, t in enumerate(outputs) if j not in wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        call = ctx.call
        if torch.is_grad_enabled() or call.traced:
            raise InexactError("a block is differentiated twice")
        graph = _graph(call, [None if dy is None else Aval.like(dy) for dy in grad_outputs])
        call.traced.append(graph)
        gradients = iter(BACKWARD([dy for dy in grad_outputs if dy is not None], call.number))
        return None, *(None if node is None else next(gradients) for node in graph.gradients)


def _outputs(tensors: list[Tensor], call: int) -> list[Tensor]:
    avals = _CALLS[call].definition.outputs.y.avals.values()
    return [empty(aval._replace(grad=False)) for aval in avals]


def _gradients(cotangents: list[Tensor], call: int) -> list[Tensor]:
    if call == HERE:
        return [empty(Aval.like(dy)) for dy in cotangents]
    (graph,) = _CALLS[call].traced
    return [empty(Aval.like(node.meta["val"])) for node in graph.gradients if node is not None]


RULES.update({FORWARD: _outputs, BACKWARD: _gradients})


# ---- the block's own trace ----
def _graph(call: Call, cotangents: Sequence[Aval | None]) -> Graph:
    """The graph of a call with the backward for some cotangents."""
    definition = call.definition
    key = tuple(None if aval is None else _key(aval) for aval in cotangents)
    if key not in definition.graphs:
        try:
            with outside(), caching(definition.cached), torch.enable_grad():
                definition.graphs[key] = _traced(definition, call.within.sizes, cotangents)
        except InexactError as error:
            definition.refused.append(str(error))
            raise
    return definition.graphs[key]


def _traced(definition: Definition, sizes: Sizes, cotangents: Sequence[Aval | None]) -> Graph:
    now = _captured(definition.written)
    if any(value is not before for value, before in zip(now, definition.captured, strict=True)):
        raise InexactError("the function of a block has closed over another value since its call")
    signature = definition.signature
    y = definition.outputs.y
    ends_avals = tuple(
        (cotangent or aval)._replace(grad=cotangent is not None)
        for aval, cotangent in zip(y.avals.values(), cotangents, strict=True)
    )
    outputs = replace(definition.outputs, y=replace(y, leaves=ends_avals))
    tensors = [*signature.params.avals.values(), *signature.x.avals.values()]
    uses = [0] * len(tensors)

    def hook(
        ends: Sequence[Tensor], inputs: Sequence[Tensor], dys: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        uses[:] = _uses(ends, inputs)
        with torch.no_grad():
            return BACKWARD(list(dys), HERE)

    graph = joint_graph(definition.stage, signature, outputs, sizes, hook)
    (output,) = graph.graph.find_nodes(op="output")
    results = iter(output.args[0])
    ends = tuple(next(results) for _ in ends_avals)
    _check(graph, ends)
    gradients = tuple(next(results) if aval.grad else None for aval in tensors)
    return Graph(graph, ends, gradients, tuple(uses))


def _uses(ends: Sequence[Tensor], given: Sequence[Tensor]) -> list[int]:
    """How many gradients autograd adds up for each tensor."""
    ends_of = list(map(get_gradient_edge, ends))
    edges = Counter[tuple[Node | None, int]]((edge.node, edge.output_nr) for edge in ends_of)
    edges.update(chain(*walk(ends_of)[0].values()))
    own = (get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in given)
    return [0 if edge is None else edges[edge.node, edge.output_nr] for edge in own]


def _check(graph: fx.GraphModule, ends: Sequence[fx.Node]) -> None:
    """Refuse what depends on the memory of an argument, whose place is another one in each call,
    and results that are not new tensors.
    """
    nodes = [*graph.graph.find_nodes(op="placeholder"), *ends]
    values = [(node, value_of(node)) for node in nodes]
    storages = {storage(node, value) for node, value in values if value is not None}
    if len(storages) < len(nodes) or any(end.op != "call_function" for end in ends):
        raise InexactError("a block that returns an argument, or memory of it")
    for node in graph.graph.nodes:
        op = operator_of(node)
        if op is torch.ops.aten.as_strided.default:
            if viewed(node).op == "placeholder":
                raise InexactError("as_strided of an argument of a block")
        elif op is not None and mutates(op):
            raise InexactError("a block that writes into an argument")
