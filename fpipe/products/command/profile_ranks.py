# SPDX-License-Identifier: Apache-2.0
"""What each process of ``fpipe profile`` runs: a pipeline of plain blocks, or of a model from a
file.
"""

from __future__ import annotations

import runpy
import time
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ... import init, measure_costs, pipeline, value_and_grad
from ... import profile as profiled
from ...actions import Costs, Timeline
from ...errors import StageError
from ...schedule import Schedule


def measure(
    schedule: Schedule, model: str | None, sizes: tuple[int, int, int], steps: int
) -> tuple[Costs, Timeline, Timeline, float]:
    """The costs, the measured step of median length, its simulation, and the median time of a
    step.
    """
    torch.set_num_threads(1)
    group = init()
    pipe, params, *batch = (
        _blocks(group, schedule, *sizes) if model is None else _model(model)(group, schedule)
    )
    price = measure_costs(pipe, params, *batch, steps=steps)
    step = value_and_grad(pipe)
    step(params, *batch)
    walls, profiles = [], []
    for _ in range(steps):
        group.barrier()
        start = time.perf_counter()
        step(params, *batch)
        walls.append(time.perf_counter() - start)
        profiles.append(profiled(step, name=schedule.name))
        profiles[-1](params, *batch)
    middle = sorted(profiles, key=lambda each: each.timeline.total)[len(profiles) // 2]
    return price, middle.timeline, middle.simulate(price), median(walls)


def _blocks(
    group: Any, schedule: Schedule, width: int, tokens: int, blocks: int
) -> tuple[Any, ...]:
    """A pipeline of blocks of LayerNorm, Linear, GELU, Linear and a residual."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    pure = block()

    def stage(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = x + functional_call(pure, p, x)
        return x

    torch.manual_seed(0)
    params = [[block().state_dict() for _ in range(blocks)] for _ in range(schedule.stages)]
    x = torch.randn(schedule.microbatches, tokens, width)
    pipe = pipeline(
        [stage] * schedule.stages, schedule, loss=lambda y, t: (y - t).square().mean(), group=group
    )
    return pipe, pipe.place(params), x, x


def _model(where: str) -> Any:
    """The function named by --model."""
    file, _, name = where.rpartition(":")
    if not file.endswith(".py"):
        raise StageError(f"--model {where}: {file} is not a Python file; give FILE.py:FUNCTION")
    function = runpy.run_path(file, run_name="fpipe_profiled").get(name)
    if not callable(function):
        raise StageError(f"--model {where}: {file} has no function {name!r}; give FILE.py:FUNCTION")
    return function
