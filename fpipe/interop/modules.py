# SPDX-License-Identifier: Apache-2.0
"""``from_module`` and ``to_module``: an ``nn.Module`` as pure stages with their parameters, and
back.

The stages are functions; they never change the module, which keeps its weights. This module must
not know ranks or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from .. import Pipeline, stream, tree
from ..errors import StageError
from ..stage import Stage
from .graph_cuts import cut_forward
from .layer_blocks import with_blocks
from .module_function import (
    ModuleFunction,
    changing_buffers,
    claims_of_parts,
    clone,
    hooks_of,
    refuse_hooks,
    tensors_of,
)

#: Tensors by name for each stage, as calls return gradients or states; None for a stage on another
#: process, and for a tensor that is left as it is.
Results: TypeAlias = Sequence[Mapping[str, Tensor | None] | None]


def from_module(
    model: nn.Module,
    cuts: Sequence[str] = (),
    *,
    side: Sequence[str] = (),
    state: Sequence[str] = (),
) -> tuple[list[Stage], list[dict[str, Tensor]]]:
    """Cut a module into pure stages.

    The stages know which parameters are frozen (``requires_grad=False``) and which are tied (one
    parameter in two stages), and so does ``fpipe.pipeline(stages)``. Buffers are constants, except
    for the running statistics of norms in training and those that ``state`` names: stages with such
    buffers carry state. Stages train if the module does now; ``pipe.train()`` and ``pipe.eval()``
    choose later. ``fpipe.receive`` reads the parameters of a module cut on "meta".

    Args:
        model: a module whose forward runs its submodules one after another.
        cuts: names of submodules; each begins a stage with its first use.
        side: arguments of forward that are side inputs, beside those without a default; the others
            keep their default.
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
    refuse_hooks(type(model).__name__, hooks_of(model))
    empty = clone(model)
    pieces = cut_forward(empty, cuts, side)
    with_blocks(empty)
    graphs = [fx.GraphModule(empty, piece) for piece in pieces]
    names = [f"{type(model).__name__}[{low}:{high}]" for low, high in pairwise(["", *cuts, ""])]
    used = [list(tensors_of(graph)) for graph in graphs]
    if fault := tree.unmatched(state, [name for name, _ in model.named_buffers()]):
        raise StageError(f"state={fault.replace('leaf', 'buffer')}")
    changing = changing_buffers(model, state)
    for buffer in changing:
        users = [name for name, row in zip(names, used, strict=True) if buffer in row]
        if len(users) > 1:
            raise StageError(
                f"buffer {buffer!r} changes in two stages, {users[0]} and {users[1]}, and cannot "
                "be in both; cut so that the submodule runs in one stage, or call model.eval()"
            )
    owned = claims_of_parts(model, [[n for n in row if n not in changing] for row in used])
    stages = list[Stage]()
    for claim, graph, piece, row, name in zip(owned, graphs, pieces, used, names, strict=True):
        _, *sides = piece.find_nodes(op="placeholder")
        function = ModuleFunction(
            graph,
            claim.aliases,
            sides=[str(node.target) for node in sides],
            state=[key for key in row if key in changing],
            name=name,
        )
        stages.append(function.stage(claim))
    return stages, [claim.params for claim in owned]


def to_module(
    model: nn.Module,
    params: Results,
    state: Results | None = None,
    *,
    gather: Pipeline | None = None,
) -> nn.Module:
    """Write stage parameters (and state) back into a module, by name.

    Args:
        model: the module that ``from_module`` cut, or one like it.
        params: by stage; an empty dict leaves a stage as it is.
        state: the buffers by stage, likewise.
        gather: the pipeline, where stages are on other processes (their entries are ``None``).
            Every process calls this function, the tensors of a stage are sent from the rank that
            has it, and every module gets all of them.

    Returns:
        The same ``model``.

    Raises:
        StageError: if a stage is on another process and ``gather`` is not given, or a tensor does
        not fit the module.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> stages, params = from_module(model, cuts=["1"])
    >>> changed = [{name: torch.zeros_like(p) for name, p in stage.items()} for stage in params]
    >>> float(to_module(model, changed)[1].weight.detach().abs().sum())
    0.0
    """
    elsewhere = [stage for stage, part in enumerate(params) if part is None]
    if gather is None and elsewhere:
        raise StageError(
            f"params of stages {elsewhere} are None: they are on other processes, and the module "
            "would keep its old values there; call to_module(model, params, gather=pipe) on every "
            "process, or pass {} for a stage that stays as it is"
        )
    if gather is not None and not isinstance(gather, Pipeline):
        raise StageError(
            f"gather={gather!r}; give the pipeline whose parameters these are, as in gather=pipe"
        )
    targets = tensors_of(model)

    def write_rows(rows: Results) -> None:
        for stage, row in enumerate(rows):
            for name, value in (row or {}).items():
                if value is not None:
                    _write(targets, name, value, f" of stage {stage}")

    with torch.no_grad():
        if gather is None:
            write_rows(params)
            write_rows(state or ())
            return model
        for name, value in stream(gather, params):
            _write(targets, name, value, "")
        if state is not None:
            on_host = tree.tree_map(lambda value: value.detach().cpu(), list(state))
            for rows in gather.gather(on_host):
                write_rows(rows)
    return model


def _write(targets: Mapping[str, Tensor], name: str, value: Tensor, where: str) -> None:
    if name not in targets:
        raise StageError(
            f"params{where} hold {name!r}, which the module does not have; pass the module that "
            "from_module was given, or one built like it"
        )
    if targets[name].shape != value.shape:
        raise StageError(
            f"params{where}: {name!r} has shape {list(value.shape)}, the module's has "
            f"{list(targets[name].shape)}; pass parameters of the same model, and gather=pipe "
            "where they are parts (zero=)"
        )
    targets[name].copy_(value)
