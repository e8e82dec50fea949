"""Microbatches that come late: rollouts that arrive at random over a window as long as a step.

On four processes, stages sleep and then compute, so a busy machine has little influence. The first
rollout is there at once, the others at random times, drawn by each seed. Measured is the time from
the first rollout to the end of the step: where the step waits for all rollouts, and where
``fpipe.Microbatches(iterator, count=)`` takes each as it arrives. The bits must be the same.

    python -m benchmarks.bench_late [--seeds 7] [--microbatches 16] [--milliseconds 40]
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

import fpipe
from benchmarks.command import options, save

RANKS = 4
#: A schedule, an order, and whether its window is the whole row. With the default window the first
#: backward of GPipe waits for the last rollout.
WAYS = (
    ("1F1B", "row", False),
    ("1F1B", "ready", False),
    ("ZBV", "row", False),
    ("ZBV", "ready", False),
    ("GPipe", "row", False),
    ("GPipe", "ready", True),
)


class Nap(torch.autograd.Function):
    """Sleeps for a unit forwards, and for two backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        (grad,) = grads
        return grad.clone(), None


def stage(p: torch.Tensor, x: torch.Tensor, seconds: float) -> torch.Tensor:
    """A small layer that takes as long as a large one."""
    return Nap.apply(torch.tanh(x @ p), seconds)  # type: ignore[no-any-return]


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return (y - target).square().mean()


def arriving(parts: Sequence[torch.Tensor], times: Sequence[float]) -> Iterator[torch.Tensor]:
    """Each part at its time."""
    for part, when in zip(parts, times, strict=True):
        time.sleep(max(0.0, when - time.perf_counter()))
        yield part


def measured(name: str, order: Any, seeds: int, microbatches: int, seconds: float) -> Any:
    """On each rank, for each seed: seconds of waiting for all, of late microbatches, and of the
    step alone.
    """
    group = fpipe.init()
    schedule = fpipe.make_schedule(name, ranks=group.size, microbatches=microbatches)
    unit = seconds * schedule.ranks / schedule.stages
    stages = [partial(stage, seconds=unit) for _ in range(schedule.stages)]
    pipe = fpipe.pipeline(
        stages, schedule, loss=loss, group=group, engine="eager", order=order, seed=0
    )
    draw = torch.Generator().manual_seed(0)
    params = pipe.place([torch.randn(8, 8, generator=draw) for _ in stages])
    xs, ts = ([torch.randn(2, 8, generator=draw) for _ in range(microbatches)] for _ in range(2))
    run = fpipe.value_and_grad(pipe)
    at_once = (fpipe.Microbatches(xs), fpipe.Microbatches(ts))
    late = partial(fpipe.Microbatches, count=microbatches)
    run(params, *at_once)
    run(params, late(iter(xs)), late(iter(ts)))

    def timed(batch: Any, offsets: Sequence[float]) -> tuple[float, Any]:
        group.barrier()
        start = time.perf_counter()
        when = [start + offset for offset in offsets]
        result = run(params, *batch(when))
        group.barrier()
        return time.perf_counter() - start, result

    def waiting(when: Sequence[float]) -> Any:
        time.sleep(max(0.0, when[-1] - time.perf_counter()))
        return at_once

    def taking(when: Sequence[float]) -> Any:
        return late(arriving(xs, when)), late(arriving(ts, when))

    nothing = [0.0] * microbatches
    step = min(timed(waiting, nothing)[0] for _ in range(3))
    (step,) = group.share((torch.tensor(step),), (fpipe.tree.Spec.of(torch.tensor(step)),), 0)
    window = float(step)
    rows = []
    for seed in range(seeds):
        draws = random.Random(seed)
        offsets = [0.0, *sorted(draws.uniform(0, window) for _ in range(microbatches - 1))]
        all_of_them, want = timed(waiting, offsets)
        one_by_one, found = timed(taking, offsets)
        same = torch.equal(found[0], want[0]) and all(
            torch.equal(found[1][stage], want[1][stage]) for stage in pipe.here
        )
        rows.append((all_of_them, one_by_one, same))
    return window, rows


def main() -> None:
    """Print a line for each way, and for each of its seeds."""
    given = options(__doc__, seeds=7, microbatches=16, milliseconds=40).parse_args()
    seconds = given.milliseconds / 1000
    rows = []
    for name, order, whole in WAYS:
        window = 2 * given.microbatches
        ranks = fpipe.launch(
            measured,
            name,
            (order, window) if whole else order,
            given.seeds,
            given.microbatches,
            seconds,
            ranks=RANKS,
        )
        step = ranks[0][0]
        ratios = []
        for seed in range(given.seeds):
            of_seed = [rows[seed] for _, rows in ranks]
            waiting, taking = (max(row[n] for row in of_seed) for n in (0, 1))
            if not all(same for *_, same in of_seed):
                raise SystemExit(f"{name}, {order}, seed {seed}: other bits")
            ratios.append(taking / waiting)
            rows.append(
                {
                    "schedule": name,
                    "order": order,
                    "window": window * whole,
                    "step": step,
                    "waiting": waiting,
                    "taking": taking,
                    "seed": seed,
                }
            )
        print(
            f"{name:6} {order:6} step {step:.3f} s; as a part of waiting for all: median "
            f"{median(ratios):.2f}, largest {max(ratios):.2f}; same bits",
            flush=True,
        )
    save(rows, given.json)


if __name__ == "__main__":
    main()
