# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own trainer on a pipeline of fpipe: the function of a train spec that builds it.

A configuration is any object with torchtitan's ``parallelism`` and ``training`` sections. This
module reads their attributes. torchtitan itself, which divides the layers, is imported by a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import make_schedule
from ..errors import BatchError, StageError, UnsupportedError
from ..schedule import Schedule


class Settings(NamedTuple):
    """The schedule of a configuration, and the names of the submodules of each stage."""

    schedule: Schedule
    parts: tuple[tuple[str, ...], ...]


def settings(model: nn.Module, job_config: Any) -> Settings:
    """Return the schedule and the submodules of each stage, from a configuration.

    It reads ``pipeline_parallel_schedule`` (or ``_schedule_csv``), ``pipeline_parallel_degree``,
    ``_layers_per_stage``, ``_first_stage_less_layers``, ``_last_stage_less_layers``,
    ``_microbatch_size``, ``module_fqns_per_model_part`` and ``local_batch_size``.
    """
    section = job_config.parallelism
    ranks = section.pipeline_parallel_degree
    csv = section.pipeline_parallel_schedule_csv
    batch = job_config.training.local_batch_size
    size = section.pipeline_parallel_microbatch_size
    if size < 1 or batch % size:
        raise BatchError(
            f"local_batch_size={batch} is no multiple of "
            f"pipeline_parallel_microbatch_size={size}; change one of them"
        )
    blocks = getattr(model, "layers", None)
    if not isinstance(blocks, (nn.ModuleList, nn.ModuleDict)):
        raise StageError(
            f"{type(model).__name__} has no `layers` as torchtitan's models have; use "
            "fpipe.from_module"
        )
    layers = len(blocks)
    microbatches = batch // size
    parts = section.module_fqns_per_model_part
    less = (
        section.pipeline_parallel_first_stage_less_layers,
        section.pipeline_parallel_last_stage_less_layers,
    )
    per_stage = section.pipeline_parallel_layers_per_stage
    stages = len(parts) if parts else None  # by default those of the schedule
    if not parts and per_stage is not None:
        stages = -(-(layers + sum(less)) // per_stage)
        if stages % ranks:
            raise StageError(
                f"{layers} layers (and {sum(less)} for the embedding and the head) at "
                f"pipeline_parallel_layers_per_stage={per_stage} make {stages} stages, which "
                f"{ranks} ranks do not divide; change the layers per stage"
            )
    if csv:
        schedule = Schedule.from_csv(csv)
        for name, configured, actual in (
            ("pipeline_parallel_degree", ranks, schedule.ranks),
            ("microbatches", microbatches, schedule.microbatches),
            ("stages", stages, schedule.stages),
        ):
            if configured not in (None, actual):
                raise StageError(
                    f"the schedule file is for {name} {actual}, the configuration says "
                    f"{configured}; make both agree"
                )
    else:
        schedule = make_schedule(section.pipeline_parallel_schedule, ranks, microbatches, stages)
    if not parts:
        theirs = import_module("torchtitan.distributed.pipeline_parallel")
        parts = theirs.generate_llm_fqn_per_model_part(schedule.stages, layers, *less)
    _check_names(model, parts)
    return Settings(schedule, tuple(map(tuple, parts)))


def _check_names(model: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    """Raise StageError for a stage without submodules, or with names that are none."""
    submodules = {name for name, _ in model.named_modules()}
    for stage, part in enumerate(parts):
        if not part or not submodules.issuperset(part):
            raise StageError(
                f"module_fqns_per_model_part[{stage}] is {list(part)}; name submodules of the "
                "model, one at least"
            )


def pipelining_fn(
    model: nn.Module,
    parallel_dims: Any,
    job_config: Any,
    device: torch.device,
    model_args: object,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., torch.Tensor],
) -> tuple[object, list[nn.Module], bool, bool]:
    """torchtitan's ``TrainSpec.pipelining_fn``: its own trainer, unchanged, trains on fpipe.

    The schedule, by a name of fpipe's catalogue or from a file, and the submodules of each stage
    come from the configuration as for :func:`settings`. ``parallelize_fn`` is applied to each part,
    for activation checkpointing and torch.compile. The parts are modules on "meta" until the
    trainer initializes them.

    Returns:
        ``(schedule, model_parts, has_first_stage, has_last_stage)``.

    Raises:
        UnsupportedError: with data parallel axes or tied embeddings, which torchtitan applies
            inside the parts.
        StageError: if the configuration does not fit the model.

    ```python
    spec = torchtitan.protocols.train_spec.get_train_spec("llama3")
    register_train_spec("llama3_fpipe", replace(spec,
    pipelining_fn=fpipe.interop.torchtitan.pipelining_fn))
    ```
    """
    from .pipelining import PipelineStage  # torch's package takes a second to import
    from .pipelining.schedules import _PipelineScheduleRuntime

    for axis in ("dp_replicate", "dp_shard", "cp"):
        if getattr(parallel_dims, axis, 1) > 1:
            raise UnsupportedError(
                f"{axis} is not supported beside a pipeline of fpipe here; set its degree to 1"
            )
    if getattr(model_args, "enable_weight_tying", False):
        raise UnsupportedError(
            "enable_weight_tying is not supported here: torchtitan ties embedding and head inside "
            "each part, and they are in different stages; set it to False, or use "
            "fpipe.from_module, which keeps ties across stages"
        )
    schedule, names = settings(model, job_config)
    mesh = parallel_dims.get_mesh("pp")
    local = schedule.placement.stages_of(mesh.get_local_rank())
    parts = [
        parallelize_fn(_pruned(model, names[stage]), parallel_dims, job_config) for stage in local
    ]
    stages = [
        PipelineStage(part, stage, schedule.stages, device, group=mesh.get_group())
        for stage, part in zip(local, parts, strict=True)
    ]

    @wraps(loss_fn)
    def loss(*args: object, **keywords: object) -> torch.Tensor:
        # the trainer prints the sum over microbatches
        return loss_fn(*args, **keywords) / schedule.microbatches

    runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss, scale_grads=False)
    runtime.take_schedule(schedule)
    return runtime, parts, 0 in local, schedule.stages - 1 in local


def _pruned(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a copy of a model with these submodules alone; lists keep their layers by name, others
    become None.
    """
    part = copy.deepcopy(model)
    for name, child in part.named_children():
        rows = {key: layer for key, layer in child.named_children() if f"{name}.{key}" in names}
        if isinstance(child, nn.ModuleDict):
            kept = nn.ModuleDict(rows)
        elif isinstance(child, nn.ModuleList):
            kept = nn.ModuleList(rows.values())
        else:
            kept = child if name in names else None
        setattr(part, name, kept)
    return part
