# SPDX-License-Identifier: Apache-2.0
"""Decoder-only causal models of the transformers package as pure stages.

This module must not know any family of models by name, and does not import transformers.
"""

from __future__ import annotations

import inspect
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from .. import Pipeline, pipeline, receive, tree, value_and_grad
from ..errors import StageError
from ..saving import model_files
from ..schedule import Schedule
from ..stage import Stage
from ._decoder import DecoderPart, names_of, part_module
from ._experts import configs_of, is_experts
from ._flow import parts_of
from ._router import Router, router_of
from ._structure import Structure, is_rotary, structure_of
from ._trial import Trial, try_forward
from ._verify import compare
from .binding import Bound
from .module_function import Claim, claims


def stages(
    model: nn.Module,
    n: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    experts: str | None = None,
    aux_loss: bool | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
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

    ```python
    model = transformers.AutoModelForCausalLM.from_config(config)
    stages, params = fpipe.interop.huggingface.stages(model, 4)
    ```
    """
    structure = structure_of(model)
    _check_drops(model)
    configs, traced = configs_of(model, experts)
    if aux_loss is None:
        aux_loss = bool(getattr(model.config, "output_router_logits", False))
    router = router_of(model) if aux_loss else None
    trial = try_forward(model, structure, configs, example, router)
    layers = trial.layers(structure)
    spans = list(pairwise([0, *_first_layers(trial, model, layers, n, cuts), len(layers)]))
    cut, params = _parts(model, structure, trial, spans, configs, traced, router)
    compare(model, cut, params, trial.recordings)
    return cut, params


def _parts(
    model: nn.Module,
    structure: Structure,
    trial: Trial,
    spans: Sequence[tuple[int, int]],
    configs: Mapping[int, Any],
    traced: bool,
    router: Router | None,
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """Stages and parameters by the layers of each stage."""
    flow, inputs, layers = trial.flow, list(trial.recordings[0].inputs), trial.layers(structure)
    bounds = [layers[low - 1] + 1 for low, _ in spans[1:]]
    parts = parts_of(model, flow, len(inputs), bounds, trial.always)
    modules = [part_module(model, structure, flow, part, configs, router is None) for part in parts]
    names = [
        names_of(module, structure, flow, part) for module, part in zip(modules, parts, strict=True)
    ]
    owned = _claims(model, names)
    owner = flow.visits[layers[0]].unit.rpartition(".")[0].rpartition(".")[0]
    stages: list[Stage] = []
    for (low, high), module, claim, part in zip(spans, modules, owned, parts, strict=True):
        name = f"{type(model).__name__}[{low}:{high}]"
        fn = DecoderPart(
            module,
            claim,
            structure=structure,
            flow=flow,
            part=part,
            inputs=inputs,
            sides=trial.sides,
            always=trial.always,
            router=router,
            owner=owner,
            name=name,
        )
        units = {flow.visits[number].unit for number in range(part.first, part.stop)}
        has_experts = any(
            is_experts(m) for unit in units for m in model.get_submodule(unit).modules()
        )
        engine = "eager" if has_experts and not (traced and trial.traces) else None
        stages.append(
            fn.stage(
                claim.frozen,
                claim.ties,
                claim.weights,
                engine=engine,
                aux_loss=router is not None and fn.last,
            )
        )
    return stages, [claim.params for claim in owned]


def _claims(model: nn.Module, names: Sequence[list[str]]) -> list[Claim]:
    """The parameters of each stage; those that no stage uses are frozen ones of the first."""
    used = {weight.key for claim in claims(model, names) for weight in claim.weights.values()}
    unused = [name for name, _ in model.named_parameters() if name not in used]
    first, *others = claims(model, [[*names[0], *unused], *names[1:]])
    frozen = (*first.frozen, *(name for name in unused if name not in first.frozen))
    return [first._replace(frozen=frozen), *others]


def causal_loss(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """The loss of transformers' causal models: each position predicts the next label, in float32.

    It is a mean over the labels of a microbatch, and 0 where all are ignored. If microbatches have
    different numbers of labels, weight them in the pipeline:
    ``reduction=fpipe.weighted(lambda labels: (labels[:, 1:] != -100).sum())``.

    >>> float(causal_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])))
    1.386...
    """
    count = (labels[:, 1:] != ignore_index).sum()
    return causal_loss_sum(logits, labels, ignore_index) / count.clamp(min=1)


def causal_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """As :func:`causal_loss`, summed over labels: for ``reduction="sum"``.

    >>> float(causal_loss_sum(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])))
    2.772...
    """
    flat = logits[:, :-1].float().flatten(0, 1)
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")


def side_inputs(
    model: nn.Module,
    tokens: torch.Tensor,
    *,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Position ids and rotary embeddings of a batch, computed once for all stages; pass them as
    side inputs.

    Stages compute theirs if none are passed. Embeddings have one row for each row of ``tokens``, so
    that they are split like the batch.
    """
    rows, length = tokens.shape
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device).expand(rows, length)
    sides: dict[str, Any] = {"position_ids": position_ids}
    if attention_mask is not None:
        sides["attention_mask"] = attention_mask
    config: Any = model.config
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    inner = next(
        (m for m in model.modules() if any(child is embedding for child in m.children())), model
    )
    for rotary in filter(is_rotary, inner.children()):
        like = next(model.parameters()).detach()
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            types = sorted(set(config.layer_types))
            sides["position_embeddings"] = {
                name: rotary(like, position_ids, name) for name in types
            }
        else:
            sides["position_embeddings"] = rotary(like, position_ids)
    return sides


def trainer(
    model: nn.Module,
    n: int | None = None,
    *,
    microbatches: int,
    schedule: str | Schedule = "1F1B",
    group: Any = None,
    **options: Any,
) -> Callable[..., torch.Tensor]:
    """The ``training_step`` of a ``transformers.Trainer`` as a pipeline over the ranks of one
    process.

    Gradients go into ``.grad``, where the Trainer's optimizer, clipping and schedulers expect them.
    The loss is that of causal models: a mean over the labels of all accumulated batches. A Trainer
    takes every further process for a copy with other data, so the ranks must be those of this
    process.

    Args:
        model: the model that the Trainer has.
        n: how many stages.
        microbatches: how many parts of each batch; it must divide ``per_device_train_batch_size``.
        schedule: as for ``fpipe.pipeline``.
        group: ``fpipe.local(...)``, with the device of each rank where its layers are.
        options: further ones of :func:`stages`.

    Returns:
        a method for a subclass of Trainer.

    ```python
    class PipelineTrainer(transformers.Trainer):
        training_step = fpipe.interop.huggingface.trainer(model, 4, microbatches=8,
        group=fpipe.local(4))
    ```
    """
    bound, run = _bound(
        model, n, options, schedule=schedule, microbatches=microbatches, group=group
    )

    def training_step(
        self: Any, _: nn.Module, inputs: Mapping[str, Any], items: Any = None
    ) -> torch.Tensor:
        sides = {
            name: inputs[name]
            for name in ("attention_mask", "position_ids")
            if inputs.get(name) is not None
        }
        labels = inputs["labels"]
        loss, grads = run(bound.params, inputs["input_ids"], labels, **sides)
        if items is None:
            items = (labels[:, 1:] != -100).sum().clamp(
                min=1
            ) * self.current_gradient_accumulation_steps
        bound.add_grads([tree.tree_map(lambda grad: grad / items, own) for own in grads])
        return loss / items

    return training_step


def _bound(
    model: nn.Module, n: int | None, options: Mapping[str, Any], **more: Any
) -> tuple[Bound, Any]:
    """A model bound to stages, and the function that returns the sum of the losses of its labels
    and its gradients.
    """
    cut, params = stages(model, n, **options)
    bound = Bound([model] * len(cut), cut, [tuple(own) for own in params])
    pipe = pipeline(cut, loss=causal_loss_sum, reduction="sum", **more).train()
    if len(pipe.here) < pipe.stages:
        raise StageError(
            "a Trainer takes each process for a copy with other data, so all ranks must be in "
            "one: group=fpipe.local(4)"
        )
    return bound, value_and_grad(pipe)


def load(
    path: str | os.PathLike[str], pipe: Pipeline, *, dtype: torch.dtype | None = None
) -> list[Any]:
    """Parameters for a pipeline of :func:`stages` from the files of a model: each process reads its
    own tensors.

    The model may be on the device "meta" when it is cut. Tensors of single experts are joined as
    the stages have them. Every process calls it; other tensors than safetensors are not read.

    Args:
        path: a folder with safetensors files, as ``model.save_pretrained`` writes it, or one such
            file.
        pipe: the pipeline.
        dtype: convert floating tensors to it; by default those of the files must have the model's
            dtype.

    Returns:
        One dict per stage, ``None`` for stages of other processes.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape or dtype.

    ```python
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stages, _ = fpipe.interop.huggingface.stages(model, 4)
    pipe = fpipe.pipeline(stages, "1F1B", loss=fpipe.interop.huggingface.causal_loss,
    microbatches=8) params = fpipe.interop.huggingface.load("path/to/model", pipe)
    ```
    """
    return receive(pipe, lambda: model_files(path), dtype=dtype, strict=False)


def _first_layers(
    trial: Trial, model: nn.Module, layers: Sequence[int], n: int | None, cuts: Sequence[int] | None
) -> list[int]:
    """The layers that begin stages 1, 2, ...; ``len(layers)`` where the last stage is the head
    alone.
    """
    count = len(layers)
    if (n is None) == (cuts is None):
        raise StageError("say how many stages (n) or which layers begin them (cuts), one of both")
    if cuts is not None:
        edges = [0, *cuts]
        if any(not isinstance(c, int) or not 1 <= c <= count for c in cuts) or any(
            a >= b for a, b in pairwise(edges)
        ):
            raise StageError(f"cuts={list(cuts)!r}; give ascending layer indices from 1 to {count}")
        return list(cuts)
    if not isinstance(n, int) or not 1 <= n <= count + 1:
        raise StageError(f"n={n!r} stages of {count} layers and a head; give 1 to {count + 1}")
    sizes = [
        sum(p.numel() for p in model.get_submodule(visit.unit).parameters() if p.dim() > 1)
        for visit in trial.flow.visits
    ]
    return _even_starts([*(sizes[number] for number in layers), sum(sizes[layers[-1] + 1 :])], n)


def _even_starts(sizes: Sequence[int], n: int) -> list[int]:
    """Where parts 1, 2, ... of about equal size begin; none is empty.

    >>> _even_starts([1, 1, 1, 1, 4], 3)
    [2, 4]
    """
    ends = list(accumulate(sizes))
    middles = [end - size / 2 for end, size in zip(ends, sizes, strict=True)]
    starts = [0]
    for part in range(1, n):
        start = bisect_left(middles, ends[-1] * part / n)
        starts.append(min(max(start, starts[-1] + 1), len(sizes) - n + part))
    return starts[1:]


def _check_drops(model: nn.Module) -> None:
    drops = (getattr(m, "layerdrop", 0) for m in model.modules() if m.training)
    for drop in (d for d in drops if isinstance(d, float) and d > 0):
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: it drops layers at random in training "
            f"(layerdrop={drop}); "
            "build it with layerdrop=0.0, or write its stages as functions"
        )
