"""Reads a module's forward as a straight line and cuts it: one small graph for every stage.

``torch.fx`` records what forward does between its submodules; a submodule without a cut inside is one step, whatever
it does. Values that a later piece needs are handed on from piece to piece, so residuals and skips across a cut need
no special case. This file knows graphs, and nothing of parameters or stages.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg
from torch.fx.proxy import TraceError

from ..errors import StageError

#: Functions that make a tensor out of sizes: fx does not see their proxies without help.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")
_CHANCE = ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson")
_BREAKS = (TraceError, TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True)
class Piece:
    """A graph from one cut to the next: its placeholders are ``x`` and then the side inputs in ``sides``."""

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
    graph = _record(module, cuts, side)
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    starts = [0, *_positions(nodes, cuts), len(nodes)]
    cutter = _Cutter(graph, nodes, starts)
    return [cutter.piece(index) for index in range(len(starts) - 1)]


# ---- recording -------------------------------------------------------------------------------------------------------


def _check_names(module: nn.Module, cuts: Sequence[str]) -> None:
    if isinstance(cuts, str) or not all(isinstance(cut, str) for cut in cuts):
        raise StageError(f"cuts={cuts!r}; give a list of submodule names, such as ['layers.2', 'layers.4']")
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


class _Tracer(fx.Tracer):
    """Looks into the modules that hold a cut, and takes every other one as a single step."""

    proxy_buffer_attributes = True

    def __init__(self, cuts: Sequence[str]):
        super().__init__()
        self.inside = {cut.rsplit(".", up)[0] for cut in cuts for up in range(1, cut.count(".") + 1)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.inside

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.fx", __name__)):
            frame = frame.f_back
        holds = None if frame is None else _guard(frame.f_code, frame.f_lasti)
        return super().to_bool(obj) if holds is None else holds


def _guard(code: CodeType, at: int) -> bool | None:
    """The value with which a test in some code does not raise, where one way from it does nothing but raise.

    An assertion about sizes, or ``if ...: raise``, is no choice between two computations, so it may be taken to hold.
    """
    instructions = list(dis.get_instructions(code))
    jump = next((i for i in instructions if i.offset >= at and i.opname != "TO_BOOL"), None)
    if jump is None or "JUMP" not in jump.opname or "_IF_" not in jump.opname:
        return None
    jumps_on = "IF_TRUE" in jump.opname
    stays = [i.opname for i in instructions if jump.offset < i.offset < jump.argval and i.opname != "NOP"]
    if stays and stays[-1] == "RAISE_VARARGS":
        return jumps_on
    goes = (i.opname for i in instructions if i.offset >= jump.argval)
    end = next((name for name in goes if name.startswith(("RAISE", "RETURN", "JUMP", "POP_JUMP"))), "")
    return not jumps_on if end == "RAISE_VARARGS" else None


def _record(module: nn.Module, cuts: Sequence[str], side: Sequence[str]) -> fx.Graph:
    inputs = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unknown = set(side) - {p.name for p in inputs[1:]}
    if unknown or not inputs:
        raise StageError(
            f"side={sorted(unknown)} are no arguments of {type(module).__name__}.forward beyond its first one; "
            f"it has {', '.join(p.name for p in inputs[1:]) or 'none'}"
        )
    fixed = {p.name: p.default for p in inputs[1:] if p.default is not p.empty and p.name not in side}
    try:
        with _factories():
            graph = _Tracer(cuts).trace(module, concrete_args=fixed)
    except _BREAKS as error:
        raise StageError(
            f"the forward of {type(module).__name__} cannot be read as a chain of its submodules ({error}); keep what "
            "depends on values inside submodules, or write the stages as functions "
            "(fpipe.interop.huggingface.stages cuts transformers models)"
        ) from error
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if str(node.target).lstrip("*") in fixed or str(node.target).startswith("*"):
            _drop(graph, node)
    return graph


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an argument that has its default value, and fx's checks that it still has it."""
    for user in list(node.users):
        _drop(graph, user)
    graph.erase_node(node)


@contextmanager
def _factories() -> Iterator[None]:
    """While a forward is read, let ``torch.arange(x.shape[1])`` and its like be steps of it."""
    plain = {name: getattr(torch, name) for name in _FACTORIES}

    def seeing(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[fx.Proxy] = []
            map_aggregate((args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)
            if found:
                return found[0].tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call

    try:
        for name, function in plain.items():
            setattr(torch, name, seeing(function))
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _positions(nodes: Sequence[fx.Node], cuts: Sequence[str]) -> list[int]:
    found: list[int] = []
    for cut in cuts:
        uses = (
            index
            for index, node in enumerate(nodes)
            if node.op == "call_module" and f"{node.target}.".startswith(f"{cut}.")
        )
        place = next(uses, None)
        if place is None:
            raise StageError(f"cuts names {cut!r}, but forward never calls it; name a submodule that runs")
        found.append(place)
    for (before, first), (after, second) in pairwise(zip(cuts, found, strict=True)):
        if second <= first:
            raise StageError(
                f"cuts has {after!r} after {before!r}, but forward runs it first; give cuts in forward's order"
            )
    if found and not any(node.op in ("call_module", "get_attr") for node in nodes[: found[0]]):
        raise StageError(
            f"cuts begins with {cuts[0]!r}, where forward begins too: the first stage would be empty; leave it out"
        )
    return found


class _Cutter:
    """Which piece makes each value, which values cross each cut, and the graph of each piece."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node], starts: Sequence[int]):
        self.starts, self.nodes = starts, nodes
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.x, self.sides = inputs[0], inputs[1:]
        self.output = next(n for n in graph.nodes if n.op == "output")
        self.home: dict[fx.Node, int] = {self.x: 0}
        for index, (lo, hi) in enumerate(pairwise(starts)):
            self.home.update(dict.fromkeys(nodes[lo:hi], index))
        self.home[self.output] = len(starts) - 2
        self.free: set[fx.Node] = set(self.sides)
        for node in nodes:
            if _repeatable(node, self.free):
                self.free.add(node)

    def crossing(self, index: int) -> list[fx.Node]:
        """The values made before piece ``index`` and needed in it or later, in the order in which they were made."""
        return [
            node
            for node in (self.x, *self.nodes)
            if node not in self.free
            and self.home[node] < index
            and any(user not in self.free and self.home[user] >= index for user in node.users)
        ]  # fmt: skip

    def piece(self, index: int) -> Piece:
        """The graph of one piece."""
        made, known = fx.Graph(), dict[fx.Node, fx.Node]()
        last = index == len(self.starts) - 2
        given = [self.x] if index == 0 else self.crossing(index)
        x = made.placeholder(str(self.x.target) if index == 0 else "x")
        known.update({given[0]: x} if len(given) == 1 else {})
        own = [n for n in self.nodes[self.starts[index] : self.starts[index + 1]] if n not in self.free]
        ends = list(self.output.all_input_nodes) if last else self.crossing(index + 1)
        sides = self._sides([*own, *ends])
        known.update({side: made.placeholder(str(side.target), default_value=None) for side in sides})
        if len(given) != 1:
            known.update({n: made.call_function(operator.getitem, (x, i)) for i, n in enumerate(given)})

        def find(node: fx.Node) -> fx.Node:
            if node not in known:  # free: made again wherever it is needed
                known[node] = made.node_copy(node, find)
            return known[node]

        for node in own:
            known[node] = made.node_copy(node, find)
        if last:
            made.output(map_arg(self.output.args[0], find))
        else:
            out = tuple(find(node) for node in ends)
            made.output(out[0] if len(out) == 1 else out)
        names = dict.fromkeys(str(n.target) for n in made.nodes if n.op in ("call_module", "get_attr"))
        return Piece(made, tuple(str(side.target) for side in sides), tuple(names))

    def _sides(self, roots: Sequence[fx.Node]) -> list[fx.Node]:
        seen: set[fx.Node] = set()
        todo = [*roots]
        while todo:
            node = todo.pop()
            for used in node.all_input_nodes:
                if used in self.free and used not in seen:
                    seen.add(used)
                    todo.append(used)
        seen |= set(roots) & self.free
        return [side for side in self.sides if side in seen]


def _repeatable(node: fx.Node, free: Mapping[fx.Node, Any] | set[fx.Node]) -> bool:
    """Whether a value depends on side inputs and the module's own tensors alone, and may be made again for nothing."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or any(n not in free for n in node.all_input_nodes):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return not name.endswith("_") and not any(word in name for word in _CHANCE)
