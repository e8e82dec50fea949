"""The cost of the optimizer's barrier: spans of several steps, with a barrier after each and
without.

First in the simulator, with actions of one unit of time and free messages. Then on processes whose
actions sleep for that unit, so that the number of cores is irrelevant: all clip by a global norm
that is never reached, alternating between the plain and the optimistic step. Last, from a recorded
run: how long before the end of the last W of a step the first F of the next step begins on rank 0.

    python -m benchmarks.bench_optimistic [--ranks 4] [--microbatches 8] [--steps 8] [--rounds 7]
    [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

import fpipe
from benchmarks.command import options, save
from benchmarks.measure import ratio
from fpipe.actions.action import Action
from fpipe.actions.costs import Costs
from fpipe.actions.simulation import simulate_rows
from fpipe.generators import make_schedule
from fpipe.passes.profile.profiling import Profile
from fpipe.schedule import Schedule

SIMULATED = ("1F1B", "ZB1P", "ZBH2", "ZBVZeroBubble")
MEASURED = ("ZBH2", "ZBVZeroBubble")


# ---- in the simulator ----
def chained(schedule: Schedule, steps: int) -> float:
    """The span of steps of which each begins on a rank as soon as that rank is done with the one
    before.
    """
    m = schedule.microbatches
    rows = tuple(
        tuple(
            Action(a.stage, a.op, a.microbatch + m * step)
            for step in range(steps)
            for a in row
            if type(a) is Action
        )
        for row in schedule
    )
    return simulate_rows(rows, schedule.placement, m * steps, Costs()).total


def spans(name: str, ranks: int, microbatches: int, steps: int) -> tuple[float, float]:
    """(with a barrier after each step, without), in the simulator."""
    schedule = make_schedule(name, ranks, microbatches)
    return schedule.simulate(Costs()).total * steps, chained(schedule, steps)


# ---- on processes ----
@torch.library.custom_op("bench_optimistic::nap", mutates_args=())
def nap(x: Tensor, seconds: float) -> Tensor:
    """The same values, later."""
    time.sleep(seconds)
    return x.clone()


@nap.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Asleep(torch.autograd.Function):
    """``x * p``, whose value and whose two gradients take a nap each: F, I and W of one length."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, seconds: float) -> Tensor:
        """F."""
        ctx.save_for_backward(x, p)
        ctx.seconds = seconds
        return nap(x * p, seconds)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor, None]:
        """I and W."""
        x, p = ctx.saved_tensors
        return nap(dys[0] * p, ctx.seconds), nap(dys[0] * x, ctx.seconds).sum(), None


class Training:
    """Some steps of a pipeline on this process, by either way."""

    def __init__(self, name: str, microbatches: int, steps: int, unit: float, group: Any):
        schedule = make_schedule(name, group.size, microbatches)
        stages = [lambda p, x: Asleep.apply(x, p, unit)] * schedule.stages
        self.pipe = fpipe.pipeline(stages, schedule, loss=lambda y: y.sum(), group=group)
        self.params, self.x = (
            self.pipe.place([torch.ones(())] * schedule.stages),
            torch.ones(microbatches),
        )
        self.tx = fpipe.chain(fpipe.clip_by_global_norm(1e9, over=self.pipe), fpipe.sgd(1e-9))
        self.steps = steps

    def gradients(self, params: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Gradients of x are computed as well, so that the first stage has an I like all others."""
        value, (grads, _) = fpipe.value_and_grad(self.pipe, (0, 1))(params, x)
        return value, grads

    def waiting(self) -> None:
        """The plain step."""
        params, state = self.params, self.tx.init(self.params)
        for _ in range(self.steps):
            _, grads = self.gradients(params, self.x)
            updates, state = self.tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)

    def guessing(self) -> None:
        """The optimistic one."""
        opt = fpipe.optimistic(self.tx, over=self.pipe)
        step = opt.first(self.params)
        for _ in range(self.steps):
            _, step = opt.step(self.gradients, step, self.x)
        assert step.settle()

    def clocked(self, run: Any) -> float:
        """Seconds from when all begin to when all have ended."""
        self.pipe.group.barrier()
        start = time.perf_counter()
        run()
        self.pipe.group.barrier()
        return time.perf_counter() - start

    def ahead(self, run: Any) -> float:
        """Seconds by which rank 0 begins a step before the last W of the one before has ended: the
        least of all.
        """
        with Profile() as profile:
            run()
        pairs = zip(profile.runs, profile.runs[1:], strict=False)
        return min(
            max(did.end for one in before for did in one.did if did.kind == "W")
            - min(did.start for did in after[0].did if did.kind == "F")
            for before, after in pairs
        )


def on_a_rank(microbatches: int, steps: int, rounds: int, unit: float) -> list[dict[str, Any]]:
    """Rounds in which both ways take turns, for each schedule; and what a recorded run of each
    shows.
    """
    torch.set_num_threads(1)
    group, rows = fpipe.init(device="cpu", timeout=60), []
    for name in MEASURED:
        made = Training(name, microbatches, steps, unit, group)
        ways = made.waiting, made.guessing
        times: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for way, kept in zip(ways, times, strict=True):
                took = made.clocked(way)
                kept.extend([took] if number else [])  # the first round traces
        predicted = spans(name, group.size, microbatches, steps)
        rows.append(
            {
                "schedule": name,
                "rounds": rounds,
                "wait ms": 1e3 * statistics.median(times[0]),
                "guess ms": 1e3 * statistics.median(times[1]),
                "ratio": ratio(times[1], times[0]),
                "simulated": predicted[1] / predicted[0],
                "ahead, waiting": made.ahead(made.waiting) / unit,
                "ahead, guessing": made.ahead(made.guessing) / unit,
            }
        )
    return rows


def main() -> None:
    """Print both tables."""
    parser = options(__doc__, ranks=4, microbatches=8, steps=8)
    parser.add_argument("--rounds", type=int, default=7, help="0: in the simulator alone")
    parser.add_argument(
        "--unit", type=float, default=0.005, help="seconds of an action on processes"
    )
    args = parser.parse_args()
    ranks, microbatches, steps = args.ranks, args.microbatches, args.steps
    print(f"{ranks} ranks, {microbatches} microbatches, {steps} steps, in the simulator (units)")
    print("schedule        barrier   guess   ratio")
    for name in SIMULATED:
        waiting, guessing = spans(name, ranks, microbatches, steps)
        print(f"{name:14s}{waiting:9.1f}{guessing:8.1f}{guessing / waiting:8.3f}")
    if not args.rounds:
        return
    rows = fpipe.launch(on_a_rank, microbatches, steps, args.rounds, args.unit, ranks=ranks)[0]
    print(f"\non processes, {1e3 * args.unit:g} ms a unit, medians of {args.rounds} rounds")
    print(
        "schedule     barrier ms  guess ms   ratio  simulated   rank 0 ahead, waiting and "
        "guessing (units)"
    )
    for row in rows:
        print(
            f"{row['schedule']:14s}{row['wait ms']:9.1f}{row['guess ms']:10.1f}{row['ratio']:8.3f}"
            f"{row['simulated']:11.3f}{row['ahead, waiting']:12.2f}{row['ahead, guessing']:8.2f}"
        )
    save(rows, args.json)


if __name__ == "__main__":
    main()
