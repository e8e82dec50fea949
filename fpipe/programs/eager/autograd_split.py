"""Splits the backward of a graph that autograd recorded into input gradients (I) and weight gradients (W).

Where a node of the way to the inputs also leads to parameters, by edges of its own, the way forks: I stops there with
the gradient that has arrived, W starts there and goes to the parameters alone. So autograd computes each part once, in
its own order, with its own bits. After I, what W does not need is freed.

    loss ── linear ──── tanh ──── linear ──── x          I: the whole way, noting what arrives at the two forks
               └─ w, b              └─ w, b              W: from each fork to its w and b

A parameter whose ways cannot be told apart like that is computed in I: one used twice directly, one behind a custom
Function (whose backward would run twice), one in a checkpointed region (which would be computed again twice). This
module knows autograd's nodes alone: no stages, names or schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ._nodes import saved_handles

Grads: TypeAlias = dict[int, torch.Tensor | None]

_FUNCTION = torch.autograd.function.BackwardCFunction
#: C++ nodes that compute all their gradients at once, or whose weight gradients cost next to nothing beside the others.
_WHOLE = ("CppNode", "RnnLayer", "CudnnRnn", "MiopenRnn", "LstmCell", "GruCell", "PreluKernel", "LstmMps", "LayerNorm",
          "GroupNorm", "BatchNorm", "RmsNorm")  # fmt: skip


class Fork(NamedTuple):
    """A node where ways to parameters part from the way to the inputs."""

    node: Node
    ports: tuple[int, ...]  # its outputs that were used
    edges: tuple[GradientEdge, ...]  # to parameters


@dataclass(frozen=True)
class Survey:
    """What a graph looks like.

    ``forks`` are where W starts; ``late`` are the parameters that W gives, ``direct`` those of them that hang on a
    fork without anything in between. ``passed`` are the nodes that I alone runs. ``ends`` are the ends of the graph
    that depend on late parameters alone. ``foreign`` are leaves that nobody named.
    """

    forks: tuple[Fork, ...]
    late: frozenset[int]
    direct: Mapping[Node, int]
    passed: tuple[Node, ...]
    ends: tuple[int, ...]
    foreign: tuple[torch.Tensor, ...]


@dataclass
class Kept:
    """What W needs: the forks with what arrived there, ends with their cotangents, and the gradients made early."""

    arrived: list[tuple[Fork, list[tuple[int, torch.Tensor]]]] = field(default_factory=list)
    ends: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    leaves: dict[int, GradientEdge] = field(default_factory=dict)
    direct: Mapping[Node, int] = field(default_factory=dict)
    early: Grads = field(default_factory=dict)


# ---- looking --------------------------------------------------------------------------------------------------------


def survey(ends: Sequence[GradientEdge], xs: Iterable[GradientEdge], ps: Mapping[int, GradientEdge],
           whole: bool = False) -> Survey:  # fmt: skip
    """Look a graph over. ``whole`` makes every parameter an early one."""
    marks = {edge.node: 1 for edge in xs}
    bits = {index: 2 << place for place, index in enumerate(ps)}
    marks |= {edge.node: bits[index] for index, edge in ps.items()}
    nexts, reach, foreign = _walk(ends, marks)
    crossing, ports, sources = _edges(ends, nexts, reach)
    early = -1 if whole else _early(reach, crossing, sources)
    forks, passed = [], []
    for node, bit in reach.items():
        if not bit & 1 or node in marks:
            continue
        edges = [GradientEdge(*edge) for edge in crossing.get(node, ()) if reach[edge[0]] & ~early]
        if edges:
            forks.append(Fork(node, tuple(ports[node]), tuple(edges)))
        else:
            passed.append(node)
    late = frozenset(index for index, bit in bits.items() if not bit & early)
    owner = {edge.node: index for index, edge in ps.items() if index in late}
    return Survey(
        tuple(forks), late,
        {edge.node: owner[edge.node] for fork in forks for edge in fork.edges if edge.node in owner},
        tuple(passed),
        tuple(i for i, end in enumerate(ends) if not reach[end.node] & 1 and reach[end.node] & ~early),
        tuple(foreign),
    )  # fmt: skip


def _walk(
    ends: Sequence[GradientEdge], marks: Mapping[Node, int]
) -> tuple[dict[Node, Any], dict[Node, int], list[torch.Tensor]]:
    """Every node with its next ones, and what it leads to: bit 0 the inputs, one bit for each parameter."""
    nexts: dict[Node, Any] = dict.fromkeys(marks, ())
    reach = dict(marks)
    foreign = []
    stack = [end.node for end in ends]
    while stack:
        node = stack[-1]
        if node in reach:
            stack.pop()
            continue
        below = nexts.get(node)
        if below is None:
            below = nexts[node] = node.next_functions
            ahead = [m for m, _ in below if m is not None and m not in reach]
            if ahead:
                stack += ahead
                continue
            leaf = None if below else getattr(node, "variable", None)
            if leaf is not None:
                foreign.append(leaf)
        bit = 0
        for m, _ in below:
            if m is not None:
                bit |= reach[m]
        reach[node] = bit
        stack.pop()
    return nexts, reach, foreign


def _edges(ends: Sequence[GradientEdge], nexts: Mapping[Node, Any], reach: Mapping[Node, int]) -> tuple[
    dict[Node, dict[tuple[Node, int], None]], dict[Node, dict[int, None]], dict[Node, set[Node | None]]
]:  # fmt: skip
    """By node of the way to the inputs, its edges that lead to parameters alone, and which of its outputs were used; by
    node that leads to parameters alone, whence it is reached (``None``: it is an end of the graph)."""
    crossing: dict[Node, dict[tuple[Node, int], None]] = {}
    ports: dict[Node, dict[int, None]] = {}
    sources: dict[Node, set[Node | None]] = {}
    for end in ends:
        if reach[end.node] & 1:
            ports.setdefault(end.node, {})[end.output_nr] = None
        else:
            sources.setdefault(end.node, set()).add(None)
    for node, below in nexts.items():
        for edge in below:
            m = edge[0]
            if m is None or not (bit := reach[m]):
                continue
            if bit & 1:
                ports.setdefault(m, {})[edge[1]] = None
                continue
            sources.setdefault(m, set()).add(node)
            if reach[node] & 1:
                crossing.setdefault(node, {})[edge] = None
    return crossing, ports, sources


def _early(reach: Mapping[Node, int], crossing: Mapping[Node, Any], sources: Mapping[Node, set[Node | None]]) -> int:
    """The parameters that must be computed in I, as bits."""
    early = 0
    for node, froms in sources.items():
        if reach[node] & ~early and ((len(froms) > 1 and _forked(froms, reach)) or _hooked(node)):
            early |= reach[node]
    for node, edges in crossing.items():
        if _at_once(node):
            for m, _ in edges:
                early |= reach[m]
    before = 0
    while early != before:  # what lies behind a node that I runs is made in I, all of it
        before = early
        for node in sources:
            if reach[node] & early:
                early |= reach[node]
    return early


def _forked(sources: Iterable[Node | None], reach: Mapping[Node, int]) -> bool:
    """Whether one of the nodes is on the way to the inputs, or is none."""
    return any(source is None or reach[source] & 1 for source in sources)


def _at_once(node: Node) -> bool:
    """Whether a node gives its gradients together, at a price that should be paid once."""
    return isinstance(node, _FUNCTION) or any(word in type(node).__name__ for word in _WHOLE) or _hooked(node)


# ---- what nodes hold ------------------------------------------------------------------------------------------------


def _hooked(node: Node) -> bool:
    """Whether the user's own hooks stand before what a node saved, as in a checkpointed region."""
    return any(saved.unpack_hook is not None for saved in saved_handles(node))


def saved_tensors(nodes: Iterable[Node]) -> Iterator[torch.Tensor]:
    """What nodes hold, where no hooks of the user's stand before it."""
    for node in nodes:
        for saved in saved_handles(node):
            if saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
                yield saved.data


def all_nodes(ends: Sequence[GradientEdge]) -> tuple[Node, ...]:
    """Every node of a graph."""
    return tuple(_walk(ends, {})[0])


class _Cell:
    """A saved tensor, moved out of its node so that it can be freed while the node lives on."""

    def __init__(self) -> None:
        self.held: torch.Tensor | None = None
        self.weak: weakref.ref[torch.Tensor] | None = None

    def pack(self, tensor: torch.Tensor) -> None:
        self.held = tensor

    def once(self, _: None) -> torch.Tensor:
        """Give the tensor away at its first use. The node that uses it holds it, and may ask again meanwhile."""
        found = self.held
        if found is None:
            assert self.weak is not None
            found = self.weak()
            assert found is not None, "freed after I"
            return found
        self.held, self.weak = None, weakref.ref(found)
        return found

    def often(self, _: None) -> torch.Tensor:
        """Give the tensor, as often as a custom Function asks for it."""
        assert self.held is not None, "freed after I"
        return self.held


def _empty(nodes: Iterable[Node]) -> list[_Cell]:
    """Move what nodes saved into cells; those of the cells returned must be emptied after use."""
    cells = []
    for node in nodes:
        own = isinstance(node, _FUNCTION)
        for saved in saved_handles(node):
            cell = _Cell()
            try:
                saved.register_hooks(cell.pack, cell.often if own else cell.once)
            except RuntimeError as error:
                if "inplace operation" in str(error):
                    raise
                continue  # nothing saved there, or behind the user's own hooks
            if own:
                cells.append(cell)
    return cells


# ---- computing ------------------------------------------------------------------------------------------------------


def both(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]], xs: Mapping[int, GradientEdge], ps: Mapping[int, GradientEdge]
) -> tuple[Grads, Grads]:
    """All gradients at once; frees the graph."""
    made = _grad(ends, [*xs.values(), *ps.values()], keep=False)
    return dict(zip(xs, made, strict=False)), dict(zip(ps, made[len(xs) :], strict=True))


def of_inputs(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]], xs: Mapping[int, GradientEdge], ps: Mapping[int, GradientEdge],
    seen: Survey,
) -> tuple[Grads, Kept]:  # fmt: skip
    """Gradients of the inputs, and what W needs for the rest."""
    cells = _empty(seen.passed)
    early = {index: edge for index, edge in ps.items() if index not in seen.late}
    ports = [(fork, port) for fork in seen.forks for port in fork.ports]
    wanted = [*xs.values(), *early.values(), *(GradientEdge(fork.node, port) for fork, port in ports)]
    made = _grad(ends, wanted, keep=bool(seen.late))
    for cell in cells:
        cell.held = None
    n, m = len(xs), len(xs) + len(early)
    arrived: dict[Node, list[tuple[int, torch.Tensor]]] = {}
    for (fork, port), gradient in zip(ports, made[m:], strict=True):
        if gradient is not None:
            arrived.setdefault(fork.node, []).append((port, gradient))
    kept = Kept(
        [(fork, arrived[fork.node]) for fork in seen.forks if fork.node in arrived],
        [ends[place] for place in seen.ends],
        {index: ps[index] for index in ps if index in seen.late},
        seen.direct,
        dict(zip(early, made[n:m], strict=True)),
    )
    return dict(zip(xs, made[:n], strict=True)), kept


def of_weights(kept: Kept) -> Grads:
    """The gradients of the parameters; frees what was kept as it goes."""
    grads = kept.early
    below = kept.ends
    kept.arrived.reverse()
    while kept.arrived:
        fork, arrived = kept.arrived.pop()
        made = _grad([(GradientEdge(fork.node, port), g) for port, g in arrived], fork.edges, keep=False)
        del arrived
        for edge, gradient in zip(fork.edges, made, strict=True):
            index = kept.direct.get(edge.node)
            if index is not None:
                grads[index] = gradient
            elif gradient is not None:
                below.append((edge, gradient))
        del fork, made
    rest = {index: edge for index, edge in kept.leaves.items() if index not in grads}
    grads |= dict(zip(rest, _grad(below, list(rest.values()), keep=False), strict=True))
    return grads


def _grad(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]], wanted: Sequence[GradientEdge], keep: bool
) -> Sequence[torch.Tensor | None]:
    if not ends or not wanted:
        return [None] * len(wanted)
    edges, cotangents = zip(*ends, strict=True)
    return torch.autograd.grad(edges, wanted, cotangents, retain_graph=keep, allow_unused=True)


__all__ = [
    "Fork",
    "GradientEdge",
    "Grads",
    "Kept",
    "Survey",
    "all_nodes",
    "both",
    "get_gradient_edge",
    "of_inputs",
    "of_weights",
    "saved_tensors",
    "survey",
]  # fmt: skip
