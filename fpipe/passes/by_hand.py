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
from ..tree import Structure, Tree

#: A pytree that was flattened.
Flat: TypeAlias = tuple[list[Any], Structure]
Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Carried:
    """Values between two programs by name, and the flat arguments of the first, like which
    gradients are returned.
    """

    values: Values
    params: Flat
    x: Flat


def forward(
    programs: Programs, params: Tree, x: Tree, /, *, state: Tree = None, **side: Tree
) -> Tree:
    """``(y, saved)``; with the auxiliary scalar and the new state beside ``y`` where there are."""
    flat_params = tree.flatten(params)
    flat_x = tree.flatten(x)
    groups = (flat_params[0], flat_x[0], tree.leaves(side), tree.leaves(state))
    given = {
        f"{prefix}{index}": leaf
        for prefix, leaves in zip("pxkt", groups, strict=True)
        for index, leaf in enumerate(leaves)
    }
    values = _run(programs.f, given)
    outputs = programs.outputs
    y = outputs.y.fill(values[name] for name in programs.ys if name is not None)
    extras = []
    if programs.aux:
        extras.append(values[programs.aux])
    if outputs.state is not None:
        extras.append(outputs.state.fill(values[name] for name in programs.new_state))
    saved = {name: values[name] for name in programs.saved}
    return (y, *extras) if extras else y, Carried(saved, flat_params, flat_x)


def backward(
    programs: Programs,
    saved: Carried,
    dy: Tree,
    *,
    daux: torch.Tensor | None = None,
) -> tuple[Tree, Tree]:
    """``(dx, dparams)``."""
    values = _run(programs.b, saved.values | _cotangents(programs, dy, daux))
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
    values = _run(programs.i, saved.values | _cotangents(programs, dy, daux))
    kept = {name: values[name] for name in programs.kept}
    return _gradients(programs.dxs, saved.x, values), Carried(kept, saved.params, saved.x)


def backward_weight(programs: Programs, kept: Carried) -> Tree:
    """``dparams``."""
    return _gradients(programs.dps, kept.params, _run(programs.w, kept.values))


def _run(program: Program, values: Values) -> Values:
    """The values with those that a program computes from them."""
    for name in program.inputs:
        if name not in values:
            raise StageError(
                f"the arguments have no leaf {name!r}, which {program!r} reads; pass trees of the "
                "structure that was traced"
            )
    results = program([values[name] for name in program.inputs])
    return values | dict(zip(program.outputs, results, strict=True))


def _cotangents(programs: Programs, dy: Tree, daux: torch.Tensor | None) -> Values:
    leaves = tree.leaves(dy)
    names = [name for name, y in zip(programs.dys, programs.ys, strict=True) if y is not None]
    if len(leaves) != len(names):
        raise StageError(
            f"dy has {len(leaves)} leaves where the stage gives {len(names)}; give one for each "
            "output"
        )
    values = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}
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
