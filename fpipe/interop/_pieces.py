# SPDX-License-Identifier: Apache-2.0
"""Cuts the forward of a module into pieces: one small ``torch.fx`` graph for every stage.

The nodes of a graph are submodules and what happens between them. A submodule without a cut inside
is one node, whatever it computes. Values that a later piece needs are passed from piece to piece,
so residuals and skips across a cut need no special case. This module must not know parameters or
stages.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import optree
import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError

from .. import tree
from ..errors import StageError

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
_TRACE_ERRORS = (
    TraceError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
)
_STRAIGHT = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
#: Parts of the names of random functions, which must not run twice.
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson")


class Piece(NamedTuple):
    """A graph from one cut to the next: its placeholders are ``x`` and then the side inputs in
    ``sides``.
    """

    graph: fx.Graph
    sides: tuple[str, ...]
    names: tuple[str, ...]  # dotted names of the submodules, parameters and buffers that it uses


def pieces(module: nn.Module, cuts: Sequence[str], side: Sequence[str] = ()) -> list[Piece]:
    """Cut the forward of a module before the first use of each submodule named in ``cuts``.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [piece.names for piece in pieces(model, ["1", "2"])]
    [('0',), ('1',), ('2',)]
    """
    _check_names(module, cuts)
    forward = _forward(_forward_graph(module, cuts, side), cuts)
    return [_piece(forward, index) for index in range(len(cuts) + 1)]


def _check_names(module: nn.Module, cuts: Sequence[str]) -> None:
    if (
        isinstance(cuts, str)
        or not isinstance(cuts, Iterable)
        or not all(isinstance(cut, str) for cut in cuts)
    ):
        raise StageError(
            f"cuts={cuts!r}; give a list of submodule names, such as ['layers.2', 'layers.4']"
        )
    known = dict(module.named_modules(remove_duplicate=False))
    for cut in cuts:
        if not cut or cut not in known:
            near = get_close_matches(cut, list(known), n=3, cutoff=0.4)
            raise StageError(
                f"cuts names {cut!r}, which is no submodule of {type(module).__name__}; "
                + (f"near names: {', '.join(near)}" if near else "see model.named_modules()")
            )
    if len(set(cuts)) < len(cuts):
        raise StageError(f"cuts={list(cuts)!r} names a submodule twice; each cut begins one stage")


class _Forward(NamedTuple):
    """A graph with the piece of each of its nodes."""

    x: fx.Node
    sides: list[fx.Node]
    nodes: list[fx.Node]
    output: fx.Node
    piece_of: dict[fx.Node, int]
    repeated: set[
        fx.Node
    ]  # depend on side inputs and the module's tensors alone: recomputed where they are needed

    def crossing(self, index: int) -> list[fx.Node]:
        """The values computed before piece ``index`` and used in it or later, in the order of
        computation.
        """
        later = {
            node for node in (*self.nodes, self.output) if self.piece_of[node] >= index
        } - self.repeated
        before = (node for node in (self.x, *self.nodes) if self.piece_of[node] < index)
        return [
            node
            for node in before
            if node not in self.repeated and not later.isdisjoint(node.users)
        ]


def _forward(graph: fx.Graph, cuts: Sequence[str]) -> _Forward:
    x, *sides = (n for n in graph.nodes if n.op == "placeholder")
    output = next(n for n in graph.nodes if n.op == "output")
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    piece_of = {x: 0, output: len(cuts)}
    for index, (low, high) in enumerate(pairwise([0, *_positions(nodes, cuts), len(nodes)])):
        piece_of |= dict.fromkeys(nodes[low:high], index)
    repeated = set(sides)
    for node in nodes:
        if _repeatable(node, repeated):
            repeated.add(node)
    return _Forward(x, sides, nodes, output, piece_of, repeated)


def _positions(nodes: Sequence[fx.Node], cuts: Sequence[str]) -> list[int]:
    """The index of the first node that calls each cut's submodule, or a submodule inside it."""
    calls = [f"{node.target}." if node.op == "call_module" else "" for node in nodes]
    positions: list[int] = []
    for cut in cuts:
        position = next(
            (index for index, name in enumerate(calls) if name.startswith(f"{cut}.")), None
        )
        if position is None:
            raise StageError(
                f"cuts names {cut!r}, but forward never calls it; name a submodule that runs"
            )
        positions.append(position)
    for (before, first), (after, second) in pairwise(zip(cuts, positions, strict=True)):
        if second <= first:
            raise StageError(
                f"cuts has {after!r} after {before!r}, but forward runs it first; give cuts in "
                "forward's order"
            )
    if positions and not any(
        node.op in ("call_module", "get_attr") for node in nodes[: positions[0]]
    ):
        raise StageError(
            f"cuts begins with {cuts[0]!r}, where forward begins too: the first stage would be "
            "empty; leave it out"
        )
    return positions


def _repeatable(node: fx.Node, repeated: set[fx.Node]) -> bool:
    """Whether a value depends on side inputs and the module's tensors alone, and costs nothing to
    compute again.
    """
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or any(
        n not in repeated for n in node.all_input_nodes
    ):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return not name.endswith("_") and not any(word in name for word in _RANDOM)


def _piece(forward: _Forward, index: int) -> Piece:
    """The graph of one piece."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    last = index == forward.piece_of[forward.output]
    inputs = [forward.x] if index == 0 else forward.crossing(index)
    outputs = list(forward.output.all_input_nodes) if last else forward.crossing(index + 1)
    nodes = [n for n in forward.nodes if forward.piece_of[n] == index and n not in forward.repeated]
    x = graph.placeholder(str(forward.x.target) if index == 0 else "x")
    copied |= {
        side: graph.placeholder(str(side.target), default_value=None) for side in forward.sides
    }
    if len(inputs) == 1:
        copied[inputs[0]] = x
    else:
        copied |= {n: graph.call_function(operator.getitem, (x, i)) for i, n in enumerate(inputs)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copied:
            copied[node] = graph.node_copy(node, copy)
        return copied[node]

    for node in nodes:
        copy(node)
    results = tuple(copy(node) for node in outputs)
    if last:
        graph.output(map_arg(forward.output.args[0], copy))
    else:
        graph.output(results[0] if len(results) == 1 else results)
    sides = [side for side in forward.sides if copied[side].users]
    for side in forward.sides:
        if side not in sides:
            graph.erase_node(copied[side])
    names = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
    return Piece(graph, tuple(str(side.target) for side in sides), tuple(names))


# ---- the forward as a graph ----
def _forward_graph(module: nn.Module, cuts: Sequence[str], side: Sequence[str]) -> fx.Graph:
    """Record a forward; its placeholders are the first argument and those that ``side`` names or
    have no default.
    """
    arguments = inspect.signature(module.forward).parameters.values()
    inputs = [p for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = set(side) - {p.name for p in inputs[1:]}
    if unknown or not inputs:
        raise StageError(
            f"side={sorted(unknown)} are no arguments of {type(module).__name__}.forward beyond "
            "its first one; "
            f"it has {', '.join(p.name for p in inputs[1:]) or 'none'}"
        )
    fixed = {
        p.name: p.default for p in inputs[1:] if p.default is not p.empty and p.name not in side
    }
    try:
        graph = _Tracer(cuts).trace(module, concrete_args=fixed)
    except _TRACE_ERRORS as error:
        raise StageError(
            f"the forward of {type(module).__name__} cannot be read as a chain of its submodules: "
            f"{_reason(error)}. "
            "Keep what depends on values inside submodules, or write the stages as functions "
            "(fpipe.interop.huggingface.stages cuts causal models of the transformers package)"
        ) from error
    for node in graph.nodes:
        if (
            node.target in _FACTORIES
        ):  # a graph's code finds functions of torch without torch.fx.wrap
            node.meta.pop("is_wrapped", None)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if str(node.target).lstrip("*") in fixed or str(node.target).startswith("*"):
            _remove(graph, node)
    return graph


def _reason(error: Exception) -> str:
    """Why a forward cannot be recorded, by the line of it that fails on values that are not
    known.
    """
    # After a use of torch.compile, a frame of the compiler surrounds torch.fx.
    files = [(f, Path(f.filename).as_posix()) for f in traceback.extract_tb(error.__traceback__)]
    frames = [
        f
        for f, name in files
        if f.filename != __file__ and not re.search("/torch/(fx|_dynamo)/", name)
    ]
    if not frames:  # torch.fx failed to call it at all
        return "a decorator hides its arguments, or it takes them as *args"
    last = next(
        (
            f
            for f in reversed(frames)
            if not re.search("/torch/(nn/modules|functional)", f.filename)
        ),
        frames[-1],
    )
    line = last.line or ""
    at = (
        f"{last.filename}:{last.lineno} "
        f"({line}{' ...)' if line.count('(') > line.count(')') else ''})"
    )
    if isinstance(error, TraceError):
        return f"a value decides what it computes, at {at}"
    if isinstance(error, AttributeError) and "Proxy" not in str(error):
        return (
            f"{error}, at {at}: what the forward of a submodule stores on it has no value when "
            "stages are cut; let the "
            "submodule return it (a loss of a stage is fpipe.Stage(fn, aux_loss=True), see 'MoE "
            "and overlap')"
        )
    return f"it needs a value that is known only when it runs, at {at}"


def _remove(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an argument that has its default value, and fx's checks that it still has it."""
    for user in list(node.users):
        _remove(graph, user)
    graph.erase_node(node)


class _Tracer(fx.Tracer):
    """Traces the modules that contain a cut, and takes every other one as a single node."""

    proxy_buffer_attributes = True

    def __init__(self, cuts: Sequence[str]):
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(
            torch
        )  # where fx looks for them, beside the globals of the forward
        self.traced = {
            cut.rsplit(".", up)[0] for cut in cuts for up in range(1, cut.count(".") + 1)
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.traced

    def create_arg(self, a: Any) -> Any:
        """A mapping of another class than dict, as transformers' ModelOutput, keeps its class."""
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            as_node(type(a))
            items = {name: super(_Tracer, self).create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", type(a), (), items)
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(
            ("torch.fx", __name__)
        ):
            frame = frame.f_back
        value = None if frame is None else _passing_value(frame)
        return super().to_bool(obj) if value is None else value


def as_node(cls: type[dict]) -> None:
    """Make a subclass of dict a node of trees, with its values as children, if it is none.

    >>> class Output(dict): ...
    >>> as_node(Output), tree.leaves(Output(y=2))
    (None, [2])
    """

    def parts(node: Any) -> tuple[Any, ...]:
        return tuple(node.values()), tuple(node), tuple(node)

    def rebuild(keys: Any, children: Any) -> Any:
        node = cls.__new__(cls)  # and not __init__, which may look at the values
        for key, child in zip(keys, children, strict=True):
            node[key] = child
        return node

    if not optree.register_pytree_node.get(cls, namespace=tree.NAMESPACE):
        optree.register_pytree_node(cls, parts, rebuild, namespace=tree.NAMESPACE)


# ---- checks in a forward ----
def _passing_value(frame: FrameType) -> bool | None:
    """The value with which the test that a frame evaluates does not raise; None if it decides
    anything else.

    An assertion about sizes, or ``if ...: raise``, is no choice between two computations, so it may
    be assumed to pass.
    """
    span = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    blocks = (
        getattr(node, name, None)
        for node in ast.walk(tree)
        for name in ("body", "orelse", "finalbody")
    )
    for block in (block for block in blocks if isinstance(block, list)):
        for index, statement in enumerate(block):
            # Python 3.11 reports the span of the statement, later versions that of the test
            conditions = _conditions(statement, block[index + 1 :])
            values = {
                value for test, value in conditions if span in (_span(test), _span(statement))
            }
            if len(values) == 1:
                return values.pop()
    return None


def _conditions(
    statement: ast.stmt, following: Sequence[ast.stmt]
) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions of a statement that does nothing but raise for some, each with the value that
    does not raise.
    """
    if isinstance(statement, ast.Assert):
        yield from _tests(statement.test, True)
    elif isinstance(statement, ast.If) and _raises(statement.body):
        yield from _tests(statement.test, False)
    elif isinstance(statement, ast.If) and _raises(statement.orelse or following):
        yield from _tests(statement.test, True)


def _raises(block: Sequence[ast.stmt]) -> bool:
    return isinstance(next((s for s in block if not isinstance(s, _STRAIGHT)), None), ast.Raise)


def _tests(test: ast.expr, value: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions that a test combines, each with the value that lets the whole have its
    value.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _tests(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _tests(part, value)
    else:
        yield test, value


def _span(node: ast.stmt | ast.expr) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
