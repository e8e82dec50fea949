# SPDX-License-Identifier: Apache-2.0
"""Splits the backward of a graph that autograd recorded into input gradients (I) and weight
gradients (W).

Where a node on the path from the outputs to the inputs also has edges that lead to parameters
alone, the path forks: I stores the gradient that arrives there, and W starts from it and goes to
the parameters. So autograd computes each part once, in its order, with its bits. After I, what W
does not need is freed.

    loss ── linear ──── tanh ──── linear ──── x          I: the whole path, storing what arrives at
    the two forks
               └─ w, b              └─ w, b              W: from each fork to its w and b

A parameter that cannot be separated like that is computed in I: one used twice directly, one behind
a custom Function (whose backward would run twice), one in a checkpointed region (which would be
recomputed twice). Knows autograd's nodes alone, no stages, names or schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node

from ...programs.internals import RETAINED
from .meter import saved_handles

Grads: TypeAlias = dict[int, torch.Tensor | None]
#: The next nodes of a node, with the number of their outputs.
Nexts: TypeAlias = tuple[tuple[Node | None, int], ...]
#: A tensor that a node saved, or a weak reference to it; empty once it is freed.
Cell: TypeAlias = list["torch.Tensor | weakref.ref[torch.Tensor]"]

_FUNCTION = torch.autograd.function.BackwardCFunction
#: C++ nodes that compute all their gradients at once, or whose weight gradients cost next to
#: nothing beside the others.
_WHOLE = (
    "CppNode",
    "RnnLayer",
    "CudnnRnn",
    "MiopenRnn",
    "LstmCell",
    "GruCell",
    "PreluKernel",
    "LstmMps",
    "LayerNorm",
    "GroupNorm",
    "BatchNorm",
    "RmsNorm",
)


class Fork(NamedTuple):
    """A node on the path to the inputs that also has edges to parameters alone."""

    node: Node
    ports: tuple[int, ...]  # its outputs that were used
    edges: tuple[GradientEdge, ...]  # to parameters


class Survey(NamedTuple):
    """The parts of a graph.

    ``forks`` are where W starts; ``late`` are the parameters whose gradients W computes. ``passed``
    are the nodes that only I runs. ``ends`` are the ends of the graph that depend on late
    parameters alone. ``foreign`` are leaves that are neither inputs nor parameters.
    """

    forks: tuple[Fork, ...]
    late: frozenset[int]
    passed: tuple[Node, ...]
    ends: tuple[int, ...]
    foreign: tuple[torch.Tensor, ...]


class Kept(NamedTuple):
    """What W needs: the forks with what arrived there, ends with their cotangents, and the
    gradients computed in I.
    """

    arrived: list[tuple[Fork, list[tuple[int, torch.Tensor]]]]
    ends: list[tuple[GradientEdge, torch.Tensor]]
    leaves: dict[int, GradientEdge]
    early: Grads


# ---- surveying ----
def survey(
    ends: Sequence[GradientEdge],
    xs: Iterable[GradientEdge],
    ps: Mapping[int, GradientEdge],
    whole: bool = False,
) -> Survey:
    """Find the forks of a graph. ``whole``: all parameters are computed in I."""
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
    return Survey(
        tuple(forks),
        frozenset(index for index, bit in bits.items() if not bit & early),
        tuple(passed),
        tuple(
            i for i, end in enumerate(ends) if not reach[end.node] & 1 and reach[end.node] & ~early
        ),
        tuple(foreign),
    )


def _walk(
    ends: Sequence[GradientEdge], marks: Mapping[Node, int]
) -> tuple[dict[Node, Nexts], dict[Node, int], list[torch.Tensor]]:
    """The next nodes of every node; what each leads to (bit 0: inputs, one bit per parameter);
    foreign leaves.
    """
    nexts: dict[Node, Nexts] = dict.fromkeys(marks, ())
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


def _edges(
    ends: Sequence[GradientEdge], nexts: Mapping[Node, Nexts], reach: Mapping[Node, int]
) -> tuple[
    dict[Node, dict[tuple[Node, int], None]],
    dict[Node, dict[int, None]],
    dict[Node, set[Node | None]],
]:
    """By node on the path to the inputs, its edges to parameters alone, and which of its outputs
    were used; by node that leads to parameters alone, the nodes before it (``None``: it is an end
    of the graph).
    """
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
                crossing.setdefault(node, {})[m, edge[1]] = None
    return crossing, ports, sources


def _early(
    reach: Mapping[Node, int],
    crossing: Mapping[Node, Iterable[tuple[Node, int]]],
    sources: Mapping[Node, set[Node | None]],
) -> int:
    """The parameters that must be computed in I, as bits."""
    early = 0
    for node, froms in sources.items():
        forked = len(froms) > 1 and any(source is None or reach[source] & 1 for source in froms)
        if reach[node] & ~early and (forked or _hooked(node)):
            early |= reach[node]
    for node, edges in crossing.items():
        if _at_once(node):
            for m, _ in edges:
                early |= reach[m]
    before = 0
    while early != before:  # all parameters behind a node that I runs are computed in I
        before = early
        for node in sources:
            if reach[node] & early:
                early |= reach[node]
    return early


def _at_once(node: Node) -> bool:
    """Whether a node computes its gradients together, at a cost that should be paid once."""
    return (
        isinstance(node, _FUNCTION)
        or any(word in type(node).__name__ for word in _WHOLE)
        or _hooked(node)
    )


# ---- what nodes hold ----
def _hooked(node: Node) -> bool:
    """Whether the user set hooks on what a node saved, as in a checkpointed region."""
    return any(saved.unpack_hook is not None for saved in saved_handles(node))


def saved_tensors(nodes: Iterable[Node]) -> Iterator[torch.Tensor]:
    """The tensors that nodes saved, but for those on which the user set hooks."""
    for node in nodes:
        for saved in saved_handles(node):
            if saved.unpack_hook is None and isinstance(saved.data, torch.Tensor):
                yield saved.data


def all_nodes(ends: Sequence[GradientEdge]) -> tuple[Node, ...]:
    """Every node of a graph."""
    return tuple(_walk(ends, {})[0])


def _movable(nodes: Iterable[Node]) -> list[Cell]:
    """Move what nodes saved into cells, so that it can be freed while the nodes live on.

    A C++ node takes a tensor at its first use and the cell forgets it; a custom Function may ask
    often, so its cells, which are returned, must be emptied after use. A cell is a list of one
    tensor, or of a weak reference to it.
    """
    lasting = []
    for node in nodes:
        custom = isinstance(node, _FUNCTION)
        for saved in saved_handles(node):
            cell: Cell = []
            unpack = partial(_read if custom else _take, cell)
            try:
                saved.register_hooks(cell.append, unpack)
            except RuntimeError as error:
                if "inplace operation" in str(error):
                    raise
                continue  # nothing is saved there, or the user set hooks
            if custom:
                lasting.append(cell)
    return lasting


def _read(cell: Cell, _: None) -> torch.Tensor:
    assert cell and isinstance(cell[0], torch.Tensor), "freed after I"
    return cell[0]


def _take(cell: Cell, _: None) -> torch.Tensor:
    """The tensor, which the node that uses it holds from now on and may ask for again meanwhile."""
    tensor = cell.pop()
    if isinstance(tensor, weakref.ref):
        tensor = tensor()
    assert tensor is not None, "freed after I"
    cell.append(weakref.ref(tensor))
    return tensor


# ---- computing ----
def both(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]],
    xs: Mapping[int, GradientEdge],
    ps: Mapping[int, GradientEdge],
) -> tuple[Grads, Grads]:
    """All gradients at once; frees the graph."""
    results = _grad(ends, [*xs.values(), *ps.values()], keep=False)
    return dict(zip(xs, results, strict=False)), dict(zip(ps, results[len(xs) :], strict=True))


def of_inputs(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]],
    xs: Mapping[int, GradientEdge],
    ps: Mapping[int, GradientEdge],
    seen: Survey,
) -> tuple[Grads, Kept]:
    """Gradients of the inputs, and what W needs for the parameters."""
    cells = [] if RETAINED.get() else _movable(seen.passed)
    early = {index: edge for index, edge in ps.items() if index not in seen.late}
    ports = [(fork, port) for fork in seen.forks for port in fork.ports]
    wanted = [
        *xs.values(),
        *early.values(),
        *(GradientEdge(fork.node, port) for fork, port in ports),
    ]
    results = _grad(ends, wanted, keep=bool(seen.late))
    for cell in cells:
        cell.clear()
    n = len(xs)
    m = len(xs) + len(early)
    arrived: dict[Node, list[tuple[int, torch.Tensor]]] = {}
    for (fork, port), gradient in zip(ports, results[m:], strict=True):
        if gradient is not None:
            arrived.setdefault(fork.node, []).append((port, gradient))
    kept = Kept(
        [(fork, arrived[fork.node]) for fork in seen.forks if fork.node in arrived],
        [ends[place] for place in seen.ends],
        {index: ps[index] for index in ps if index in seen.late},
        dict(zip(early, results[n:m], strict=True)),
    )
    return dict(zip(xs, results[:n], strict=True)), kept


def of_weights(kept: Kept) -> Grads:
    """The gradients of the parameters; frees what was kept as it goes."""
    grads = kept.early
    owners = {edge.node: index for index, edge in kept.leaves.items()}
    below = kept.ends
    kept.arrived.reverse()
    while kept.arrived:
        fork, arrived = kept.arrived.pop()
        results = _grad(
            [(GradientEdge(fork.node, port), g) for port, g in arrived], fork.edges, keep=False
        )
        del arrived
        for edge, gradient in zip(fork.edges, results, strict=True):
            index = owners.get(edge.node)
            if index is not None:
                grads[index] = gradient
            elif gradient is not None:
                below.append((edge, gradient))
        del fork, results
    rest = {index: edge for index, edge in kept.leaves.items() if index not in grads}
    grads |= dict(zip(rest, _grad(below, list(rest.values()), keep=False), strict=True))
    return grads


def _grad(
    ends: Sequence[tuple[GradientEdge, torch.Tensor]], wanted: Sequence[GradientEdge], keep: bool
) -> Sequence[torch.Tensor | None]:
    if not ends or not wanted:
        return [None] * len(wanted)
    edges, cotangents = zip(*ends, strict=True)
    grad = partial(
        torch.autograd.grad,
        edges,
        wanted,
        cotangents,
        retain_graph=keep or RETAINED.get(),
        allow_unused=True,
    )
    if not torch.is_inference_mode_enabled():
        return grad()
    with torch.inference_mode(
        False
    ):  # a checkpoint records its region again, which inference mode would prevent
        return grad()
