# SPDX-License-Identifier: Apache-2.0
"""``from_module`` and ``to_module``: an ``nn.Module`` as pure stages with their parameters, and back.

The stages are functions; they never change the module, which keeps its weights. This module must not know ranks or
schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import combinations, pairwise
from typing import TypeAlias

import torch
from torch import fx, nn

from ..errors import StageError
from ..stage import Stage
from ._pieces import pieces
from ._pure import Pure, claims, clone, running

#: By stage, tensors by name; None for a stage on another process, and for a tensor that is left as it is.
ByStage: TypeAlias = Sequence[Mapping[str, torch.Tensor | None] | None]


def from_module(
    model: nn.Module, cuts: Sequence[str] = (), *, side: Sequence[str] = (), state: Sequence[str] = ()
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """Cut a module into pure stages.

    The stages know which parameters are frozen (``requires_grad=False``) and which are tied (one parameter in two
    stages), and so does ``fpipe.pipeline(stages)``. Buffers are constants, except for the running statistics of norms
    in training and those that ``state`` names: stages with such buffers carry state. Stages train if the module does
    now (``model.train()``, ``model.eval()``).

    Args:
        model: the module.
        cuts: names of submodules; each begins a stage with its first use.
        side: arguments of forward that are side inputs, beside those without a default; the others keep their default.
        state: patterns of names of buffers that forward changes.

    Returns:
        ``(stages, params)``; ``params[s]`` maps names in the module to its tensors, not to copies.

    Raises:
        StageError: if a name is unknown, or forward is not a chain of submodules where it is cut.

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
    parts = pieces(empty := clone(model), cuts, side)
    graphs = [fx.GraphModule(empty, piece.graph) for piece in parts]
    owned = claims(model, [[n for n, _ in graph.named_parameters(remove_duplicate=False)] for graph in graphs])
    names = [f"{type(model).__name__}[{low}:{high}]" for low, high in pairwise(["", *cuts, ""])]
    rows = zip(graphs, owned, parts, _state_of(graphs, names, set(running(model, state))), names, strict=True)
    stages = [Pure(g, claim, sides=p.sides, state=own, name=name).stage(claim) for g, claim, p, own, name in rows]
    return stages, [claim.params for claim in owned]


def _state_of(graphs: Iterable[nn.Module], names: Sequence[str], changing: Set[str]) -> list[list[str]]:
    """The buffers of each stage that forward changes."""
    state = [[n for n, _ in graph.named_buffers(remove_duplicate=False) if n in changing] for graph in graphs]
    for (one, first), (other, second) in combinations(zip(names, state, strict=True), 2):
        for name in first:
            if name in second:
                raise StageError(
                    f"buffer {name!r} changes in two stages, {one} and {other}, and cannot be in both; "
                    "cut so that the submodule runs in one stage, or call model.eval()"
                )
    return state


def to_module(model: nn.Module, params: ByStage, state: ByStage | None = None) -> nn.Module:
    """Write stage parameters (and state) back into a module, by name; returns the module.

    Args:
        model: the module that ``from_module`` cut, or one like it.
        params: by stage; entries that are ``None`` (stages on other processes) change nothing.
        state: likewise.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> stages, params = from_module(model, cuts=["1"])
    >>> changed = [{name: torch.zeros_like(p) for name, p in stage.items()} for stage in params]
    >>> float(to_module(model, changed)[1].weight.detach().abs().sum())
    0.0
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for index, tensors in enumerate([*params, *(state or ())]):
            for name, value in (tensors or {}).items():
                if value is not None:
                    _write(targets, name, value, index % max(len(params), 1))
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
