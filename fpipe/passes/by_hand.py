# SPDX-License-Identifier: Apache-2.0
"""The programs of a stage called by hand: with pytrees in place of boxes of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .. import tree
from ..errors import StageError
from ..programs.program import Program, Programs
from ..tree import AbstractLeaf, AbstractTree, Aval, Structure, Tree, abstract

#: A pytree that was flattened.
Flat: TypeAlias = tuple[list[Any], Structure]
Values: TypeAlias = dict[str, Any]
_NAMES = ("params", "x", "the side inputs", "state")


@dataclass(frozen=True, eq=False)
class Carried:
    """Values between two programs by name, and the flat arguments of the first, like which
    gradients are returned. ``next`` are the programs that may read them.
    """

    next: tuple[Program, ...]
    values: Values
    params: Flat
    x: Flat


def forward(
    programs: Programs, params: Tree, x: Tree, /, *, state: Tree = None, **side: Tree
) -> Tree:
    """``(y, saved)``; with the auxiliary scalar and the new state beside ``y`` where there are."""
    groups = [tree.flatten(value) for value in (params, x, side, state)]
    for name, (leaves, structure), traced in zip(_NAMES, groups, programs.signature, strict=True):
        _check(name, AbstractTree.flat(structure, leaves), traced)
    signature = programs.signature
    tensors = (groups[group][0][leaf] for group, leaf in signature.slots)
    values = _run(programs.f, dict(zip(signature.names, tensors, strict=True)))
    outputs = programs.outputs
    y = outputs.y.fill(values[name] for name in programs.ys if name is not None)
    extras = []
    if programs.aux:
        extras.append(values[programs.aux])
    if outputs.state is not None:
        extras.append(outputs.state.fill(values[name] for name in programs.new_state))
    saved = {name: values[name] for name in programs.saved}
    carried = Carried((programs.b, programs.i), saved, *groups[:2])
    return (y, *extras) if extras else y, carried


def backward(
    programs: Programs,
    saved: Carried,
    dy: Tree,
    *,
    daux: torch.Tensor | None = None,
) -> tuple[Tree, Tree]:
    """``(dx, dparams)``."""
    values = _run(programs.b, _read(programs, saved, programs.b) | _cotangents(programs, dy, daux))
    dx = _gradients(programs.dxs, saved.x, values)
    return dx, _gradients(programs.dps, saved.params, values)


def backward_input(
    programs: Programs,
    saved: Carried,
    dy: Tree,
    *,
    daux: torch.Tensor | None = None,
) -> tuple[Tree, Carried]:
    """``(dx, kept)``."""
    values = _run(programs.i, _read(programs, saved, programs.i) | _cotangents(programs, dy, daux))
    kept = {name: values[name] for name in programs.kept}
    carried = Carried((programs.w,), kept, saved.params, saved.x)
    return _gradients(programs.dxs, saved.x, values), carried


def backward_weight(programs: Programs, kept: Carried) -> Tree:
    """``dparams``."""
    values = _run(programs.w, _read(programs, kept, programs.w))
    return _gradients(programs.dps, kept.params, values)


def _check(name: str, given: AbstractTree, traced: AbstractTree) -> None:
    """Raise StageError unless an argument is like the one that was traced, strides aside."""
    if given.structure != traced.structure:
        raise _other(name, given.structure, traced.structure)
    for one, other in zip(given.leaves, traced.leaves, strict=True):
        _check_leaf(name, one, other)


def _check_leaf(name: str, given: AbstractLeaf, traced: AbstractLeaf) -> None:
    if isinstance(given, Aval) and isinstance(traced, Aval):
        same = given._replace(stride=traced.stride, grad=traced.grad) == traced
        if not same:
            raise _other(name, f"{given} on {given.device}", f"{traced} on {traced.device}")
    elif given != traced:
        raise _other(name, given, traced)


def _other(name: str, given: object, traced: object) -> StageError:
    return StageError(
        f"{name} has {given}, where the programs were traced for {traced}; call fpipe.trace with "
        "such arguments, or fpipe.pipeline, which traces what it gets"
    )


def _read(programs: Programs, carried: object, program: Program) -> Values:
    """The values that an earlier program returned for this one."""
    if not isinstance(carried, Carried) or program not in carried.next:
        text = "that of others" if isinstance(carried, Carried) else type(carried).__name__
        raise StageError(
            f"{program!r} reads what another program of its trace returned beside y or dx, not "
            f"{text}; pass saved of forward to backward or backward_input, and kept of "
            "backward_input to backward_weight"
        )
    values = dict(carried.values)
    if programs.eager:
        if program.inputs and not values:
            raise StageError(
                f"{program!r} runs on autograd, which frees a graph in its first backward; call "
                "forward again before another"
            )
        carried.values.clear()
    return values


def _run(program: Program, values: Values) -> Values:
    """The values with those that a program computes from them."""
    results = program([values[name] for name in program.inputs])
    return values | dict(zip(program.outputs, results, strict=True))


def _cotangents(programs: Programs, dy: Tree, daux: torch.Tensor | None) -> Values:
    """The cotangents by name, from one leaf for each output that is a tensor."""
    leaves = tree.leaves(dy)
    avals = programs.outputs.y.avals
    if len(leaves) != len(avals):
        raise StageError(
            f"dy has {len(leaves)} leaves where the stage gives {len(avals)}; give one for each "
            "output"
        )
    values: Values = {}
    for leaf, (j, aval) in zip(leaves, avals.items(), strict=True):
        name = programs.dys[j]
        if name is not None:
            _check_leaf("dy", abstract(leaf), aval)
            values[name] = leaf
    if programs.daux is not None:
        one = torch.ones((), dtype=programs.daux.dtype, device=programs.daux.device)
        values["daux"] = one if daux is None else daux
    return values


def _gradients(names: Sequence[str | None], like: Flat, values: Values) -> Tree:
    leaves, spec = like
    gradients = []
    for name, leaf in zip(names, leaves, strict=True):
        zero = torch.zeros_like(leaf) if tree.is_floating(leaf) else None
        gradients.append(zero if name is None else values[name])
    return tree.unflatten(spec, gradients)
