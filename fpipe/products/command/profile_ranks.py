# SPDX-License-Identifier: Apache-2.0
"""What each process of ``fpipe profile`` runs: a pipeline of plain blocks, or of a model from a
file.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ... import init, measure_costs, pipeline, profile, value_and_grad
from ...actions import Costs
from ...collectives import Group
from ...errors import StageError
from ...schedule import Schedule


def measure(
    schedule: Schedule, model: str | None, width: int, steps: int
) -> tuple[Costs, dict[str, float]]:
    """The costs, and the seconds of a step: the median of those measured, and simulated."""
    torch.set_num_threads(1)
    group = init()
    if model is None:
        build = partial(_blocks, width=width)
    else:
        build = _model(model)
    pipe, params, *batch = build(group, schedule)
    price = measure_costs(pipe, params, *batch, steps=steps)
    step = value_and_grad(pipe)
    step(params, *batch)
    profiled = profile(step, name=schedule.name)
    totals = []
    for _ in range(steps):
        group.barrier()
        profiled(params, *batch)
        totals.append(profiled.timeline.total)
    simulated = profiled.simulate(price).total
    return price, {"measured": median(totals), "simulated": simulated}


def _blocks(group: Group, schedule: Schedule, width: int) -> tuple[Any, ...]:
    """A pipeline of two blocks a stage: LayerNorm, Linear, GELU, Linear and a residual."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    module = block()

    def stage(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = x + functional_call(module, p, x)
        return x

    torch.manual_seed(0)
    params = [[block().state_dict() for _ in range(2)] for _ in range(schedule.stages)]
    x = torch.randn(schedule.microbatches, 64, width)
    pipe = pipeline([stage] * schedule.stages, schedule, loss=loss, group=group)
    return pipe, pipe.place(params), x, x


def _model(where: str) -> Callable[..., Any]:
    """The function named by --model."""
    file, _, name = where.rpartition(":")
    if not file.endswith(".py"):
        raise StageError(f"--model {where}: {file} is not a Python file; give FILE.py:FUNCTION")
    function = runpy.run_path(file, run_name="fpipe_profiled").get(name)
    if not callable(function):
        raise StageError(f"--model {where}: {file} has no function {name!r}; give FILE.py:FUNCTION")
    return function
