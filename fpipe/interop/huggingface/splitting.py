# SPDX-License-Identifier: Apache-2.0
"""``stages``: a causal model of the transformers package as stages with their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise

from torch import Tensor, nn

from ...errors import StageError
from ...stage import Stage
from ..experts import configs_of, is_experts
from ..module_function import Claim, claims
from .crossing import Flow, parts_of
from .model_part import ModelPart, part_module
from .router import router_of
from .trial import compare, try_forward
from .units import units_of


def stages(
    model: nn.Module,
    n: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    experts: str | None = None,
    aux_loss: bool | None = None,
    example: Mapping[str, Tensor] | None = None,
) -> tuple[list[Stage], list[dict[str, Tensor]]]:
    """Cut a model of the transformers package into ``n`` stages; returns ``(stages, params)``.

    The first stage takes token ids, the last returns logits. ``attention_mask``, ``position_ids``
    and ``position_embeddings`` are side inputs of all stages, optional and as the model's forward
    takes them; behind an encoder also ``decoder_input_ids``. Parameters keep the model's names; the
    stages know which are frozen (also those that the model does not use) or tied. Layers that the
    model checkpoints are recomputed in the backward. A model whose stages compute something else on
    a few tokens is refused; on "meta" a warning says that they are not compared.

    Args:
        model: of the transformers package.
        n: how many stages; layers are distributed by their number of parameters, the head counted
            too.
        cuts: instead of ``n``, the indices of the layers that begin stages 1, 2, ..., in the order
            in which they run.
        experts: the package's implementation of a mixture of experts; by default one that can be
            traced, if there is one, else the stages with experts run on ``engine="eager"``.
        aux_loss: whether the router's auxiliary loss joins the loss, with its coefficient and over
            all layers of all stages; by default the config's ``output_router_logits``.
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
    _check_layer_drop(model)
    configs, traced = configs_of(model, experts)
    if aux_loss is None:
        aux_loss = bool(getattr(model.config, "output_router_logits", False))
    router = router_of(model) if aux_loss else None
    split, recordings, runs_without_values = try_forward(model, units, configs, example, router)
    flow = split.flow
    layers = [number for number, visit in enumerate(flow.visits) if visit.unit in units.layers]
    edges = [0, *_first_layers(model, flow, layers, n, cuts), len(layers)]
    bounds = [layers[first - 1] + 1 for first in edges[1:-1]]
    parts = parts_of(model, flow, len(split.inputs), bounds, split.always)
    modules = [part_module(model, units, split, part, configs) for part in parts]
    owned = _claims(model, [names for _, names in modules])
    functions, cut = list[ModelPart](), list[Stage]()
    for (low, high), (module, _), claim, part in zip(
        pairwise(edges), modules, owned, parts, strict=True
    ):
        fn = ModelPart(module, claim, split, part, f"{type(model).__name__}[{low}:{high}]")
        run = {visit.unit for visit in flow.visits[part.first : part.stop]}
        mixture = any(is_experts(m) for unit in run for m in model.get_submodule(unit).modules())
        functions.append(fn)
        cut.append(
            fn.stage(
                claim.frozen,
                claim.ties,
                claim.weights,
                engine="eager" if mixture and not (traced and runs_without_values) else None,
                aux_loss=router is not None and fn.last,
            )
        )
    params = [claim.params for claim in owned]
    compare(model, functions, params, recordings)
    return cut, params


def _claims(model: nn.Module, names: Sequence[list[str]]) -> list[Claim]:
    """Return the parameters of each stage; those that none uses are frozen ones of the first."""
    used = {weight.key for claim in claims(model, names) for weight in claim.weights.values()}
    unused = [name for name, _ in model.named_parameters() if name not in used]
    first, *others = claims(model, [[*names[0], *unused], *names[1:]])
    return [first._replace(frozen=tuple(dict.fromkeys([*first.frozen, *unused]))), *others]


def _first_layers(
    model: nn.Module,
    flow: Flow,
    layers: Sequence[int],
    n: int | None,
    cuts: Sequence[int] | None,
) -> list[int]:
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
        return list(cuts)
    if not isinstance(n, int) or not 1 <= n <= count + 1:
        raise StageError(f"n={n!r} stages of {count} layers and a head; give 1 to {count + 1}")
    sizes = [
        sum(p.numel() for p in model.get_submodule(visit.unit).parameters() if p.dim() > 1)
        for visit in flow.visits
    ]
    return _even_starts([*(sizes[number] for number in layers), sum(sizes[layers[-1] + 1 :])], n)


def _even_starts(sizes: Sequence[int], n: int) -> list[int]:
    """Return where parts 1, 2, ... begin such that the sum of the squares of their sizes is least.

    >>> _even_starts([1, 1, 1, 1, 4], 3)
    [2, 4]
    """
    ends = [0, *accumulate(sizes)]

    @cache
    def best(first: int, parts: int) -> tuple[int, tuple[int, ...]]:
        if parts == 1:
            return (ends[-1] - ends[first]) ** 2, ()
        options = list[tuple[int, tuple[int, ...]]]()
        for stop in range(first + 1, len(sizes) - parts + 2):
            rest, starts = best(stop, parts - 1)
            options.append(((ends[stop] - ends[first]) ** 2 + rest, (stop, *starts)))
        return min(options)

    return list(best(0, n)[1])


def _check_layer_drop(model: nn.Module) -> None:
    for module in model.modules():
        drop = getattr(module, "layerdrop", 0)
        if module.training and isinstance(drop, float) and drop > 0:
            raise StageError(
                f"fpipe cannot split {type(model).__name__}: it drops layers at random in training "
                f"(layerdrop={drop}); build it with layerdrop=0.0, or write its stages as functions"
            )
