"""What a stage is called with, how it is called, and what it returned; shared by both engines.

The outputs are known from a run on fake tensors. Nothing here knows graphs, schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import tree
from ..errors import StageError
from ..stage import Stage
from ..tree import AbstractTree, Aval
from . import _fake
from ._purity import watching


class Signature(NamedTuple):
    """What a trace depends on: the abstract arguments of a stage function."""

    params: AbstractTree
    x: AbstractTree
    side: AbstractTree
    state: AbstractTree

    def __str__(self) -> str:
        """Parameters and input, for messages."""
        return "(" + "; ".join(str(argument) for argument in self[:2] if argument.leaves) + ")"


@dataclass(frozen=True)
class Outputs:
    """What a first, fake run of the function tells: the structure and the avals of what it returns."""

    y_spec: tree.Structure
    y: tuple[Any, ...]  # Aval, or a value that is no tensor
    aux: Aval | None
    state_spec: tree.Structure | None
    state: tuple[Aval, ...] = ()
    copies: bool = False  # inputs must be copied first: the function writes into them


def outputs_of(stage: Stage, signature: Signature) -> Outputs:
    """What a function returns, told by a run on fake tensors: no data, no effect on any tensor."""
    for copies in (False, True):
        with _fake.mode():
            groups = _fake.inputs(signature)
            try:
                with watching(stage.label):
                    y, aux, state = call(stage, signature, groups, copies)
            except RuntimeError as error:
                if copies or "leaf Variable" not in str(error):
                    raise
                continue
        return outputs_from(stage, y, aux, state, copies)
    raise AssertionError("unreachable")


def outputs_from(stage: Stage, y: Any, aux: Any, state: Any, copies: bool) -> Outputs:
    """What a call returned, checked and described."""
    ys, y_spec = tree.flatten(y)
    _check_outputs(stage, ys, aux)
    avals = tuple(Aval.like(t, t.requires_grad) if isinstance(t, torch.Tensor) else t for t in ys)
    aux_aval = None if aux is None else Aval.like(aux, aux.requires_grad)
    states, state_spec = tree.flatten(state) if stage.state else ([], None)
    _check_state(stage, states)
    return Outputs(y_spec, avals, aux_aval, state_spec, tuple(map(Aval.like, states)), copies)


def _check_outputs(stage: Stage, ys: Sequence[Any], aux: Any) -> None:
    for leaf in ys:
        dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and Aval.like(leaf).kind is None
        if not dense and not isinstance(leaf, (int, float, bool, str, bytes, complex, torch.dtype, torch.device)):
            raise StageError(
                f"stage {stage.label} returns a {_kind(leaf)}, which cannot be sent to the next stage; "
                "return tensors (of a DTensor: its to_local()) and plain numbers, or register its class as a pytree "
                '(optree, namespace="fpipe")'
            )
    if stage.aux_loss and (not isinstance(aux, torch.Tensor) or aux.dim() or not aux.is_floating_point()):
        raise StageError(
            f"stage {stage.label} has aux_loss=True, so it must return (y, scalar) with a floating tensor without "
            f"axes; its second value is {tree.describe([aux])}"
        )


def _kind(leaf: Any) -> str:
    sparse = isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided
    return f"{leaf.layout} tensor" if sparse else type(leaf).__name__


def _check_state(stage: Stage, leaves: Sequence[Any]) -> None:
    strange = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if strange:
        raise StageError(
            f"stage {stage.label} returns {strange[0]!r} in its state, whose leaves must be tensors (a number would "
            "make each microbatch another program); write torch.tensor(0) for a counter"
        )


def call(stage: Stage, signature: Signature, groups: Sequence[Sequence[Any]], copies: bool) -> tuple[Any, Any, Any]:
    """The user's function on flat leaves: (y, aux, state)."""
    p, x, side, state = (tree.unflatten(t.spec, group) for t, group in zip(signature, groups, strict=True))
    with torch.enable_grad():
        if copies:
            x = tree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, x)
        out = stage.fn(p, state, x, **side) if stage.state else stage.fn(p, x, **side)
    extras = int(stage.aux_loss) + int(stage.state)
    if not extras:
        return out, None, None
    if not isinstance(out, tuple) or len(out) != 1 + extras:
        shape = "(y, " + ("scalar, " if stage.aux_loss else "") + ("state" if stage.state else "")
        raise StageError(
            f"stage {stage.label} must return {shape.rstrip(', ')}), but it returned a {type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple) else "")
        )
    aux = out[1] if stage.aux_loss else None
    return out[0], aux, out[-1] if stage.state else None
