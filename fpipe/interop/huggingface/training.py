# SPDX-License-Identifier: Apache-2.0
"""What training a causal model of transformers needs: losses, a step of a Trainer, and weights
from its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import Pipeline, Schedule, pipeline, receive, tree, value_and_grad
from ...collectives import Group
from ...errors import StageError
from ...saving import model_files
from ...tree import Tree
from ..binding import Bound, ByStage
from .splitting import stages


def causal_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the loss of transformers' causal models: each position predicts the next label, in
    float32.

    It is a mean over the labels of a microbatch, and 0 where all are ignored. If microbatches have
    different numbers of labels, weight them in the pipeline:
    ``reduction=fpipe.weighted(lambda labels: (labels[:, 1:] != -100).sum())``.

    >>> float(causal_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])))
    1.386...
    """
    count = (labels[:, 1:] != ignore_index).sum()
    return causal_loss_sum(logits, labels, ignore_index) / count.clamp(min=1)


def causal_loss_sum(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """As :func:`causal_loss`, summed over labels: for ``reduction="sum"``.

    >>> float(causal_loss_sum(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])))
    2.772...
    """
    flat = logits[:, :-1].float().flatten(0, 1)
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")


def trainer(
    model: nn.Module,
    n: int | None = None,
    *,
    microbatches: int,
    schedule: str | Schedule = "1F1B",
    group: Group | None = None,
    **options: Any,
) -> Callable[..., Tensor]:
    """Return the ``training_step`` of a ``transformers.Trainer`` as a pipeline over ranks of one
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

    Raises:
        StageError: if stages would be on other processes.

    ```python
    class PipelineTrainer(transformers.Trainer):
        training_step = fpipe.interop.huggingface.trainer(model, 4, microbatches=8,
        group=fpipe.local(4))
    ```
    """
    cut, params = stages(model, n, **options)
    bound = Bound([model] * len(cut), cut, params)
    pipe = pipeline(
        cut,
        schedule,
        loss=causal_loss_sum,
        reduction="sum",
        microbatches=microbatches,
        group=group,
    ).train()
    if len(pipe.here) < pipe.stages:
        raise StageError(
            "a Trainer takes each process for a copy with other data, so all ranks must be in "
            "one: group=fpipe.local(4)"
        )
    step = value_and_grad(pipe)

    def training_step(
        self: Any,
        _: nn.Module,
        inputs: Mapping[str, Tensor],
        items: int | Tensor | None = None,
    ) -> Tensor:
        names = ("attention_mask", "position_ids")
        sides: dict[str, Tree] = {n: inputs[n] for n in names if inputs.get(n) is not None}
        labels = inputs["labels"]
        loss, grads = step(bound.params, inputs["input_ids"], labels, **sides)
        if items is None:
            counted = (labels[:, 1:] != -100).sum().clamp(min=1)
            items = counted * self.current_gradient_accumulation_steps
        bound.add_grads([tree.tree_map(lambda grad: grad / items, row) for row in grads])
        return loss / items

    return training_step


def load(
    path: str | os.PathLike[str], pipe: Pipeline, *, dtype: torch.dtype | None = None
) -> ByStage:
    """Return parameters for a pipeline of :func:`stages` from the files of a model.

    Each process reads its own tensors. The model may be on the device "meta" when it is cut.
    Tensors of single experts are joined as the stages have them. Every process calls it; other
    tensors than safetensors are not read.

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
    loss = fpipe.interop.huggingface.causal_loss
    pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=8)
    params = fpipe.interop.huggingface.load("path/to/model", pipe)
    ```
    """
    return receive(pipe, lambda: model_files(path), dtype=dtype, strict=False)
