# SPDX-License-Identifier: Apache-2.0
"""``stages``: a causal model of the transformers package as stages with their parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ... import balance
from ...errors import StageError
from ...stage import Stage
from ..module_function import Claim, claims_of_parts, clone, tensors_of
from .crossing import Flow, parts_of
from .model_part import ModelPart, part_module
from .trial import compare, try_forward
from .units import units_of


def stages(
    model: nn.Module,
    n: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    example: Mapping[str, Tensor] | None = None,
) -> tuple[list[Stage], list[dict[str, Tensor]]]:
    """Cut a model of the transformers package into ``n`` stages; returns ``(stages, params)``.

    The first stage takes token ids, the last returns logits. ``attention_mask`` and
    ``position_ids`` are side inputs of all stages, optional and as the model's forward takes them;
    behind an encoder also ``decoder_input_ids``. Parameters keep the model's names; the stages know
    which are frozen (also those that the model does not use) or tied. Layers that the model
    checkpoints are recomputed in the backward. Of the implementations of a mixture of experts one
    is used that can be traced; without one, stages with experts run on ``engine="eager"``. A model
    whose stages compute something else on a few tokens is refused; on "meta" a warning says that
    they are not compared.

    Args:
        model: of the transformers package.
        n: how many stages; layers are distributed by their number of parameters, the head counted
            too.
        cuts: instead of ``n``, the indices of the layers that begin stages 1, 2, ..., in the order
            in which they run.
        example: arguments of forward, two rows of each, for inputs other than token ids; if there
            are several beside the side inputs, the first stage takes a dict of them.

    Raises:
        StageError: if the model cannot be split, or ``n`` and ``cuts`` do not fit it.

    ```python
    model = transformers.AutoModelForCausalLM.from_config(config)
    stages, params = fpipe.interop.huggingface.stages(model, 4)
    ```
    """
    units = units_of(model)
    whole = _traceable(model)
    flow, recordings, runs_without_values = try_forward(model, whole, units, example)
    layers = [number for number, visit in enumerate(flow.visits) if visit.unit in units.layers]
    edges = [0, *_first_layers(model, flow, layers, n, cuts), len(layers)]
    parts = parts_of(model, flow, [layers[first - 1] + 1 for first in edges[1:-1]])
    modules = [part_module(whole, units, flow, part) for part in parts]
    owned = _claims(model, [names for _, names in modules])
    params = [claim.params for claim in owned]
    functions = list[ModelPart]()
    cut = list[Stage]()
    for stage, (claim, part) in enumerate(zip(owned, parts, strict=True)):
        name = f"{type(model).__name__}[{edges[stage]}:{edges[stage + 1]}]"
        functions.append(ModelPart(modules[stage][0], claim, flow, part, name))
        run = [model.get_submodule(visit.unit) for visit in flow.visits[part.first : part.stop]]
        mixture = any(is_experts(module) for unit in run for module in unit.modules())
        engine = "eager" if mixture and not runs_without_values else None
        cut.append(functions[-1].stage(claim, engine=engine))
    compare(model, functions, params, recordings)
    return cut, params


class _NoLayerDrop:
    """In place of a probability of 0 to drop a layer: no random number is smaller."""

    def __gt__(self, other: object) -> bool:
        return False


def _traceable(model: nn.Module) -> nn.Module:
    """Clone a model such that it can be traced, also its experts if there are any."""
    if getattr(model.config, "output_router_logits", False):
        raise StageError(
            f"the config of {type(model).__name__} adds the loss of its routers, which is no sum "
            "over stages; set output_router_logits=False, or write its stages as functions"
        )
    whole = clone(model)
    for module in whole.modules():
        drop = getattr(module, "layerdrop", None)
        if module.training and isinstance(drop, float) and drop > 0:
            raise StageError(
                f"fpipe cannot split {type(model).__name__}: it drops layers at random in training "
                f"(layerdrop={drop}); build it with layerdrop=0.0, or write its stages as functions"
            )
        if drop == 0:
            vars(module)["layerdrop"] = _NoLayerDrop()
    use_traceable_experts(whole)
    return whole


def _claims(model: nn.Module, names: Sequence[list[str]]) -> list[Claim]:
    """Return the parameters of each stage; those that none uses are frozen ones of the first."""
    tensors = tensors_of(model)
    used = {tensors[name] for row in names for name in row}
    unused = [name for name, p in model.named_parameters() if p not in used]
    first, *others = claims_of_parts(model, [[*names[0], *unused], *names[1:]])
    return [first._replace(frozen=tuple(dict.fromkeys([*first.frozen, *unused]))), *others]


def _first_layers(
    model: nn.Module,
    flow: Flow,
    layers: Sequence[int],
    n: int | None,
    cuts: Sequence[int] | None,
) -> Sequence[int]:
    """Return the layers that begin stages 1, 2, ...

    It is ``len(layers)`` where the last stage is the head alone.
    """
    count = len(layers)
    if (n is None) == (cuts is None):
        raise StageError("say how many stages (n) or which layers begin them (cuts), one of both")
    if cuts is not None:
        inside = all(isinstance(cut, int) and 1 <= cut <= count for cut in cuts)
        if not inside or any(a >= b for a, b in pairwise(cuts)):
            raise StageError(f"cuts={list(cuts)!r}; give ascending layer indices from 1 to {count}")
        return cuts
    if not isinstance(n, int) or not 1 <= n <= count + 1:
        raise StageError(f"n={n!r} stages of {count} layers and a head; give 1 to {count + 1}")
    units = (model.get_submodule(visit.unit) for visit in flow.visits)
    sizes = [sum(p.numel() for p in unit.parameters() if p.dim() > 1) for unit in units]
    costs = [*(sizes[number] for number in layers), sum(sizes[layers[-1] + 1 :])]
    return balance(costs, n, "GPipe", microbatches=2).starts[1:]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a mixture, by the name of its class.

    >>> is_experts(nn.Linear(2, 2))
    False
    """
    return type(module).__name__.lower().endswith("experts")


def use_traceable_experts(clone: nn.Module) -> None:
    """Let the experts of a clone use an implementation that can be traced, by configs of their own,
    where the model has one.
    """
    weights = [p for m in clone.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(clone, "set_experts_implementation"):
        return
    # grouped products of other types cannot be traced
    grouped = all(p.dtype == torch.bfloat16 for p in weights)
    configs = dict[int, Any]()
    for module in clone.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config = configs.setdefault(id(config), copy.copy(config))
            config._experts_implementation = "grouped_mm" if grouped else "batched_mm"
            vars(module)["config"] = config
