"""What the optimizer's barrier costs: spans of several steps, with all ranks waiting after each and without.

In the simulator, every action taking one unit of time and messages none; every guess is right.

    python -m benchmarks.bench_optimistic [--ranks 4] [--microbatches 8] [--steps 8]
"""

from __future__ import annotations

import argparse

from fpipe.actions import Action
from fpipe.generators import make_schedule
from fpipe.schedule import Schedule
from fpipe.simulate import Costs, simulate_rows


def chained(schedule: Schedule, steps: int) -> float:
    """The span of steps of which each begins on a rank as soon as that rank is done with the one before."""
    m = schedule.microbatches
    rows = tuple(
        tuple(Action(a.stage, a.op, a.microbatch + m * step) for step in range(steps) for a in row if type(a) is Action)
        for row in schedule
    )
    return simulate_rows(rows, schedule.placement, m * steps, Costs()).total


def spans(name: str, ranks: int, microbatches: int, steps: int) -> tuple[float, float]:
    """(with a barrier after each step, without), in the simulator."""
    schedule = make_schedule(name, ranks, microbatches)
    return schedule.simulate(Costs()).total * steps, chained(schedule, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    print("schedule        barrier   guess   ratio   (simulated)")
    for name in ("1F1B", "ZB1P", "ZBH2", "ZBVZeroBubble"):
        waiting, guessing = spans(name, args.ranks, args.microbatches, args.steps)
        print(f"{name:14s}{waiting:9.1f}{guessing:8.1f}{guessing / waiting:8.3f}")


if __name__ == "__main__":
    main()
