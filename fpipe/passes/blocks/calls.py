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
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx
from torch.autograd.graph import Node, get_gradient_edge

from ... import tree
from ...programs.internals import (
    PLAIN,
    RULES,
    Sizes,
    ambient,
    caching,
    empty,
    is_fake,
    mutates,
    operator_of,
    pure_on_fakes,
    storage_id,
    transforming,
    unseeded,
    versions,
)
from ...programs.signature import LITERALS, running
from ...programs.tracing import InexactError, gradients, make_graph
from ...stage import Block
from ...tree import Aval, Structure
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

_ALIAS = torch.ops.aten.alias.default

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
    """A block for arguments of one shape, as a function ``fn`` of their tensors.

    ``computed`` are the tensors that are no leaves of autograd. ``captured`` is what the function
    of the user, ``written``, had closed over. ``cached``: whether autocast has a cache. ``result``
    is the structure of its results, all of them new tensors, ``graphs`` by the cotangents.
    """

    written: Callable[..., Any]
    fn: Callable[[Sequence[torch.Tensor]], Any]
    tensors: tuple[Aval, ...]
    computed: tuple[bool, ...]
    captured: tuple[Any, ...]
    cached: bool
    result: Structure | None = None
    outputs: tuple[Aval, ...] = ()
    graphs: dict[Key, Graph] = field(default_factory=dict)

    def fakes(self) -> list[torch.Tensor]:
        """Its tensors without data; call inside a mode."""
        return [empty(aval) for aval in self.tensors]

    def entering(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as the function gets them: what was computed is no leaf of autograd."""
        pairs = zip(tensors, self.computed, strict=True)
        return [_ALIAS(t) if computed and t.requires_grad else t for t, computed in pairs]


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
        return _graph(self, (None,) * len(self.definition.outputs))


_NUMBERS = count()
#: How many definitions of one block are kept; the oldest is dropped.
KEPT = 64
#: The definitions of each block without symbolic sizes.
_KNOWN: Definitions = WeakKeyDictionary()


def called(within: Calls, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call of a block while a stage is traced."""
    leaves, spec = tree.flatten((args, kwargs))
    tensors = list({id(leaf): leaf for leaf in leaves if tree.is_tensor(leaf)}.values())
    definition = _definition(within, block, leaves, spec, tensors)
    if definition is None or definition.result is None:
        return block.fn(*args, **kwargs)
    call = Call(next(_NUMBERS), definition, within)
    within.calls[call.number] = _CALLS[call.number] = call
    return tree.unflatten(definition.result, list(_Function.apply(call, *tensors)))


def _definition(
    within: Calls,
    block: Block,
    leaves: Sequence[Any],
    spec: Structure,
    tensors: Sequence[torch.Tensor],
) -> Definition | None:
    """What a block is for some arguments; ``None`` where its call cannot be one operation."""
    cached = torch.is_autocast_cache_enabled()
    if transforming() or not torch.is_grad_enabled() or (ambient() and cached):
        return None
    if not all(map(_plain, tensors)):
        return None
    if not all(tree.is_tensor(leaf) or isinstance(leaf, LITERALS) for leaf in leaves):
        return None
    avals = tuple(Aval.like(t, t.requires_grad) for t in tensors)
    place = {id(t): i for i, t in enumerate(tensors)}
    arguments = tuple(place[id(leaf)] if tree.is_tensor(leaf) else (leaf,) for leaf in leaves)
    computed = tuple(not t.is_leaf for t in tensors)
    captured = _captured(block.fn)
    surroundings = ambient(), torch.get_default_dtype(), cached, tuple(map(id, captured))
    types = tuple(map(type, leaves))  # 1, 1.0 and True are equal
    key = (spec, arguments, types, tuple(map(_key, avals)), computed, surroundings)
    known = _KNOWN if within.sizes is PLAIN else within.definitions
    definitions = known.setdefault(block, {})
    if key not in definitions:
        fn = block.fn

        def on_tensors(given: Sequence[torch.Tensor]) -> Any:
            values = [given[a] if isinstance(a, int) else a[0] for a in arguments]
            args, kwargs = tree.unflatten(spec, values)
            return fn(*args, **kwargs)

        new = Definition(fn, on_tensors, avals, computed, captured, cached)
        definitions[key] = _with_results(new, within)
        if len(definitions) > KEPT:
            del definitions[next(iter(definitions))]
    return definitions[key]


def _with_results(definition: Definition, within: Calls) -> Definition | None:
    """The definition with its results; ``None`` where its calls cannot be one operation."""
    label = within.label
    try:
        with outside(), within.sizes.mode():
            given = definition.entering(definition.fakes())
            before = versions(given)
            with unseeded(label), pure_on_fakes(label), torch.enable_grad():
                values, spec = tree.flatten(definition.fn(given))
    except Exception:  # the call without a block raises it again
        return None
    if not values or not all(map(_computed, values)) or versions(given) != before:
        return None
    if len(set(map(storage_id, (*given, *values)))) < len(given) + len(values):
        return None
    outputs = tuple(Aval.like(value, value.requires_grad) for value in values)
    return replace(definition, result=spec, outputs=outputs)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and Aval.like(tensor).kind is None


def _computed(value: object) -> bool:
    """Whether a result is a tensor that the function computed."""
    return is_fake(value) and _plain(value) and not (value.is_leaf and value.requires_grad)


def _key(aval: Aval) -> tuple[Hashable, ...]:
    """An abstract tensor for comparisons: of symbolic sizes their text."""
    sizes = map(str, (*aval.shape, "strides", *aval.stride))
    return (*sizes, aval.dtype, aval.device, aval.grad)


def _captured(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """What a function has closed over: another value makes another function."""
    return tuple(cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())


# ---- the operations in the stage's trace ----
#: The calls in traces that are going on, by number.
_CALLS: WeakValueDictionary[int, Call] = WeakValueDictionary()


class _Function(torch.autograd.Function):
    """A call of a block as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        call, *tensors = args
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = FORWARD(tensors, call.number)
        avals = call.definition.outputs
        ctx.mark_non_differentiable(
            *(t for t, aval in zip(outputs, avals, strict=True) if not aval.grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        call = ctx.call
        if torch.is_grad_enabled() or call.traced:
            raise InexactError("a block is differentiated twice")
        call.traced.append(
            _graph(call, [None if dy is None else Aval.like(dy) for dy in grad_outputs])
        )
        found = iter(BACKWARD([dy for dy in grad_outputs if dy is not None], call.number))
        return None, *(None if node is None else next(found) for node in call.traced[0].gradients)


def _outputs(tensors: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [empty(aval._replace(grad=False)) for aval in _CALLS[call].definition.outputs]


def _gradients(cotangents: list[torch.Tensor], call: int) -> list[torch.Tensor]:
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
        with outside():
            definition.graphs[key] = _traced(call, cotangents)
    return definition.graphs[key]


def _traced(call: Call, cotangents: Sequence[Aval | None]) -> Graph:
    definition = call.definition
    if any(
        now is not then
        for now, then in zip(_captured(definition.written), definition.captured, strict=True)
    ):
        raise InexactError("the function of a block has closed over another value since its call")
    number = len(definition.tensors)
    wanted = [i for i, aval in enumerate(definition.tensors) if aval.grad]
    label, sizes = call.within.label, call.within.sizes
    mode = sizes.mode()
    with mode:
        inputs = [
            *definition.fakes(),
            *(empty(aval) for aval in cotangents if aval is not None),
        ]
    missing: list[bool] = []
    uses: list[int] = []

    def joint(*flat: torch.Tensor) -> tuple[Any, ...]:
        with running(label) as marks, caching(definition.cached), torch.enable_grad():
            given = definition.entering(flat[:number])
            ends = tree.leaves(definition.fn(given))
        grads: Sequence[Any] = ()
        if len(flat) > number:
            live = [end for end, aval in zip(ends, cotangents, strict=True) if aval is not None]
            with torch.enable_grad():
                uses[:] = _uses(live, given)
            handed = BACKWARD(list(flat[number:]), HERE)
            grads = gradients(label, live, [flat[i] for i in wanted], handed, marks)
        missing[:] = [grad is None for grad in grads]
        return (*ends, *(grad for grad in grads if grad is not None))

    with mode:
        graph = make_graph(joint, inputs, sizes)
    _check(graph)
    (output,) = graph.graph.find_nodes(op="output")
    results = iter(output.args[0])
    outputs = tuple(next(results) for _ in definition.outputs)
    found = {i: None if none else next(results) for i, none in zip(wanted, missing, strict=False)}
    return Graph(graph, outputs, tuple(map(found.get, range(number))), tuple(uses) or (0,) * number)


def _uses(ends: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[int]:
    """How many gradients autograd adds up for each tensor."""
    edges: Counter[tuple[Node, int]] = Counter()
    seen: set[Node] = set()
    stack = [get_gradient_edge(end).node for end in ends]
    edges.update(map(_edge, ends))
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            edges.update((upper, port) for upper, port in node.next_functions if upper is not None)
            stack += [upper for upper, _ in node.next_functions if upper is not None]
    return [edges[_edge(t)] if t.requires_grad else 0 for t in given]


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _check(graph: fx.GraphModule) -> None:
    """Refuse what depends on the memory of an argument, whose place is another one in each call."""
    for node in graph.graph.nodes:
        op = operator_of(node)
        if op is torch.ops.aten.as_strided.default:
            if viewed(node).op == "placeholder":
                raise InexactError("as_strided of an argument of a block")
        elif op is not None and mutates(op):
            raise InexactError("a block that writes into an argument")
