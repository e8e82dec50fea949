"""The time of a step relative to its lower limit and to its prediction, with one process per rank.

The limit is the simulated makespan with the times of the programs alone, run on all ranks at once
in the order of the schedule, and the time of a message between two idle ranks. The prediction is
the makespan by a profile (``fpipe.measure_costs``). Steps run in a row, as in training, and so do
the programs alone. Rounds alternate.

    python -m benchmarks.bench_limit [--sizes small medium] [--rounds 15] [--borders] [--json FILE]

``--borders`` prints in addition where the time of a step goes on the rank of the last stage.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from typing import Any

import torch

import fpipe
from benchmarks.alone import Alone, programs
from benchmarks.bench_torch import SCHEDULES, SIZES, asking, make, stage
from benchmarks.borders import PARTS, Borders
from benchmarks.command import save
from benchmarks.measure import begin
from benchmarks.stages import square
from fpipe.lowering.value_graph import spec_of
from fpipe.passes.profile.profiling import Measuring

MESSAGES = 20
#: Steps in a row after one that does not count; the programs alone run as often, in the order of a
#: step.
STEPS = {"small": 10, "medium": 2}


def one_way(group: Any, rank: int, pair: tuple[int, int], spec: Any) -> float | None:
    """Half the time there and back of a message between two ranks, the median; on the first of
    them.
    """
    a, b = pair
    tensor, times = torch.zeros(spec.shape, dtype=spec.dtype), []
    group.barrier()
    for _ in range(MESSAGES):
        if rank == a:
            start = time.perf_counter()
            group.send((tensor,), a, b, (spec,))
            group.recv((spec,), b, a).wait()
            times.append((time.perf_counter() - start) / 2)
        elif rank == b:
            group.recv((spec,), a, b).wait()
            group.send((tensor,), b, a, (spec,))
    group.flush()
    return statistics.median(times) if times else None


def rank_main(names: list[str], size: str, microbatches: int, rounds: int) -> list[dict[str, Any]]:
    """In each process: a row for every schedule."""
    torch.set_num_threads(1)
    group = fpipe.init(device="cpu")
    return [measure(name, group, size, microbatches, rounds) for name in names]


def measure(name: str, group: Any, size: str, microbatches: int, rounds: int) -> dict[str, Any]:
    """One schedule."""
    (width, tokens, blocks), steps = SIZES[size], STEPS[size]
    count = group.size * SCHEDULES[name][1]
    rank = group.rank
    params = make(count, width, blocks)
    x, t = torch.randn(microbatches, tokens, width), torch.randn(microbatches, tokens, width)
    pipe = fpipe.pipeline(
        [stage] * count, name, loss=square, microbatches=microbatches, group=group
    )
    placed = pipe.place(params)
    step = fpipe.value_and_grad(pipe)
    step(placed, x, t)
    alone, measuring = Alone(pipe, placed, x, t), Measuring(pipe, placed, x, t)
    profiled = fpipe.profile(step, name=name)
    prepared = pipe.cache.plans_for(pipe.call("grad", placed, x, (t,), {})).prepared
    spec = spec_of(prepared.interfaces[0][0].y.tensors[0])
    walls, totals, ways = [], [], []
    gc.collect()
    # one collection of all objects takes as long as a hundred small steps, and costs are means
    gc.freeze()
    for _ in range(rounds):
        begin(group)
        for number in range(steps + 1):
            if number == 1:
                start = time.perf_counter()
            step(placed, x, t)
        walls.append((time.perf_counter() - start) / steps)
        begin(group)
        profiled(placed, x, t)
        totals.append(profiled.timeline.total)
        begin(group)
        measuring.step()
        with torch.no_grad():
            begin(group)
            for number in range(steps + 1):
                alone.round(counts=number > 0)
        ways += [one_way(group, rank, (0, 1), spec) or 0.0]
    borders = Borders(lambda: step(placed, x, t), alone.seconds())
    for _ in range(rounds):
        begin(group)
        borders.run(steps)
    row = rows(name, size, pipe, group, walls, totals, ways, alone, measuring, profiled)
    return row | {"borders us": group.gather_objects(borders.medians())[pipe.output_rank]}


def rows(
    name: str,
    size: str,
    pipe: Any,
    group: Any,
    walls: list[float],
    totals: list[float],
    ways: list[float],
    alone: Alone,
    measuring: Measuring,
    profiled: Any,
) -> dict[str, Any]:
    """The figures of one schedule, by all ranks' times."""
    every = group.gather_objects((walls, ways))
    by_op = programs(pipe, alone)
    bare = fpipe.Costs(**by_op, comm=statistics.median(every[0][1]), unit="s")
    price = measuring.costs()
    wall = statistics.median(map(max, zip(*(walls for walls, _ in every), strict=True)))
    limit, predicted = profiled.simulate(bare).total, profiled.simulate(price).total
    total = statistics.median(totals)
    return {
        "schedule": name,
        "size": size,
        "ranks": group.size,
        "limit ms": 1e3 * limit,
        "step ms": 1e3 * wall,
        "actions ms": 1e3 * total,
        "predicted ms": 1e3 * predicted,
        "step / limit": wall / limit,
        "predicted / step": predicted / wall,
        "predicted / actions": predicted / total,
        "message us": 1e6 * bare.comm,
        "costs": json.loads(price.to_json()),
        "programs": by_op,
    }


def main() -> None:
    """Print the table."""
    parser = asking(__doc__)
    parser.add_argument(
        "--borders", action="store_true", help="print where the time of a step goes"
    )
    args = parser.parse_args()
    found = []
    print(
        f"{'':7} {'schedule':22} {'limit ms':>9} {'step ms':>9} {'ratio':>6} {'predicted':>9} "
        f"{'/ step':>7}"
        f" {'/ actions':>9}"
    )
    for size in args.sizes:
        for name in args.schedules:
            (row, *_) = fpipe.launch(
                rank_main, [name], size, args.microbatches, args.rounds, ranks=args.ranks
            )
            (r,) = row
            found.append(r)
            print(
                f"{size:7} {name:22} {r['limit ms']:9.2f} {r['step ms']:9.2f} "
                f"{r['step / limit']:6.2f}"
                f" {r['predicted ms']:9.2f} {r['predicted / step']:7.1%} "
                f"{r['predicted / actions']:9.1%}",
                flush=True,
            )
            for part, what in PARTS.items() if args.borders else ():
                print(f"{r['borders us'][part]:18.0f} us  {what}")
    save(found, args.json)


if __name__ == "__main__":
    main()
