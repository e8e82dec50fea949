"""Stages that sleep instead of computing, so that their durations are known on a busy machine
too.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import fpipe
from fpipe.passes.profile.profiling import Measuring

UNIT = 0.05  #: seconds; long beside the pauses of a loaded machine


class Nap(torch.autograd.Function):
    """Sleeps one unit forwards and two backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, units: float) -> torch.Tensor:
        ctx.units = units
        time.sleep(units * UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.units * UNIT)
        return grad.clone(), None


def short(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Nap.apply(x * p, 1.0)


def long(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Nap.apply(x * p, 2.0)


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def measured(microbatches: int, folder: str) -> dict[str, Any]:
    """Profile a step of 1F1B on each rank; return timelines and costs. Rank 0 saves the
    pictures.
    """
    group = fpipe.init()
    pipe = fpipe.pipeline(
        [short, long], "1F1B", loss=loss, microbatches=microbatches, group=group, engine="eager"
    )
    params, x = pipe.place([torch.ones(())] * 2), torch.ones(microbatches)
    step = fpipe.value_and_grad(pipe)
    plain = step(params, x)
    profiled = fpipe.profile(step, name="naps")
    result = profiled(params, x)
    measuring = Measuring(pipe, params, x)
    measuring.step()
    if group.here[0] == 0:
        profiled.save(f"{folder}/naps.html")
        profiled.save(f"{folder}/naps.json")
    return {
        "same": torch.equal(plain[0], result[0]),
        "timeline": profiled.timeline,
        "simulated": profiled.simulated,
        "costs": profiled.costs,
        "measured": measuring.costs(),
        "text": str(profiled),
        "whole and split": [each.timeline for each in measuring._profiles],
    }
