# SPDX-License-Identifier: Apache-2.0
"""Cuts the forward of a module into pieces: one small graph for every stage.

Values that a later piece needs are passed from piece to piece, so residuals and skips across a cut need no special
case. This module must not know parameters or stages.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn
from torch.fx.node import map_arg

from ..errors import StageError
from ._forward_graph import forward_graph

#: Parts of the names of random functions, which must not run twice.
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson")


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
    forward = _forward(forward_graph(module, cuts, side), cuts)
    return [_piece(forward, index) for index in range(len(cuts) + 1)]


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


class _Forward(NamedTuple):
    """A graph with the piece of each of its nodes."""

    x: fx.Node
    sides: list[fx.Node]
    nodes: list[fx.Node]
    output: fx.Node
    piece_of: dict[fx.Node, int]
    repeated: set[fx.Node]  # depend on side inputs and the module's tensors alone: recomputed where they are needed

    def crossing(self, index: int) -> list[fx.Node]:
        """The values computed before piece ``index`` and used in it or later, in the order of computation."""
        return [
            node
            for node in (self.x, *self.nodes)
            if node not in self.repeated
            and self.piece_of[node] < index
            and any(user not in self.repeated and self.piece_of[user] >= index for user in node.users)
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
        position = next((index for index, name in enumerate(calls) if name.startswith(f"{cut}.")), None)
        if position is None:
            raise StageError(f"cuts names {cut!r}, but forward never calls it; name a submodule that runs")
        positions.append(position)
    for (before, first), (after, second) in pairwise(zip(cuts, positions, strict=True)):
        if second <= first:
            raise StageError(
                f"cuts has {after!r} after {before!r}, but forward runs it first; give cuts in forward's order"
            )
    if positions and not any(node.op in ("call_module", "get_attr") for node in nodes[: positions[0]]):
        raise StageError(
            f"cuts begins with {cuts[0]!r}, where forward begins too: the first stage would be empty; leave it out"
        )
    return positions


def _repeatable(node: fx.Node, repeated: set[fx.Node]) -> bool:
    """Whether a value depends on side inputs and the module's tensors alone, and costs nothing to compute again."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or any(n not in repeated for n in node.all_input_nodes):
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
    sides = _sides(forward, [*nodes, *outputs])
    x = graph.placeholder(str(forward.x.target) if index == 0 else "x")
    copied |= {side: graph.placeholder(str(side.target), default_value=None) for side in sides}
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
    names = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
    return Piece(graph, tuple(str(side.target) for side in sides), tuple(names))


def _sides(forward: _Forward, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The side inputs on which nodes depend through repeated values."""
    seen, todo = set[fx.Node](), [n for node in nodes for n in (node, *node.all_input_nodes)]
    while todo:
        node = todo.pop()
        if node in forward.repeated and node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return [side for side in forward.sides if side in seen]
