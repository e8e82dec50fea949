"""Stages that sleep instead of computing, so that their durations are known on a busy machine too."""

from __future__ import annotations

import time
from typing import Any

import torch

import fpipe
from fpipe.running.profile.profiling import Measuring

UNIT = 0.05  #: seconds; long beside the pauses of a loaded machine
LATE, ATTEMPTS = 0.01, 3  #: naps that end later are those of a busy machine, on which the step is measured again


def sleep(seconds: float) -> None:
    """Sleep, and note how much later than asked it ended."""
    begin = time.perf_counter()
    time.sleep(seconds)
    Nap.late = max(Nap.late, time.perf_counter() - begin - seconds)


class Nap(torch.autograd.Function):
    """Sleeps one unit forwards and two backwards."""

    late = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, units: float) -> torch.Tensor:
        ctx.units = units
        sleep(units * UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(2 * ctx.units * UNIT)
        return grad.clone(), None


def short(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Nap.apply(x * p, 1.0)


def long(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Nap.apply(x * p, 2.0)


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def measured(microbatches: int, folder: str) -> dict[str, Any]:
    """Profile a step of 1F1B on each rank; return timelines and costs. Rank 0 saves the pictures."""
    group = fpipe.init()
    pipe = fpipe.pipeline([short, long], "1F1B", loss=loss, microbatches=microbatches, group=group, engine="eager")
    params, x = pipe.place([torch.ones(())] * 2), torch.ones(microbatches)
    step = fpipe.value_and_grad(pipe)
    plain = step(params, x)
    for _ in range(ATTEMPTS):
        Nap.late = 0.0
        profiled = fpipe.profile(step, name="naps")
        result = profiled(params, x)
        measuring = Measuring(pipe, params, x)
        measuring.step()
        if max(group.gather_objects(Nap.late)) < LATE:
            break
    if group.here[0] == 0:
        profiled.save(f"{folder}/naps.html")
        profiled.save(f"{folder}/naps.json")
    return {
        "same": torch.equal(plain[0], result[0]), "timeline": profiled.timeline, "simulated": profiled.simulated,
        "costs": profiled.costs, "measured": measuring.costs(), "text": str(profiled),
    }  # fmt: skip
