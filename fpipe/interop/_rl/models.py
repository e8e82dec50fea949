# SPDX-License-Identifier: Apache-2.0
"""Models of transformers for an engine: loaded, given adapters, and cut into stages.

This module must not know trainers. transformers and peft are imported when they are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import Pipeline
from ...errors import CheckpointError, StageError
from ...saving import model_files
from ...stage import Engine, Stage
from .. import huggingface

#: Keyword arguments of ``from_pretrained`` and the like.
Options = Mapping[str, Any]


class Cut(NamedTuple):
    """A model as stages, with what exports need to know of it.

    ``aliases`` are other names of a tied parameter by its first name. ``scaling`` is the factor of
    the LoRA adapters of each layer that has some, by the layer's name.
    """

    model: nn.Module
    stages: list[Stage]
    params: list[dict[str, Tensor]]
    aliases: Mapping[str, Sequence[str]]
    scaling: Mapping[str, float]

    @property
    def moded(self) -> bool:
        """Whether the model computes something else in training: it has dropout that is not 0."""
        rates = [value for name, value in vars(self.model.config).items() if "drop" in name]
        rates += [module.p for module in self.model.modules() if isinstance(module, nn.Dropout)]
        return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def load(
    path: str,
    config: Any,
    dtype: torch.dtype,
    *,
    values: bool = False,
    attention: str,
    trust: bool,
    empty: bool = False,
) -> nn.Module:
    """Return a causal language model, or one with a value for each token, on the host.

    Args:
        path: of the model's folder.
        config: of the model.
        dtype: of its parameters.
        values: whether the head returns one value for each token.
        attention: the implementation of attention.
        trust: whether code in the folder may run.
        empty: whether parameters stay on the device "meta", for ``huggingface.load``.
    """
    import transformers

    if values:
        kind = transformers.AutoModelForTokenClassification
        rates = ("classifier_dropout", "hidden_dropout", "summary_dropout_prob")
        for name, value in {"num_labels": 1, **dict.fromkeys(rates, 0.0)}.items():
            setattr(config, name, value)
    else:
        kind = transformers.AutoModelForCausalLM
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": trust}
    if not empty:
        model = kind.from_pretrained(path, config=config, **options)
        return nn.Module.to(model, dtype).train()  # some parameters may have another dtype
    with import_module("accelerate").init_empty_weights(include_buffers=False):
        model = kind.from_config(config, **options)
    model.tie_weights()
    return nn.Module.train(model)


def has_files(path: str, model: nn.Module) -> bool:
    """Return whether the safetensors files in a folder have all parameters of a model, a tied one
    under one of its names.
    """
    try:
        names = model_files(path).keys()
    except CheckpointError:
        return False
    return names >= {name for name, _ in model.named_parameters()}


def read(path: str, pipe: Pipeline, dtype: torch.dtype) -> list[Any]:
    """Return the parameters of the stages here (with ``zero=``, the parts here) from the files of a
    model.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*no stage takes"
        )  # as a head that is tied to the embedding
        return huggingface.load(path, pipe, dtype=dtype)


def add_adapters(model: nn.Module, options: Options, path: str | None = None) -> None:
    """Add LoRA adapters to a model: new ones with the options of ``LoraConfig``, or those in a
    folder.
    """
    peft = import_module("peft")
    if path is not None:
        peft.PeftModel.from_pretrained(model, path, is_trainable=True)
        return
    config = peft.LoraConfig(task_type=peft.TaskType.CAUSAL_LM, bias="none", **options)
    adapted = peft.get_peft_model(model, config)
    dtype = next(p.dtype for p in adapted.parameters() if not p.requires_grad)
    for p in adapted.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)


def with_merged_adapters(
    named: Iterable[tuple[str, Tensor]], scaling: Mapping[str, float]
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of the model with its LoRA adapters added to them, by the names that the
    model had without adapters.

    Args:
        named: tensors by name, those of a layer one after another.
        scaling: of the adapters of each layer, by the layer's name.

    >>> rows = {"base_layer.weight": torch.ones(2, 2), "lora_A.default.weight": torch.ones(1, 2),
    ...         "lora_B.default.weight": torch.ones(2, 1)}
    >>> list(with_merged_adapters([(f"q.{n}", t) for n, t in rows.items()], {"q": 3.0}))
    [('q.weight', tensor([[4., 4.],
            [4., 4.]]))]
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        layer = next((adapted for adapted in scaling if name.startswith(f"{adapted}.")), None)
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


def cut(
    model: Any,
    n: int,
    *,
    cuts: Sequence[int] | None = None,
    engine: Engine | None = None,
    checkpointing: bool = False,
) -> Cut:
    """Return a model as ``n`` stages.

    Args:
        model: a causal language model, without the wrapper of adapters.
        n: how many stages.
        cuts: the layers that begin stages 1, 2, ..., instead of stages of like sizes.
        engine: of the stages, where they name none themselves.
        checkpointing: whether layers are computed again in the backward.

    Raises:
        StageError: if the model cannot be cut so.
    """
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cuts is not None and len(cuts) != n - 1:
        raise StageError(
            f"cuts={list(cuts)} make {len(cuts) + 1} stages, and the schedule has {n}; give "
            f"{n - 1} cuts"
        )
    stages, params = huggingface.stages(model, n if cuts is None else None, cuts=cuts)
    stages = [replace(stage, engine=stage.engine or engine) for stage in stages]
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    aliases = {first: others for first, *others in names.values() if others}
    scaling = {
        name: part.scaling["default"]
        for name, part in model.named_modules()
        if hasattr(part, "lora_A")
    }
    return Cut(model, stages, params, aliases, scaling)
