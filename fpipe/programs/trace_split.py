"""Cuts one traced joint function into the four programs F, B, I and W.

    F   what the outputs need, and every random draw
    I   what the input gradients need beyond F        W   what the parameter gradients need beyond F and I
    B   I and W in the order in which they were traced

A value that a later program needs is handed on under its own name: an input, an output of F ("saved"), or an output
of I ("kept"). Views hold no memory of their own, so they are handed on like anything else; constants that depend on
no input are made anew; a value inside a recompute region is computed again rather than saved, draws excepted.
This module knows graphs alone: no tensors, stages or ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from .program import draws


@dataclass(frozen=True)
class Joint:
    """A traced forward and backward as one graph, and what its ends are called.

    ``ys``, ``extras`` (auxiliary scalar, new state), ``dps`` and ``dxs`` are nodes, ``None`` where there is nothing.
    """

    nodes: tuple[fx.Node, ...]
    cotangents: frozenset[str]
    ys: tuple[fx.Node, ...]
    extras: tuple[fx.Node, ...]
    dps: tuple[fx.Node | None, ...]
    dxs: tuple[fx.Node | None, ...]
    region: Callable[[fx.Node], object | None] = lambda node: None


@dataclass(frozen=True)
class Piece:
    """The nodes of one program, in order, with what comes in and what goes out, by name."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Pieces:
    """The four programs of a joint graph. ``saved``: held from F to I or B; ``kept``: held from I to W."""

    forward: Piece
    backward: Piece
    backward_input: Piece
    backward_weight: Piece
    saved: tuple[str, ...]
    kept: tuple[str, ...]


def cut(joint: Joint) -> Pieces:
    """Cut ``joint`` in four."""
    order = {node: index for index, node in enumerate(joint.nodes)}
    constant = _constants(joint.nodes)
    forward = _ancestors([*joint.ys, *joint.extras, *filter(draws, joint.nodes)], lambda node: False)
    forward |= {n for n in joint.nodes if n.target is operator.getitem and n.args[0] in forward}
    savable = _savable(joint, forward)

    def known(node: fx.Node) -> bool:  # what the backward finds ready made
        return node.op == "placeholder" or (node in forward and node in savable and node not in constant)

    for_inputs = _with_items(_ancestors(_present(joint.dxs), known), joint.nodes, known)
    for_weights = _with_items(_ancestors(_present(joint.dps), known), joint.nodes, known)
    weights_alone = for_weights - {n for n in for_inputs if n not in constant}

    dxs, dps = _names(_present(joint.dxs)), _names(_present(joint.dps))
    f_nodes = _sorted(forward, order)
    i_nodes, w_nodes = _sorted(for_inputs, order), _sorted(weights_alone, order)
    b_nodes = _sorted(for_inputs | for_weights, order)
    made_by_f, made_by_i = set(_names(f_nodes)), set(_names(i_nodes))
    made_by_w, made_by_b = set(_names(w_nodes)), set(_names(b_nodes))

    f_in, i_in, w_in, b_in = (_free(nodes) for nodes in (f_nodes, i_nodes, w_nodes, b_nodes))
    ends = [end for end in dps + dxs if end not in made_by_b]
    saved = _unique(v for v in (*b_in, *ends) if v not in joint.cotangents)
    kept = _unique((*w_in, *(v for v in dps if v not in made_by_w)))
    f_out = _unique((*_names((*joint.ys, *joint.extras)), *saved))
    return Pieces(
        forward=Piece(f_nodes, f_in, tuple(v for v in f_out if v in made_by_f)),
        backward=Piece(b_nodes, b_in, tuple(v for v in _unique(dps + dxs) if v in made_by_b)),
        backward_input=Piece(i_nodes, i_in, tuple(v for v in _unique(dxs + kept) if v in made_by_i)),
        backward_weight=Piece(w_nodes, w_in, tuple(v for v in _unique(dps) if v in made_by_w)),
        saved=saved,
        kept=kept,
    )


def _constants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that hang on no input and draw nothing: cheap to make anew, dear to hold."""
    constant: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and not draws(node) and all(n in constant for n in node.all_input_nodes):
            constant.add(node)
    return constant


def _savable(joint: Joint, forward: set[fx.Node]) -> set[fx.Node]:
    """Forward values that may be saved: all but the inside of recompute regions. A region's draws, and what leaves
    the region in the forward, may."""
    savable = set()
    for node in forward:
        region = joint.region(node)
        source = node.args[0] if node.target is operator.getitem else node
        leaves = any(u in forward and joint.region(u) != region for u in node.users)
        if region is None or leaves or (isinstance(source, fx.Node) and draws(source)):
            savable.add(node)
    return savable


def _ancestors(ends: Iterable[fx.Node], known: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """All call nodes that ``ends`` hang on, not looking past what is known."""
    seen: set[fx.Node] = set()
    stack = [node for node in ends if not known(node)]
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        stack += [used for used in node.all_input_nodes if not known(used)]
    return {node for node in seen if node.op == "call_function"}


def _with_items(found: set[fx.Node], nodes: Sequence[fx.Node], known: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """A tuple is handed on by its items, so the items are taken where the tuple is made."""
    return found | {n for n in nodes if n.target is operator.getitem and n.args[0] in found and not known(n)}


def _free(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Names that a program must be given: used, but not made by itself."""
    made = {node.name for node in nodes}
    # captured tensors stay inside
    used = (u.name for node in nodes for u in node.all_input_nodes if u.op != "get_attr")
    return tuple(n for n in _unique(used) if n not in made)


def _present(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
    return [node for node in nodes if node is not None]


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _sorted(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    return tuple(sorted(nodes, key=order.__getitem__))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
