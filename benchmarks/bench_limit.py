"""The time of a step relative to its lower limit and to its prediction, with one process per rank.

The limit is the simulated makespan with the times of the programs alone, run on all ranks at once in the order of the
schedule, and the time of a message between two idle ranks. The prediction is the makespan by a profile
(``fpipe.measure_costs``). Steps run in a row, as in training, and so do the programs alone. Rounds alternate.

    python -m benchmarks.bench_limit [--sizes small medium] [--rounds 15] [--borders] [--json FILE]

``--borders`` prints in addition where the time of a step goes on the rank of the last stage.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fpipe
from benchmarks.bench_torch import SCHEDULES, SIZES, asking, make, stage
from benchmarks.borders import PARTS, Borders
from benchmarks.command import save
from benchmarks.measure import begin
from benchmarks.stages import square
from fpipe.plans.value_graph import spec_of
from fpipe.running.calls import value_and_grad
from fpipe.running.loop import WATCH
from fpipe.running.profile.profiling import Measuring, whole
from fpipe.schedules.actions import plain

MESSAGES = 20
#: Steps in a row after one that does not count; the programs alone run as often, in the order of a step.
STEPS = {"small": 10, "medium": 2}


class Alone:
    """The programs of the stages here on the values of a real step, with nothing around them."""

    def __init__(self, pipe: fpipe.Pipeline, params: Any, x: Any, t: Any):
        alone = pipe.under(whole(pipe.schedule(x.shape[0])))
        call = alone.call("grad", params, x, (t,), {})
        (lowered,) = alone.cache.plans_for(call).prepared.inputs.values()
        self.kinds, self.top = lowered.kinds[0], pipe.stages - 1
        self.row = list(plain(pipe.schedule(x.shape[0])[pipe.group.rank]))
        self.values: dict[int, dict[str, Any]] = {}
        self.times: dict[tuple[str, int], list[float]] = {}
        before = WATCH.set(self._watch)
        try:
            value_and_grad(call, alone.cache)
        finally:
            WATCH.reset(before)

    def _watch(self, bound: Any, steps: Sequence[Any], first: int) -> Sequence[Any]:
        return [self._noting(step, ins) for step, ins in zip(steps, bound.plan.instructions, strict=True)]

    def _noting(self, step: Callable[[Any], Any], ins: Any) -> Callable[[Any], Any]:
        """Keep what programs of the first microbatch read."""
        if ins.program is None or ins.action.microbatch:
            return step
        loss = self.kinds.loss
        index = self.top + 1 if loss is not None and ins.program in (loss.f, loss.b) else ins.action.stage

        def noting(r: Any) -> Any:
            known = self.values.setdefault(index, {})
            known.update(zip(ins.program.inputs, [r.slots[slot] for slot in ins.reads], strict=True))
            return step(r)

        return noting

    def round(self, counts: bool) -> None:
        """Run the programs of every action of the rank here in their order, as a step does, and nothing else."""
        took: dict[tuple[str, int], list[float]] = {}
        for action in self.row:
            took.setdefault((action.op, action.stage), []).append(self._action(action.op, action.stage))
        for key, times in took.items() if counts else ():
            self.times.setdefault(key, []).append(statistics.mean(times))

    def seconds(self) -> float:
        """The median time of the programs of a step."""
        medians = {key: statistics.median(times) for key, times in self.times.items()}
        return sum(medians[action.op, action.stage] for action in self.row)

    def _action(self, letter: str, index: int) -> float:
        loss, own = self.kinds.loss, self.kinds.programs[index]
        if index != self.top or loss is None or letter == "W":
            loss = None
        if letter == "F":
            return self._run(own, own.f, index) + (0.0 if loss is None else self._run(loss, loss.f, self.top + 1))
        seconds = 0.0 if loss is None else self._run(loss, loss.b, self.top + 1)
        return seconds + self._run(own, own.i if letter == "I" else own.adding(letter), index)

    def _run(self, own: Any, program: Any, index: int) -> float:
        known = self.values[index]
        for name in program.inputs:
            if name not in known and name[0] == "g" and name[1:].isdigit():
                known[name] = torch.zeros_like(known[f"p{name[1:]}"])
        box = [known[name] for name in program.inputs]
        start = time.perf_counter()
        out = program.run(box)
        took = time.perf_counter() - start
        known.update(zip(program.outputs, out, strict=True))
        return took


def one_way(group: Any, rank: int, pair: tuple[int, int], spec: Any) -> float | None:
    """Half the time there and back of a message between two ranks, the median; on the first of them."""
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
    pipe = fpipe.pipeline([stage] * count, name, loss=square, microbatches=microbatches, group=group)
    placed = pipe.place(params)
    step = fpipe.value_and_grad(pipe)
    step(placed, x, t)
    alone, measuring = Alone(pipe, placed, x, t), Measuring(pipe, placed, x, t)
    profiled = fpipe.profile(step, name=name)
    prepared = pipe.cache.plans_for(pipe.call("grad", placed, x, (t,), {})).prepared
    spec = spec_of(prepared.interfaces[0][0].y.tensors[0])
    walls, totals, ways = [], [], []
    gc.collect()
    gc.freeze()  # one collection of all objects takes as long as a hundred small steps, and costs are means
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
    name: str, size: str, pipe: Any, group: Any, walls: list[float], totals: list[float], ways: list[float],
    alone: Alone, measuring: Measuring, profiled: Any,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one schedule, by all ranks' times."""
    told = group.gather_objects((walls, {key: statistics.median(times) for key, times in alone.times.items()}, ways))
    by_op = {key: value for _, times, _ in told for key, value in times.items()}
    stages = range(pipe.stages)
    programs = {op: tuple(by_op.get((op, index), 0.0) for index in stages) for op in "FBIW"}
    bare = fpipe.Costs(**programs, comm=statistics.median(told[0][2]), unit="s")
    price = measuring.costs()
    wall = statistics.median(map(max, zip(*(walls for walls, _, _ in told), strict=True)))
    limit, predicted = profiled.simulate(bare).total, profiled.simulate(price).total
    total = statistics.median(totals)
    return {
        "schedule": name, "size": size, "ranks": group.size, "limit ms": 1e3 * limit, "step ms": 1e3 * wall,
        "actions ms": 1e3 * total, "predicted ms": 1e3 * predicted, "step / limit": wall / limit,
        "predicted / step": predicted / wall, "predicted / actions": predicted / total,
        "message us": 1e6 * bare.comm, "costs": json.loads(price.to_json()), "programs": programs,
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = asking(__doc__)
    parser.add_argument("--borders", action="store_true", help="print where the time of a step goes")
    args = parser.parse_args()
    found = []
    print(f"{'':7} {'schedule':22} {'limit ms':>9} {'step ms':>9} {'ratio':>6} {'predicted':>9} {'/ step':>7}"
          f" {'/ actions':>9}")  # fmt: skip
    for size in args.sizes:
        for name in args.schedules:
            (row, *_) = fpipe.launch(rank_main, [name], size, args.microbatches, args.rounds, ranks=args.ranks)
            (r,) = row
            found.append(r)
            print(f"{size:7} {name:22} {r['limit ms']:9.2f} {r['step ms']:9.2f} {r['step / limit']:6.2f}"
                  f" {r['predicted ms']:9.2f} {r['predicted / step']:7.1%} {r['predicted / actions']:9.1%}",
                  flush=True)  # fmt: skip
            for part, what in PARTS.items() if args.borders else ():
                print(f"{r['borders us'][part]:18.0f} us  {what}")
    save(found, args.json)


if __name__ == "__main__":
    main()
