# SPDX-License-Identifier: Apache-2.0
"""Weights for an engine that generates text: whole tensors by their names in the model, on all
ranks in one order.

This module must not know trainers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from ... import Pipeline, stream
from .weights import ByStage

Named: TypeAlias = Iterable[tuple[str, Tensor]]


def exported(
    pipe: Pipeline, values: ByStage, aliases: Mapping[str, Sequence[str]], bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Return all parameters, a tied one under each of its names.

    Args:
        pipe: the pipeline.
        values: the parameters, one entry per stage; parts with ``zero=``.
        aliases: other names of tied parameters, by the first.
        bucket_bytes: the memory for tensors of other ranks.
    """
    for name, tensor in stream(pipe, values, bucket_bytes):
        for alias in (name, *aliases.get(name, ())):
            yield alias, tensor


def with_merged_adapters(
    named: Named, scaling: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of the model with its LoRA adapters added to them, by the names that the
    model had without adapters.

    Args:
        named: tensors by name, those of a layer one after another.
        scaling: of the adapters of each layer, by the layer's name.

    >>> import torch
    >>> rows = {"base_layer.weight": torch.ones(2, 2), "lora_A.default.weight": torch.ones(1, 2),
    ...         "lora_B.default.weight": torch.ones(2, 1)}
    >>> list(with_merged_adapters([(f"q.{n}", t) for n, t in rows.items()], {"q": 3.0}))
    [('q.weight', tensor([[4., 4.],
            [4., 4.]]))]
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        layer = next((known for known in scaling if name.startswith(f"{known}.")), None)
        if layer is None or name.endswith("base_layer.bias"):
            yield name.replace(".base_layer", ""), tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[name.removeprefix(f"{layer}.").partition(".")[0]] = tensor
        if len(parts) == 3:
            del waiting[layer]
            base = parts["base_layer"]
            update = parts["lora_B"] @ parts["lora_A"]
            yield f"{layer}.weight", base + update.to(base.dtype) * scaling[layer]
