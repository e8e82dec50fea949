# SPDX-License-Identifier: Apache-2.0
"""Splits one traced joint function into the four programs F, B, I and W.

    F   what the outputs need, and every random draw
    I   what the input gradients need beyond F
    W   what the parameter gradients need beyond F and I
    B   I and W in the order in which they were traced

A value that a later program needs is passed on under its name: an input, an output of F ("saved"),
or an output of I ("kept"). Views use no memory of their own, so they are passed on like anything
else. Constants that depend on no input are computed again; so is a value inside a recompute region,
random draws excepted. Knows graphs alone, no tensors, stages or ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from .internals import draws
from .simplify import annotation


@dataclass(frozen=True)
class Joint:
    """The nodes of a traced forward and backward, and those of its results.

    ``extras`` are auxiliary scalar and new state. ``ys``, ``dps`` and ``dxs`` have one entry for
    each leaf: ``None`` for an output that is no tensor, and where no gradient flows.
    """

    nodes: tuple[fx.Node, ...]
    cotangents: frozenset[str]
    ys: tuple[fx.Node | None, ...]
    extras: tuple[fx.Node, ...]
    dps: tuple[fx.Node | None, ...]
    dxs: tuple[fx.Node | None, ...]


class Piece(NamedTuple):
    """The nodes of one program, in order, and the names of its inputs and outputs."""

    nodes: Sequence[fx.Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Pieces(NamedTuple):
    """The programs of a joint graph. ``saved``: held from F to I or B; ``kept``: held from I to
    W.
    """

    f: Piece
    b: Piece
    i: Piece
    w: Piece
    saved: tuple[str, ...]
    kept: tuple[str, ...]


def split(joint: Joint) -> Pieces:
    """Split ``joint`` in four."""
    nodes = joint.nodes
    constant = _constants(nodes)
    ends = [*filter(None, joint.ys), *joint.extras, *filter(draws, nodes)]
    forward = _ancestors(ends, lambda node: False)
    forward |= _items(nodes, forward)
    savable = _savable(forward) - constant

    def available(node: fx.Node) -> bool:  # in the backward without computing it
        return node.op == "placeholder" or node in savable

    def needed(gradients: Sequence[fx.Node | None]) -> set[fx.Node]:
        computed = _ancestors([node for node in gradients if node is not None], available)
        return computed | {item for item in _items(nodes, computed) if not available(item)}

    for_inputs = needed(joint.dxs)
    for_weights = needed(joint.dps)
    dxs = _names(joint.dxs)
    dps = _names(joint.dps)
    f, b, i, w = (
        [node for node in nodes if node in part]
        for part in (
            forward,
            for_inputs | for_weights,
            for_inputs,
            for_weights - (for_inputs - constant),
        )
    )
    b_computes = set(_names(b))
    w_computes = set(_names(w))
    passed_on = (*_free(b), *(end for end in dps + dxs if end not in b_computes))
    saved = _unique(name for name in passed_on if name not in joint.cotangents)
    kept = _unique((*_free(w), *(name for name in dps if name not in w_computes)))
    return Pieces(
        _piece(f, (*_names((*joint.ys, *joint.extras)), *saved)),
        _piece(b, dps + dxs),
        _piece(i, dxs + kept),
        _piece(w, dps),
        saved,
        kept,
    )


def _piece(nodes: Sequence[fx.Node], results: Iterable[str]) -> Piece:
    """A program that returns those of the results that it computes."""
    computed = set(_names(nodes))
    return Piece(nodes, _free(nodes), tuple(n for n in _unique(results) if n in computed))


def _constants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on no input and draw nothing: cheap to compute again, expensive to hold."""
    constant: set[fx.Node] = set()
    for node in nodes:
        computed = node.op == "call_function" and not draws(node)
        if computed and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    return constant


def _savable(forward: set[fx.Node]) -> set[fx.Node]:
    """Forward values that may be saved: outside recompute regions all; inside, random draws and
    what leaves the region in the forward.
    """
    regions = {node: annotation(node, "fpipe_remat") for node in forward}
    savable = set()
    for node, region in regions.items():
        source = node.args[0] if node.target is operator.getitem else node
        leaves = any(user in forward and regions[user] != region for user in node.users)
        if region is None or leaves or (isinstance(source, fx.Node) and draws(source)):
            savable.add(node)
    return savable


def _items(nodes: Iterable[fx.Node], computed: set[fx.Node]) -> set[fx.Node]:
    """The items of the tuples that are computed: a tuple is passed on by its items."""
    return {n for n in nodes if n.target is operator.getitem and n.args[0] in computed}


def _ancestors(ends: Iterable[fx.Node], available: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """All call nodes on which ``ends`` depend, without those that are available and what only they
    depend on.
    """
    seen: set[fx.Node] = set()
    stack = [node for node in ends if not available(node)]
    while stack:
        node = stack.pop()
        if node not in seen and node.op != "placeholder":
            seen.add(node)
            stack += [used for used in node.all_input_nodes if not available(used)]
    return {node for node in seen if node.op == "call_function"}


def _free(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The names that a program reads and does not compute; captured tensors are part of the
    program.
    """
    computed = set(_names(nodes))
    used = _unique(u.name for node in nodes for u in node.all_input_nodes if u.op != "get_attr")
    return tuple(name for name in used if name not in computed)


def _names(nodes: Iterable[fx.Node | None]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if node is not None)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
