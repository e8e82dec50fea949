# SPDX-License-Identifier: Apache-2.0
"""Weights for an engine that generates text: whole tensors by their names in the model, on all
ranks in one order.

This module must not know trainers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ... import Pipeline, stream

Named: TypeAlias = Iterable[tuple[str, Tensor]]


def exported(
    pipe: Pipeline, values: Sequence[Any], aliases: Mapping[str, Sequence[str]], bucket_bytes: int
) -> Named:
    """Return all parameters, a tied one under each of its names.

    Args:
        pipe: the pipeline.
        values: the parameters, one entry per stage; parts with ``zero=``.
        aliases: other names of tied parameters, by the first.
        bucket_bytes: the memory for tensors of other ranks.
    """
    for name, tensor in stream(pipe, values, bucket_bytes):
        yield name, tensor
        for other in aliases.get(name, ()):
            yield other, tensor


def adapters(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of LoRA adapters alone, by the names that peft saves them under.

    >>> list(adapters([("q.base_layer.weight", 0), ("q.lora_A.default.weight", 1)]))
    [('base_model.model.q.lora_A.weight', 1)]
    """
    for name, tensor in named:
        if ".lora_" in name:
            yield "base_model.model." + name.replace(".default", "", 1), tensor


def without_adapters(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of the model below its adapters.

    >>> list(without_adapters([("q.base_layer.weight", 0), ("q.lora_A.default.weight", 1)]))
    [('q.base_layer.weight', 0)]
    """
    return ((name, tensor) for name, tensor in named if ".lora_" not in name)


def with_merged_adapters(
    named: Named, scaling: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of the model with its adapters added to them, by the names that the model
    had without adapters.

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
        part = name.removeprefix(f"{layer}.").partition(".")[0]
        if layer is None or name.endswith("base_layer.bias"):
            yield name.replace(".base_layer", ""), tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 3:
            base, a, b = parts["base_layer"], parts["lora_A"], parts["lora_B"]
            del waiting[layer], parts
            yield f"{layer}.weight", base + (b @ a).to(base.dtype) * scaling[layer]
