# SPDX-License-Identifier: Apache-2.0
"""Decoder-only causal models of the transformers package as pure stages.

This module must not know any family of models by name, and does not import transformers.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import StageError
from ..generators.balancing import estimate, spread
from ..running.pipeline import Pipeline
from ..saving.hub import fused
from ..saving.receive import receive, stored
from ..stage import Stage
from ._decoder import DecoderPart, decoder_of, is_rotary, router_of, with_stand_ins
from ._places import tensors_of
from ._pure import claims, is_experts
from ._verify import verify


def stages(
    model: nn.Module, n: int | None = None, *, cuts: Sequence[int] | None = None, experts: str | None = None,
    aux_loss: bool | None = None,
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:  # fmt: skip
    """Cut a causal language model into ``n`` stages; returns ``(stages, params)``.

    The first stage takes token ids, the last returns logits. Every stage takes ``attention_mask``, ``position_ids``
    and ``position_embeddings`` as side inputs, all of them optional and as the model's forward takes them (a mask
    of four axes, or a dict of them by layer type, is used as it is). Parameters keep the model's names; the stages know
    which are frozen or tied. Layers that the model checkpoints are recomputed in the backward.

    The stages are compared with the model on four tokens, and a model whose stages would compute something else is
    refused. A model on the device "meta" has no values to compare, which a warning says.

    Args:
        model: of the transformers package.
        n: how many stages; layers are distributed by their number of parameters, the head counted too.
        cuts: instead of ``n``, the indices of the layers that begin stages 1, 2, ...
        experts: the package's implementation of a mixture of experts; by default one that can be traced, if there is
            one, else the stages with experts run on ``engine="eager"``.
        aux_loss: whether the router's auxiliary loss joins the loss, with its coefficient and over all layers of all
            stages; by default the config's ``output_router_logits``.

    ```python
    model = transformers.AutoModelForCausalLM.from_config(config)
    stages, params = fpipe.interop.huggingface.stages(model, 4)
    pipe = fpipe.pipeline(stages, "1F1B", loss=fpipe.interop.huggingface.causal_loss, microbatches=8)
    ```
    """
    _, layers = decoder_of(model)
    spans = list(pairwise([0, *_first_layers(model, n, cuts), len(layers)]))
    config, traced = _config(model, experts)
    if aux_loss is None:
        aux_loss = bool(getattr(model.config, "output_router_logits", False))
    made, params = _parts(model, spans, config, traced, aux_loss)
    verify(model, made, params, [high for _, high in spans], config)
    return made, params


def _parts(
    model: nn.Module, spans: Sequence[tuple[int, int]], config: Any, traced: bool, aux_loss: bool
) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """Stages and parameters by the layers of each stage."""
    _, layers = decoder_of(model)
    router = router_of(model) if aux_loss else None
    alone = router is not None  # routers' logits are collected while each layer runs
    modules = [with_stand_ins(model, span, s == len(spans) - 1, config, not alone) for s, span in enumerate(spans)]
    owned = claims(model, [list(tensors_of(m)) for m in modules])
    missing = {name for name, _ in model.named_parameters()} - {group for claim in owned for group in claim.groups}
    if missing:
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: no stage uses {min(missing)!r}, because the list of layers "
            "does not separate what comes before from what comes after; write its stages as functions"
        )
    parts: list[Stage] = []
    for (low, high), module, claim in zip(spans, modules, owned, strict=True):
        last, name = len(parts) == len(spans) - 1, f"{type(model).__name__}[{low}:{high}]"
        part = DecoderPart(module, claim, span=(low, high), last=last, router=router, name=name)
        has_experts = any(is_experts(m) for layer in layers[low:high] for m in layer.modules())
        engine = "eager" if has_experts and not traced else None
        parts.append(part.stage(claim, engine=engine, aux_loss=aux_loss and last))
    return parts, [claim.params for claim in owned]


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The loss of transformers' causal models: each position predicts the next label, in float32.

    It is a mean over the labels of a microbatch, and 0 where all are ignored. If microbatches have different numbers of
    labels, weight them in the pipeline: ``reduction=fpipe.weighted(lambda labels: (labels[:, 1:] != -100).sum())``.

    >>> float(causal_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])))
    1.386...
    """
    count = (labels[:, 1:] != ignore_index).sum()
    return causal_loss_sum(logits, labels, ignore_index) / count.clamp(min=1)


def causal_loss_sum(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """As :func:`causal_loss`, summed over labels: for ``reduction="sum"``.

    >>> float(causal_loss_sum(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])))
    2.772...
    """
    flat = logits[:, :-1].float().flatten(0, 1)
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")


def side_inputs(
    model: nn.Module, tokens: torch.Tensor, *, attention_mask: Any = None, position_ids: torch.Tensor | None = None
) -> dict[str, Any]:
    """Position ids and rotary embeddings of a batch, computed once for all stages; pass them as side inputs.

    Stages compute theirs if none are passed. Embeddings have one row for each row of ``tokens``, so that they are split
    like the batch.
    """
    rows, length = tokens.shape
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device).expand(rows, length)
    sides: dict[str, Any] = {"position_ids": position_ids}
    if attention_mask is not None:
        sides["attention_mask"] = attention_mask
    config: Any = model.config
    for rotary in (child for child in decoder_of(model)[0].children() if is_rotary(child)):
        like = next(model.parameters()).detach()
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            types = sorted(set(config.layer_types))
            sides["position_embeddings"] = {name: rotary(like, position_ids, name) for name in types}
        else:
            sides["position_embeddings"] = rotary(like, position_ids)
    return sides


def load(path: str | os.PathLike[str], pipe: Pipeline, *, dtype: torch.dtype | None = None) -> list[Any]:
    """Parameters for a pipeline of :func:`stages` from the files of a model: each process reads its own tensors.

    The model may be on the device "meta" when it is cut. Tensors of single experts are joined as the stages have them.
    Every process calls it; other tensors than safetensors are not read.

    Args:
        path: a folder with safetensors files, as ``model.save_pretrained`` writes it, or one such file.
        pipe: the pipeline.
        dtype: convert floating tensors to it; by default those of the files must have the model's dtype.

    Returns:
        One dict per stage, ``None`` for stages of other processes.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape or dtype.

    ```python
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stages, _ = fpipe.interop.huggingface.stages(model, 4)
    pipe = fpipe.pipeline(stages, "1F1B", loss=fpipe.interop.huggingface.causal_loss, microbatches=8)
    params = fpipe.interop.huggingface.load("path/to/model", pipe)
    ```
    """
    return receive(pipe, lambda: fused(stored(path)), dtype=dtype, strict=False)


def _first_layers(model: nn.Module, n: int | None, cuts: Sequence[int] | None) -> list[int]:
    """The layers that begin stages 1, 2, ...; ``len(layers)`` where the last stage is the head alone."""
    inner, layers = decoder_of(model)
    count = len(layers)
    if (n is None) == (cuts is None):
        raise StageError("say how many stages (n) or which layers begin them (cuts), one of both")
    if cuts is not None:
        edges = [0, *cuts]
        if any(not isinstance(c, int) or not 1 <= c <= count for c in cuts) or any(a >= b for a, b in pairwise(edges)):
            raise StageError(f"cuts={list(cuts)!r}; give ascending layer indices from 1 to {count}")
        return list(cuts)
    if not isinstance(n, int) or not 1 <= n <= count + 1:
        raise StageError(f"n={n!r} stages of {count} layers and a head; give 1 to {count + 1}")
    head = sum(estimate(child) for child in model.children() if child is not inner)
    return list(spread([*map(estimate, layers), head], n)[1:])


def _config(model: nn.Module, experts: str | None) -> tuple[Any, bool]:
    """The config for the stages, and whether experts, if any, can be traced under it."""
    weights = [p for m in model.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(model, "set_experts_implementation"):
        return model.config, not weights
    grouped = all(p.dtype == torch.bfloat16 for p in weights)  # grouped products of other types cannot be traced
    chosen = experts or ("grouped_mm" if grouped else "batched_mm")
    config: Any = copy.copy(model.config)
    config._experts_implementation = chosen
    return config, chosen == "batched_mm" or (chosen == "grouped_mm" and grouped)
