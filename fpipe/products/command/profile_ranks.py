# SPDX-License-Identifier: Apache-2.0
"""What each process of ``fpipe profile`` runs: a pipeline of a small GPT, or of a model from a
file.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from ... import init, measure_costs, pipeline, profile, value_and_grad
from ...actions import Costs
from ...collectives import Group
from ...errors import StageError
from ...schedule import Schedule
from ..demo import Sizes, cross_entropy, gpt, sonnets


def measure(
    schedule: Schedule, model: str | None, width: int, steps: int
) -> tuple[Costs, dict[str, float]]:
    """The costs, and the seconds of a step: the median of those measured, and simulated."""
    torch.set_num_threads(1)
    group = init()
    if model is None:
        build = partial(_gpt, width=width)
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


def _gpt(group: Group, schedule: Schedule, width: int) -> tuple[Any, ...]:
    """A GPT of two blocks a stage, each with one head, on texts of 64 characters."""
    text = sonnets()
    sizes = Sizes(len(text.letters), width=width, heads=1, layers=2 * schedule.stages)
    functions, params = gpt(sizes, schedule.stages)
    pipe = pipeline(functions, schedule, loss=cross_entropy, group=group)
    return pipe, pipe.place(params), *text.batch(0, schedule.microbatches, sizes.length)


def _model(where: str) -> Callable[..., Any]:
    """The function named by --model."""
    file, _, name = where.rpartition(":")
    if not file.endswith(".py"):
        raise StageError(f"--model {where}: {file} is not a Python file; give FILE.py:FUNCTION")
    function = runpy.run_path(file, run_name="fpipe_profiled").get(name)
    if not callable(function):
        raise StageError(f"--model {where}: {file} has no function {name!r}; give FILE.py:FUNCTION")
    return function
