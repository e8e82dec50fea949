"""The ready order beside the order of rows: simulated with random times, and measured.

The measured stages sleep for the times that the simulation draws, so a busy machine has little
influence. Messages go through the memory that the processes share.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import fpipe
from fpipe.passes.ready.simulated import _Run
from fpipe.schedule import Schedule

UNIT = 0.1  #: seconds that the forwards of a rank take at the median, for a microbatch
JITTER = 0.3
SIMULATED = ("1F1B", "ZBV")
MEASURED = ("1F1B", "ZBV")


def simulated(seeds: int = 10) -> list[dict[str, Any]]:
    """Of 8 ranks and 32 microbatches: the time of the ready order, as a part of that of the row.

    F, I and W of a rank take 1 each.
    """
    rows = []
    for name in SIMULATED:
        schedule = fpipe.make_schedule(name, ranks=8, microbatches=32)
        time_of = schedule.ranks / schedule.stages
        for comm in (0.0, 0.5, 1.0):
            costs = fpipe.Costs(F=time_of, I=time_of, W=time_of, comm=comm)
            row: dict[str, Any] = {"schedule": name, "comm": comm}
            for jitter in (0.0, JITTER):
                totals = {
                    order: sum(
                        schedule.simulate(costs, jitter=jitter, seed=seed, order=order).total
                        for seed in range(seeds)
                    )
                    for order in ("row", "ready")
                }
                row[f"jitter {jitter}"] = round(totals["ready"] / totals["row"], 3)
            rows.append(row)
    return rows


class Nap(torch.autograd.Function):
    """Sleeps for the time of F and I of a microbatch, whose number is the value of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int, times: Any) -> torch.Tensor:
        ctx.number, ctx.times = number, times
        time.sleep(times["F", number])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        time.sleep(ctx.times["I", ctx.number])
        (grad,) = grads
        return grad.clone(), None, None


class Weight(torch.autograd.Function):
    """Sleeps for the time of W."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, number: int, times: Any) -> torch.Tensor:
        ctx.number, ctx.times = number, times
        return p.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        time.sleep(ctx.times["W", ctx.number])
        (grad,) = grads
        return grad.clone(), None, None


def nap(p: torch.Tensor, x: torch.Tensor, times: Any) -> torch.Tensor:
    """A stage that sleeps. Its parameter is zero, so the output is the input."""
    number = int(x.flatten()[0])
    return Nap.apply(x, number, times) + Weight.apply(p, number, times)  # type: ignore[no-any-return]


def naps(schedule: Schedule, seed: int, unit: float) -> list[Any]:
    """A stage for each one of a schedule, which sleeps as long as the simulation draws; ``unit``
    are the seconds of an action.
    """
    run = _Run(schedule._inspection, fpipe.Costs(), JITTER, seed)
    times: list[dict[Any, float]] = [{} for _ in range(schedule.stages)]
    for rank in run.ranks:
        for action, (factor, _) in zip(rank.row, rank.factors, strict=True):
            for part in action.parts:
                for op in "IW" if part.op == "B" else part.op:
                    times[part.stage][op, part.microbatch] = unit * factor
    return [lambda p, x, of=of: nap(p, x, of) for of in times]


def loss(y: torch.Tensor) -> torch.Tensor:
    """The sum of the output."""
    return y.sum()


def measured(name: str, microbatches: int, seed: int) -> dict[str, float]:
    """The seconds of a step in each order, on the ranks of the job."""
    group = fpipe.init()
    schedule = fpipe.make_schedule(name, ranks=group.size, microbatches=microbatches)
    stages = naps(schedule, seed, UNIT * schedule.ranks / schedule.stages)
    x = torch.arange(float(microbatches)).repeat_interleave(2)
    result = {}
    for order in ("row", "ready"):
        pipe = fpipe.pipeline(
            stages, schedule, loss=loss, group=group, engine="eager", order=order, seed=0
        )
        params = pipe.place([torch.zeros(()) for _ in stages])
        step = fpipe.value_and_grad(pipe)
        step(params, x)
        times = []
        for _ in range(3):
            group.barrier()
            start = time.perf_counter()
            step(params, x)
            group.barrier()
            times.append(time.perf_counter() - start)
        result[order] = min(times)
    return result


def main() -> None:
    """Print both tables."""
    for row in simulated(3):
        print(row)
    for name in MEASURED:
        for seed in range(3):
            schedule = fpipe.make_schedule(name, ranks=4, microbatches=16)
            results = fpipe.launch(measured, name, 16, seed, ranks=4)
            unit = UNIT * schedule.ranks / schedule.stages
            line = {"schedule": name, "seed": seed}
            for order in ("row", "ready"):
                total = schedule.simulate(jitter=JITTER, seed=seed, order=order).total * unit
                seconds = max(result[order] for result in results)
                line[order] = f"{seconds:.3f} s measured, {total:.3f} s simulated"
            print(line)


if __name__ == "__main__":
    main()
