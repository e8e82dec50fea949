# SPDX-License-Identifier: Apache-2.0
"""``from_module`` and ``to_module``: an ``nn.Module`` as pure stages with their parameters, and
back.

The stages are functions; they never change the module, which keeps its weights. This module must
not know ranks or schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import combinations, pairwise
from typing import TypeAlias

import torch
from torch import fx, nn

from .. import tree
from ..engine.pipeline import Pipeline
from ..errors import StageError
from ..stage import Stage
from ._layers import as_blocks
from ._pieces import pieces
from ._pure import Pure, claims, clone, running

#: By stage, tensors by name; None for a stage on another process, and for a tensor that is left as
#: it is.
ByStage: TypeAlias = Sequence[Mapping[str, torch.Tensor | None] | None]


def from_module(
    model: nn.Module,
    cuts: Sequence[str] = (),
    *,
    side: Sequence[str] = (),
    state: Sequence[str] = (),
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """Cut a module into pure stages.

    The stages know which parameters are frozen (``requires_grad=False``) and which are tied (one
    parameter in two stages), and so does ``fpipe.pipeline(stages)``. Buffers are constants, except
    for the running statistics of norms in training and those that ``state`` names: stages with such
    buffers carry state. Stages train if the module does now; ``pipe.train()`` and ``pipe.eval()``
    choose later. ``fpipe.interop.filled`` fills a module cut on "meta".

    Args:
        model: the module.
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
    parts = pieces(empty := clone(model), cuts, side)
    graphs = list(map(partial(fx.GraphModule, as_blocks(empty)), (piece.graph for piece in parts)))
    names = [f"{type(model).__name__}[{low}:{high}]" for low, high in pairwise(["", *cuts, ""])]
    states = _state_of(graphs, names, set(running(model, state)))
    owned = claims(model, list(map(_leaves, graphs, states)))
    rows = zip(graphs, owned, parts, states, names, strict=True)
    stages = [
        Pure(g, claim, sides=p.sides, state=own, name=name).stage(claim)
        for g, claim, p, own, name in rows
    ]
    return stages, [claim.params for claim in owned]


def _leaves(graph: nn.Module, state: Sequence[str]) -> list[str]:
    """The names of the parameters of a stage, and of its buffers that are not state."""
    buffers = [
        name for name, _ in graph.named_buffers(remove_duplicate=False) if name not in set(state)
    ]
    return [*(name for name, _ in graph.named_parameters(remove_duplicate=False)), *buffers]


def _state_of(
    graphs: Iterable[nn.Module], names: Sequence[str], changing: Set[str]
) -> list[list[str]]:
    """The buffers of each stage that forward changes."""
    state = [
        [n for n, _ in graph.named_buffers(remove_duplicate=False) if n in changing]
        for graph in graphs
    ]
    for (one, first), (other, second) in combinations(zip(names, state, strict=True), 2):
        for name in first:
            if name in second:
                raise StageError(
                    f"buffer {name!r} changes in two stages, {one} and {other}, and cannot be in "
                    "both; "
                    "cut so that the submodule runs in one stage, or call model.eval()"
                )
    return state


def to_module(
    model: nn.Module,
    params: ByStage,
    state: ByStage | None = None,
    *,
    gather: Pipeline | None = None,
) -> nn.Module:
    """Write stage parameters (and state) back into a module, by name; returns the module.

    Args:
        model: the module that ``from_module`` cut, or one like it.
        params: by stage; an empty dict leaves a stage as it is.
        state: likewise.
        gather: the pipeline, where stages are on other processes (their entries are ``None``).
            Every process calls this function, the tensors of a stage are sent from the rank that
            has it, and every module gets all of them.

    Returns:
        ``model``.

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
            "would keep its old "
            "values there; call to_module(model, params, gather=pipe) on every process, or pass "
            "{} for a stage that "
            "stays as it is"
        )
    if gather is not None and not isinstance(gather, Pipeline):
        raise StageError(
            f"gather={gather!r}; give the pipeline whose parameters these are, as in gather=pipe"
        )
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    with torch.no_grad():
        for part in (params, state):
            for stage, tensors in enumerate(
                part or () if gather is None or part is None else _whole(gather, part)
            ):
                for name, value in (tensors or {}).items():
                    if value is not None:
                        _write(targets, name, value, stage)
    return model


def _whole(pipe: Pipeline, by_stage: ByStage) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors of each stage, from the rank that has it. Every process runs this to its end."""
    by_stage = pipe.unshard(by_stage)
    here = {s: {n: t for n, t in (by_stage[s] or {}).items() if t is not None} for s in pipe.here}
    offers = pipe.gather(
        {
            s: [(n, tuple(t.shape), str(t.dtype)) for n, t in part.items()]
            for s, part in here.items()
        }
    )
    for stage in range(pipe.stages):
        rank = pipe.placement.rank_of(stage)
        names = [name for name, _, _ in offers[rank][stage]]
        specs = [
            torch.empty(shape, dtype=_dtype(dtype), device="meta")
            for _, shape, dtype in offers[rank][stage]
        ]
        mine = (
            tuple(t.detach().contiguous() for t in here[stage].values())
            if rank in pipe.group.here
            else None
        )
        values = pipe.group.share(mine, tuple(map(tree.Spec.of, specs)), rank) if specs else ()
        yield dict(zip(names, values, strict=True))


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def _write(targets: Mapping[str, torch.Tensor], name: str, value: torch.Tensor, stage: int) -> None:
    if name not in targets:
        raise StageError(
            f"params of stage {stage} hold {name!r}, which the module does not have; pass the "
            "module that "
            "from_module was given, or one built like it"
        )
    if targets[name].shape != value.shape:
        raise StageError(
            f"params of stage {stage}: {name!r} has shape {list(value.shape)}, the module's has "
            f"{list(targets[name].shape)}; pass parameters of the same model, and gather=pipe "
            "where they are parts (zero=)"
        )
    targets[name].copy_(value)
