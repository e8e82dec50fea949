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

import re
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...programs.tensor_state import RETAINED
from .meter import saved_handles, saved_names

Grads: TypeAlias = dict[int, Tensor | None]
#: The ends of the leaves of an argument, by index.
Edges: TypeAlias = Mapping[int, GradientEdge]
#: An edge, and the gradient that arrives there.
Arrived: TypeAlias = tuple[GradientEdge, Tensor]
#: The next nodes of a node, with the number of their outputs.
Nexts: TypeAlias = tuple[tuple[Node | None, int], ...]
#: A tensor that a node saved, or a weak reference to it; empty once it is freed.
Cell: TypeAlias = list["torch.Tensor | weakref.ref[torch.Tensor]"]

_FUNCTION = torch.autograd.function.BackwardCFunction
#: C++ nodes that compute all their gradients at once, or whose weight gradients cost next to
#: nothing beside the others.
_WHOLE = re.compile(
    "CppNode|RnnLayer|CudnnRnn|MiopenRnn|LstmCell|GruCell|PreluKernel|LstmMps"
    "|LayerNorm|GroupNorm|BatchNorm|RmsNorm"
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
    foreign: tuple[Tensor, ...]


class Kept(NamedTuple):
    """What W needs: of each fork what arrived there and its edges to parameters, ends with their
    cotangents, and the gradients computed in I.
    """

    forks: list[tuple[list[Arrived], Sequence[GradientEdge]]]
    ends: list[Arrived]
    leaves: Edges
    early: Grads


# ---- surveying ----
def leaf_edge(leaf: Tensor) -> GradientEdge:
    """The end of a leaf; torch returns that of a view for a subclass of Tensor."""
    _, order = walk([get_gradient_edge(leaf)])
    return GradientEdge(order[0], 0)


def survey(ends: Iterable[GradientEdge], xs: Edges, ps: Edges, whole: bool = False) -> Survey:
    """Find the forks of a graph. ``whole``: all parameters are computed in I."""
    ends = tuple(ends)
    bits = {index: 2 << place for place, index in enumerate(ps)}
    marks = {edge.node: 1 for edge in xs.values()}
    marks |= {edge.node: bits[index] for index, edge in ps.items()}
    nexts, order = walk(ends, marks)
    reach = dict(marks)  # what each node leads to; bit 0: inputs, and one bit per parameter
    for node in order:
        bit = 0
        for m, _ in nexts[node]:
            if m is not None:
                bit |= reach[m]
        reach.setdefault(node, bit)
    edges: list[tuple[Node | None, Node, int]] = [(None, end.node, end.output_nr) for end in ends]
    for node, below in nexts.items():
        edges += [(node, m, port) for m, port in below if m is not None]
    ports = defaultdict[Node, dict[int, None]](dict)  # the used outputs of nodes on the path
    crossing = defaultdict[Node, dict[tuple[Node, int], None]](dict)  # edges from the path
    sources = defaultdict[Node, set[Node | None]](set)  # of nodes that lead to parameters alone
    for source, node, port in edges:
        bit = reach[node]
        if bit & 1:
            ports[node][port] = None
        elif bit:
            sources[node].add(source)
            if source is not None and reach[source] & 1:
                crossing[source][node, port] = None
    early = -1 if whole else _early(reach, crossing, sources)
    forks = []
    passed = []
    for node, bit in reach.items():
        if not bit & 1 or node in marks:
            continue
        late = [GradientEdge(*edge) for edge in crossing[node] if reach[edge[0]] & ~early]
        if late:
            forks.append(Fork(node, tuple(ports[node]), tuple(late)))
        else:
            passed.append(node)
    leaves = (
        getattr(node, "variable", None) for node in order if not nexts[node] and node not in marks
    )
    reached = [reach[end.node] for end in ends]
    return Survey(
        tuple(forks),
        frozenset(index for index, bit in bits.items() if not bit & early),
        tuple(passed),
        tuple(i for i, bit in enumerate(reached) if not bit & 1 and bit & ~early),
        tuple(leaf for leaf in leaves if leaf is not None),
    )


def walk(
    ends: Iterable[GradientEdge], marks: Container[Node] = ()
) -> tuple[dict[Node, Nexts], list[Node]]:
    """The next nodes of every node, where ``marks`` have none; and the nodes, each after those
    that it leads to.
    """
    nexts: dict[Node, Nexts] = {}
    order: dict[Node, None] = {}
    stack = [end.node for end in ends]
    while stack:
        node = stack.pop()
        if node in nexts:
            order[node] = None
            continue
        below = nexts[node] = () if node in marks else node.next_functions
        stack.append(node)
        stack += [m for m, _ in below if m is not None and m not in nexts]
    return nexts, list(order)


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
        or _WHOLE.search(type(node).__name__) is not None
        or _hooked(node)
    )


# ---- what nodes hold ----
def _hooked(node: Node) -> bool:
    """Whether the user set hooks on what a node saved, as in a checkpointed region."""
    return any(saved.unpack_hook is not None for saved in saved_handles(node))


def saved_tensors(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """The tensors that nodes saved, but for those on which the user set hooks."""
    for node in nodes:
        for saved in saved_handles(node):
            if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                yield saved.data


def _movable(nodes: Iterable[Node]) -> list[Cell]:
    """Move what nodes saved into cells, so that it can be freed while the nodes live on.

    A C++ node takes a tensor at its first use and the cell forgets it; a custom Function may ask
    often, so its cells, which are returned, must be emptied after use. A cell is a list of one
    tensor, or of a weak reference to it.
    """
    lasting = []
    for node in nodes:
        custom = isinstance(node, _FUNCTION)
        _check(node)
        for saved in saved_handles(node):
            cell: Cell = []
            unpack = partial(_read if custom else _take, cell)
            try:
                saved.register_hooks(cell.append, unpack)
            except RuntimeError:
                continue  # nothing is saved there, or the user set hooks
            if custom:
                lasting.append(cell)
    return lasting


def _check(node: Node) -> None:
    """Let autograd check that what a node saved was not changed in place since, with its own error:
    a hook on a saved output ends the check. What the user set hooks on is not unpacked.
    """
    if not _hooked(node):
        for name in saved_names(type(node)):
            getattr(node, name.replace("raw_", ""), None)
            getattr(node, name[5:], None)  # of a custom Function


def _read(cell: Cell, _: None) -> Tensor:
    assert cell and isinstance(cell[0], Tensor), "freed after I"
    return cell[0]


def _take(cell: Cell, _: None) -> Tensor:
    """The tensor, which the node that uses it holds from now on and may ask for again meanwhile."""
    tensor = cell.pop()
    if isinstance(tensor, weakref.ref):
        tensor = tensor()
    assert tensor is not None, "freed after I"
    cell.append(weakref.ref(tensor))
    return tensor


# ---- computing ----
def all_gradients(ends: Sequence[Arrived], xs: Edges, ps: Edges) -> tuple[Grads, Grads]:
    """All gradients at once; frees the graph."""
    results = iter(_grad(ends, [*xs.values(), *ps.values()], keep=False))
    return {i: next(results) for i in xs}, {i: next(results) for i in ps}


def of_inputs(ends: Sequence[Arrived], xs: Edges, ps: Edges, seen: Survey) -> tuple[Grads, Kept]:
    """Gradients of the inputs, and what W needs for the parameters."""
    cells = [] if RETAINED.get() else _movable(seen.passed)
    early = [index for index in ps if index not in seen.late]
    ports = [GradientEdge(fork.node, port) for fork in seen.forks for port in fork.ports]
    wanted = [*xs.values(), *(ps[index] for index in early), *ports]
    results = iter(_grad(ends, wanted, keep=bool(seen.late)))
    for cell in cells:
        cell.clear()
    dxs = {index: next(results) for index in xs}
    dps = {index: next(results) for index in early}
    forks = []
    for fork in seen.forks:
        gradients = [(GradientEdge(fork.node, port), next(results)) for port in fork.ports]
        arrived = [(edge, gradient) for edge, gradient in gradients if gradient is not None]
        if arrived:
            forks.append((arrived, fork.edges))
    late = {index: edge for index, edge in ps.items() if index in seen.late}
    return dxs, Kept(forks, [ends[place] for place in seen.ends], late, dps)


def of_weights(kept: Kept) -> Grads:
    """The gradients of the parameters; frees what was kept as it goes."""
    grads = kept.early
    owners = {edge.node: index for index, edge in kept.leaves.items()}
    below = kept.ends
    kept.forks.reverse()
    while kept.forks:
        arrived, edges = kept.forks.pop()
        results = _grad(arrived, edges, keep=False)
        del arrived
        for edge, gradient in zip(edges, results, strict=True):
            index = owners.get(edge.node)
            if index is not None:
                grads[index] = gradient
            elif gradient is not None:
                below.append((edge, gradient))
        del edges, results
    rest = {index: edge for index, edge in kept.leaves.items() if index not in grads}
    return grads | all_gradients(below, rest, {})[0]


@torch.inference_mode(False)  # a checkpoint records its region again
def _grad(
    ends: Sequence[Arrived], wanted: Sequence[GradientEdge], keep: bool
) -> Sequence[Tensor | None]:
    if not ends or not wanted:
        return [None] * len(wanted)
    edges, gradients = zip(*ends, strict=True)
    keep = keep or RETAINED.get()
    return torch.autograd.grad(edges, wanted, gradients, retain_graph=keep, allow_unused=True)
