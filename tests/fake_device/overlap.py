"""How much of the links is hidden: ``python -m tests.fake_device.overlap``.

Two processes, kernels of 20 ms for a forward and 40 ms for a backward, and a link that takes 10 ms
a message. Prints the time of a step by the clock of the devices, with the link and without, beside
the simulated ones. With nothing hidden each message would add its link to the time of its receiver.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

import fpipe

from .loader import NAME
from .test_processes import prepare

FORWARD, LINK, MICROBATCHES = 0.02, 0.01, 8
SPLIT = (("ZBH1", 2), ("ZBH2", 2), ("ZBV", 4))


class Work(torch.autograd.Function):
    """A computation of the input that takes a while, as its backward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.get_device_module(NAME).sleep(FORWARD)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        torch.get_device_module(NAME).sleep(FORWARD)
        return grads[0] * 1


class Weight(torch.autograd.Function):
    """A parameter whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor) -> torch.Tensor:
        return p * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        torch.get_device_module(NAME).sleep(FORWARD)
        return grads[0] * 1


def stage(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Work.apply(x) + Weight.apply(p)  # type: ignore[no-any-return]


def timed(link: float, name: str, stages: int) -> list[float]:
    """The seconds of some steps of this rank, from its first kernel to its last."""
    device = prepare("", link)
    group = fpipe.init()
    pipe = fpipe.pipeline(
        [stage] * stages,
        fpipe.make_schedule(name, 2, MICROBATCHES, stages),
        loss=torch.sum,
        group=group,
        engine="eager",
    )
    params = pipe.place([torch.ones(())] * stages)
    x = torch.ones(MICROBATCHES, 4)
    times = []
    for _ in range(4):
        group.barrier()
        first, last = (torch.Event(NAME, enable_timing=True) for _ in range(2))
        first.record()
        fpipe.value_and_grad(pipe)(params, x)
        last.record()
        device.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return times[1:]


def simulated(link: float, name: str, stages: int) -> float:
    """The seconds of a step by the simulator."""
    costs = fpipe.Costs(F=FORWARD, B=2 * FORWARD, I=FORWARD, W=FORWARD, comm=link)
    return fpipe.make_schedule(name, 2, MICROBATCHES, stages).simulate(costs).total


def main() -> None:
    """Print a row for each schedule."""
    for name, stages in (
        ("GPipe", 2),
        ("1F1B", 2),
        ("Eager1F1B", 2),
        ("Interleaved1F1B", 4),
        *SPLIT,
    ):
        row = []
        for link in (0.0, LINK):
            ranks = fpipe.launch(timed, link, name, stages, ranks=2, timeout=300)
            row += [max(map(median, ranks)), simulated(link, name, stages)]
        bare, bare_simulated, measured, expected = row
        print(
            f"{name:16} without {bare:.3f} ({bare_simulated:.3f} simulated), "
            f"with {measured:.3f} ({expected:.3f}); the links add {measured - bare:.3f}, of "
            f"{expected - bare_simulated:.3f} that the schedule cannot hide"
        )


if __name__ == "__main__":
    main()
