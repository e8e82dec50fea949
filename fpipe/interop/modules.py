"""``from_module`` and ``to_module``: an ``nn.Module`` as pure stages with their parameters, and back.

The stages are functions; the module keeps its weights and is never changed by them. This file knows modules and
stages, and nothing of ranks or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call

from ..errors import StageError
from ..stage import Stage
from ._chain import Piece, pieces
from ._skeleton import Claim, Pure, claims, clone, running


class ModulePart(Pure):
    """A piece of a module's forward as a stage function."""

    def call(self, given: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the piece."""
        return functional_call(self.module, given, (x,), dict(side), tie_weights=False)


def from_module(
    model: nn.Module, cuts: Sequence[str] = (), *, side: Sequence[str] = (), state: Sequence[str] = ()
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """Cut a module into pure stages before each submodule that ``cuts`` names; returns ``(stages, params)``.

    ``params[s]`` maps the module's own names to tensors (those of the module, not copies). The stages carry which
    of them are frozen (``requires_grad=False``) and which are tied (one parameter in two stages), so that
    ``fpipe.pipeline(stages)`` knows. Buffers are constants, but for the running statistics of norms in training and
    those that the patterns in ``state`` name: stages with such buffers carry state. Arguments of forward beyond its
    first are side inputs where they have no default or ``side`` names them; the others keep their default.

    Whether the module trains (``model.train()``, ``model.eval()``) is settled here.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> stages, params = from_module(model, cuts=["1"])
    >>> sorted(params[1])
    ['2.bias', '2.weight']
    >>> x = torch.ones(4, 2)
    >>> torch.equal(stages[1](params[1], stages[0](params[0], x)), model(x))
    True
    """
    if not isinstance(model, nn.Module):
        raise StageError(f"from_module takes an nn.Module, not a {type(model).__name__}")
    hollow = clone(model)
    parts = pieces(hollow, cuts, side)
    graphs = [fx.GraphModule(hollow, piece.graph) for piece in parts]
    owned = claims(model, [[n for n, _ in graph.named_parameters(remove_duplicate=False)] for graph in graphs])
    moving = set(running(model, state))
    labels = _labels(type(model).__name__, cuts)
    stages = [
        _stage(graph, piece, claim, moving, label)
        for graph, piece, claim, label in zip(graphs, parts, owned, labels, strict=True)
    ]
    _check_state(stages)
    return stages, [claim.params for claim in owned]


def _stage(graph: nn.Module, piece: Piece, claim: Claim, moving: set[str], label: str) -> Stage:
    state = [name for name, _ in graph.named_buffers(remove_duplicate=False) if name in moving]
    return ModulePart(graph, claim, sides=piece.sides, state=state, name=label).stage(claim)


def _labels(name: str, cuts: Sequence[str]) -> list[str]:
    edges = ["", *cuts, ""]
    return [f"{name}[{lo}:{hi}]" for lo, hi in pairwise(edges)]


def _check_state(stages: Sequence[Stage]) -> None:
    homes: dict[str, str] = {}
    for stage in stages:
        for name in stage.initial_state or ():
            if name in homes:
                raise StageError(
                    f"buffer {name!r} changes in two stages, {homes[name]} and {stage.name}, and cannot live in both; "
                    "cut so that the submodule runs in one stage, or call model.eval()"
                )
            homes[name] = stage.name


def to_module(model: nn.Module, params: Sequence[Any], state: Sequence[Any] | None = None) -> nn.Module:
    """Write stage parameters (and state) back into a module, by name; returns the module.

    Entries that are ``None`` (stages that live elsewhere) are left as they are.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> stages, params = from_module(model, cuts=["1"])
    >>> changed = [{name: torch.zeros_like(p) for name, p in own.items()} for own in params]
    >>> float(to_module(model, changed)[1].weight.detach().abs().sum())
    0.0
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for stage, own in enumerate([*params, *(state or ())]):
            for name, value in (own or {}).items():
                if value is not None:
                    _write(targets, name, value, stage % max(len(params), 1))
    return model


def _write(targets: Mapping[str, torch.Tensor], name: str, value: torch.Tensor, stage: int) -> None:
    if name not in targets:
        raise StageError(
            f"params of stage {stage} hold {name!r}, which the module does not have; pass the module that "
            "from_module was given, or one built like it"
        )
    if targets[name].shape != value.shape:
        raise StageError(
            f"params of stage {stage}: {name!r} has shape {list(value.shape)}, the module's has "
            f"{list(targets[name].shape)}; pass parameters of the same model"
        )
    targets[name].copy_(value)
