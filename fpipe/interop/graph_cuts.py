# SPDX-License-Identifier: Apache-2.0
"""Cuts the forward of a module into pieces: one small ``torch.fx`` graph for every stage.

The nodes of a graph are submodules and what happens between them. A submodule without a cut inside
is one node, whatever it computes. Values that a later piece needs are passed from piece to piece,
so residuals and skips across a cut need no special case. This module must not know parameters or
stages.
"""

from __future__ import annotations

import dis
import inspect
import operator
import re
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import Argument, map_arg
from torch.fx.proxy import TraceError

from ..errors import StageError
from .module_function import as_node

#: Functions that make a tensor out of sizes: by itself fx does not record a call of them with
#: proxies.
_FACTORIES = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.zeros,
)
#: How many tests of values that are not known a forward may have.
_MOST_TESTS = 100
#: Parts of the names of random functions, which must not run twice.
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson")


def cut_forward(module: nn.Module, cuts: Sequence[str], side: Sequence[str] = ()) -> list[fx.Graph]:
    """Cut the forward of a module before the first use of each submodule named in ``cuts``.

    The placeholders of a graph are the input and the side inputs.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> pieces = cut_forward(model, ["1", "2"])
    >>> [node.target for piece in pieces for node in piece.find_nodes(op="call_module")]
    ['0', '1', '2']
    """
    _check_names(module, cuts)
    graph = _forward_graph(module, cuts, side)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    starts = [0, *_positions(nodes, cuts), len(nodes)]
    return [_piece(graph, nodes, low, high) for low, high in pairwise(starts)]


def _check_names(module: nn.Module, cuts: Sequence[str]) -> None:
    listed = isinstance(cuts, Iterable) and not isinstance(cuts, str)
    if not listed or not all(isinstance(cut, str) for cut in cuts):
        raise StageError(
            f"cuts={cuts!r}; give a list of submodule names, such as ['layers.2', 'layers.4']"
        )
    submodules = dict(module.named_modules(remove_duplicate=False))
    for cut in cuts:
        if not cut or cut not in submodules:
            near = get_close_matches(cut, submodules, n=3, cutoff=0.4)
            raise StageError(
                f"cuts names {cut!r}, which is no submodule of {type(module).__name__}; "
                + (f"near names: {', '.join(near)}" if near else "see model.named_modules()")
            )
    if len(set(cuts)) < len(cuts):
        raise StageError(f"cuts={list(cuts)!r} names a submodule twice; each cut begins one stage")


def _positions(nodes: Sequence[fx.Node], cuts: Sequence[str]) -> list[int]:
    """Return the index of the first node that calls each cut's submodule, or one inside it."""
    calls = [f"{node.target}." if node.op == "call_module" else "" for node in nodes]
    positions = []
    for index, cut in enumerate(cuts):
        position = next((i for i, name in enumerate(calls) if name.startswith(f"{cut}.")), None)
        if position is None:
            raise StageError(
                f"cuts names {cut!r}, but forward never calls it; name a submodule that runs"
            )
        if positions and position <= positions[-1]:
            raise StageError(
                f"cuts has {cut!r} after {cuts[index - 1]!r}, but forward runs it first; give cuts "
                "in forward's order"
            )
        positions.append(position)
    if positions and not any(n.op in ("call_module", "get_attr") for n in nodes[: positions[0]]):
        raise StageError(
            f"cuts begins with {cuts[0]!r}, where forward begins too: the first stage would be "
            "empty; leave it out"
        )
    return positions


def _piece(graph: fx.Graph, nodes: Sequence[fx.Node], low: int, high: int) -> fx.Graph:
    """Return the graph of the nodes from ``low`` to before ``high``.

    Values that depend on side inputs and the module's tensors alone are not passed on: each piece
    computes those that it needs.
    """
    source, *sides = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    repeated = set(sides)
    for node in nodes:
        if _repeatable(node, repeated):
            repeated.add(node)

    def crossing(index: int) -> list[fx.Node]:
        """Return the values from before a node that it or a later one uses."""
        later = {*nodes[index:], output}.difference(repeated)
        before = [n for n in (source, *nodes[:index]) if n not in repeated]
        return [node for node in before if not later.isdisjoint(node.users)]

    piece = fx.Graph()
    x = piece.placeholder(str(source.target))
    copied = {side: piece.placeholder(str(side.target), default_value=None) for side in sides}
    inputs = crossing(low)
    if len(inputs) == 1:
        copied[inputs[0]] = x
    else:
        copied |= {n: piece.call_function(operator.getitem, (x, i)) for i, n in enumerate(inputs)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copied:
            copied[node] = piece.node_copy(node, copy)
        return copied[node]

    for node in nodes[low:high]:
        if node not in repeated:
            copy(node)
    if high == len(nodes):
        result = output.args[0]
    else:
        sent = tuple(crossing(high))
        result = sent[0] if len(sent) == 1 else sent
    piece.output(map_arg(result, copy))
    for side in sides:
        if not copied[side].users:
            piece.erase_node(copied[side])
    return piece


def _repeatable(node: fx.Node, repeated: set[fx.Node]) -> bool:
    """Return whether a value depends on side inputs and tensors alone, and is no draw."""
    if node.op == "get_attr":
        return True
    if node.op == "call_module" or not repeated.issuperset(node.all_input_nodes):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return not _writes(node) and not any(part in name for part in _RANDOM)


# ---- the forward as a graph ----
def _forward_graph(module: nn.Module, cuts: Sequence[str], side: Sequence[str]) -> fx.Graph:
    """Record a forward.

    Its placeholders are the first argument, and those that ``side`` names or that have no default.
    """
    arguments = inspect.signature(module.forward).parameters.values()
    inputs = [p for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = inputs[1:]
    unknown = set(side).difference(p.name for p in others)
    if not inputs:
        raise StageError(
            f"{type(module).__name__}.forward has no arguments with a name, so its input has none; "
            "write forward(self, x, ...)"
        )
    if unknown:
        raise StageError(
            f"side={sorted(unknown)} are no arguments of {type(module).__name__}.forward beyond "
            f"its first one; it has {', '.join(p.name for p in others) or 'none'}"
        )
    wanted = [p.name for p in others if p.name in side or p.default is p.empty]
    try:
        graph = _traced(module, cuts, [inputs[0].name, *wanted])
        assert graph is not None, "a forward without outcomes returns a graph, or raises"
    except Exception as error:
        raise StageError(
            f"the forward of {type(module).__name__} cannot be read as a chain of its submodules: "
            f"{_reason(error)}. "
            "Keep what depends on values inside submodules, in which no cut is, or write the "
            "stages as functions; models of the transformers package are cut by "
            "fpipe.interop.huggingface.stages"
        ) from error
    for node in graph.nodes:
        if node.target in _FACTORIES:
            node.meta.pop("is_wrapped", None)  # its code finds torch's functions without fx.wrap
    return graph


def _traced(
    module: nn.Module,
    cuts: Sequence[str],
    arguments: Sequence[str],
    outcomes: tuple[bool, ...] = (),
) -> fx.Graph | None:
    """Record a forward; where one outcome of a test does nothing but raise, the other one is taken.

    An assertion about sizes, or ``if ...: raise``, is no choice between two computations; nor is a
    test whose outcomes lead to the same graph, as a part of a condition of such an assertion.

    Args:
        module, cuts: as for ``cut_forward``.
        arguments: names of those that are not known; the others keep their defaults.
        outcomes: of the first tests of values that are not known.

    Returns:
        The graph; None if the forward raises after these outcomes.
    """
    try:
        return _Tracer(cuts, arguments, outcomes).trace(module)
    except _UndecidedError:
        if len(outcomes) == _MOST_TESTS:
            raise
        tried = [
            _traced(module, cuts, arguments, (*outcomes, outcome)) for outcome in (True, False)
        ]
        graphs = {_text(graph): graph for graph in tried if graph is not None}
        if len(graphs) > 1 or not (graphs or outcomes):
            raise
        return next(iter(graphs.values()), None)
    except Exception as error:
        if outcomes and _is_raised_by_user(error):
            return None
        raise


def _text(graph: fx.Graph) -> str:
    """Return a graph as text, without values that nothing uses, such as those that were tested."""
    kept = ("placeholder", "output", "call_module")
    graph.eliminate_dead_code(lambda node: node.op in kept or _writes(node))
    return str(graph)


def _writes(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or name == "setitem"


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether a statement ``raise`` outside of torch.fx raised an error."""
    entry = error.__traceback__
    assert entry is not None, "the error was caught"
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    is_raise = code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and not _is_internal(code.co_filename)


class _UndecidedError(TraceError):
    """A test of a value that is not known."""


class _Tracer(fx.Tracer):
    """Traces the modules that contain a cut, and takes every other one as a single node.

    Args:
        cuts: names of submodules.
        arguments: names of those of the forward for which there are placeholders.
        outcomes: of the tests of values that are not known, in turn.
    """

    proxy_buffer_attributes = True

    def __init__(self, cuts: Sequence[str], arguments: Sequence[str], outcomes: Sequence[bool]):
        super().__init__(autowrap_functions=_FACTORIES)
        self.arguments = arguments
        # where fx looks for them, beside the globals of the forward
        self._autowrap_search.append(torch)
        self.outcomes = iter(outcomes)
        self.traced = {
            cut.rsplit(".", up)[0] for cut in cuts for up in range(1, cut.count(".") + 1)
        }

    def create_args_for_root(
        self,
        root_fn: Callable[..., object],
        is_module: bool,
        concrete_args: object = None,
    ) -> tuple[Callable[..., object], list[object]]:
        """Return the forward and a placeholder for each argument, which a decorator may hide."""
        forward = self.root.forward
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self.arguments}
        bound = inspect.BoundArguments(inspect.signature(forward), OrderedDict(given))
        return partial(forward, **bound.kwargs), list(bound.args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.traced

    def create_arg(self, a: object) -> Argument:
        """A mapping of another class than dict, as transformers' ModelOutput, keeps its class."""
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            as_node(type(a))
            items = {name: super(_Tracer, self).create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", type(a), (), items)
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        meta = obj.node.meta
        if "outcome" not in meta:
            meta["outcome"] = next(self.outcomes, None)
        if meta["outcome"] is None:
            raise _UndecidedError("a value is tested that is not known")
        return meta["outcome"]


def _is_internal(filename: str) -> bool:
    # After a use of torch.compile, a frame of the compiler surrounds torch.fx.
    pattern = "/torch/(fx|_dynamo)/"
    return filename == __file__ or re.search(pattern, Path(filename).as_posix()) is not None


def _reason(error: Exception) -> str:
    """Return why a forward cannot be recorded, by the line of it that fails."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not _is_internal(frame.filename)]
    outside = [f for f in frames if not re.search("/torch/(nn/modules|functional)", f.filename)]
    at = "".join(f", at {f.filename}:{f.lineno} ({f.line})" for f in (outside or frames)[-1:])
    if isinstance(error, TraceError):
        return f"a value decides what it computes{at}"
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
        return (
            f"{error}{at}: what the forward of a submodule stores on it has no value when "
            "stages are cut; let the submodule return it (a loss of a stage is "
            "fpipe.Stage(fn, aux_loss=True), see 'MoE and overlap')"
        )
    return f"it needs a value that is known only when it runs{at}: {type(error).__name__}: {error}"
