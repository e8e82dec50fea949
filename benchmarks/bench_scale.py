"""Lowering at scale: one rank's plan of 256 ranks and 2,048 microbatches; check and simulation of
the whole schedule.

No group of 256 is needed: lowering takes the programs of the rank's stages and the interfaces of
all, and every stage is the same function. Medians. The whole schedule runs in its own process, with
its peak memory.

    python -m benchmarks.bench_scale [--schedules 1F1B ZBVZeroBubble] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import optree
import torch

import fpipe
from benchmarks.bench_torch import make, stage
from benchmarks.command import options, save
from benchmarks.stages import square
from fpipe.lowering.builder import lower
from fpipe.lowering.job import Job, ProgramSet
from fpipe.lowering.value_graph import Interface, ValueGraph
from fpipe.programs.cache import Signature, programs_of
from fpipe.programs.program import Programs
from fpipe.programs.signature import loss_stage
from fpipe.schedule import Schedule
from fpipe.stage import Stage, as_stage
from fpipe.tree import AbstractTree

RANKS, MICROBATCHES = 256, 2048
WIDTH, TOKENS, BLOCKS = 16, 4, 2


def programs(fn: Stage, params: Any, x: AbstractTree) -> Programs:
    """The programs of a function."""
    signature = Signature(
        AbstractTree.of(params, True), x, AbstractTree.of({}), AbstractTree.of(None)
    )
    return programs_of(fn, signature)


class Model:
    """The same stage once per stage of a schedule, and a loss."""

    def __init__(self) -> None:
        (params,) = make(1, WIDTH, BLOCKS)
        x = torch.randn(TOKENS, WIDTH)
        self.x, made = AbstractTree.of(x), AbstractTree.of(x, True)
        self.first = programs(as_stage(stage), params, self.x)
        self.other = programs(as_stage(stage), params, made)
        both = AbstractTree(
            optree.treespec_tuple([made.structure, made.structure]), (*made.leaves, *self.x.leaves)
        )
        self.loss = programs(loss_stage(square, False), {}, both)

    def job(self, schedule: Schedule, rank: int) -> Job:
        """What a rank of many processes is to lower."""
        sink = Interface.of(self.loss)
        faces = (Interface.of(self.first), *[Interface.of(self.other)] * (schedule.stages - 1))
        wires = ValueGraph(faces, sink.dxs, sink.reads_x, self.x.leaves)
        held = {s: self.other if s else self.first for s in schedule.placement.stages_of(rank)}
        return Job(
            schedule,
            (ProgramSet(wires, held, self.loss),),
            (0,) * schedule.microbatches,
            wired=True,
        )


def measure(model: Model, name: str, rounds: int) -> dict[str, Any]:
    """The slowest of the first, a middle and the last rank: median seconds of lowering, and the
    plan's length.
    """
    schedule = fpipe.make_schedule(name, RANKS, MICROBATCHES)
    found = []
    for rank in (0, RANKS // 2, RANKS - 1):
        times, worked = [], []
        for _ in range(rounds):
            job = model.job(schedule, rank)
            gc.collect()
            start, busy = time.perf_counter(), time.process_time()
            plan = lower(job, rank)
            times.append(time.perf_counter() - start)
            worked.append(time.process_time() - busy)
        found.append(
            {
                "rank": rank,
                "instructions": len(plan.instructions),
                "lowering s": statistics.median(times),
                "lowering cpu s": statistics.median(worked),
            }
        )
    return {"schedule": name, **max(found, key=lambda row: row["lowering cpu s"]), **whole(name)}


WHOLE = """
import json, resource, sys, time
from fpipe.generators import make_schedule
made = make_schedule(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
start, busy = time.perf_counter(), time.process_time()
made.check().simulate().total
took, worked = time.perf_counter() - start, time.process_time() - busy
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before all actions are made
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps({"actions": sum(map(len, made)), "check + simulate s": took,
                  "check + simulate cpu s": worked,
                  "GiB": held * unit / 2**30}))
"""


def whole(name: str) -> dict[str, Any]:
    """Check and simulation of all ranks, in a fresh process."""
    command = [sys.executable, "-c", WHOLE, name, str(RANKS), str(MICROBATCHES)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the table."""
    parser = options(__doc__, rounds=3)
    parser.add_argument(
        "--schedules", nargs="*", default=["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = Model(), []
    print(f"{RANKS} ranks, {MICROBATCHES} microbatches\n")
    print(
        f"{'':18} {'':>5} {'instruc-':>9} {'lowering':>9} {'':>7} {'':>10} {'check and':>9} "
        f"{'':>7} {'most':>5}"
    )
    print(
        f"{'schedule':18} {'rank':>5} {'tions':>9} {'s':>9} {'CPU s':>7} {'actions':>10} "
        f"{'simulate':>9} {'CPU s':>7}"
        f" {'GiB':>5}"
    )
    for name in args.schedules:
        r = measure(model, name, args.rounds)
        rows.append(r)
        print(
            f"{name:18} {r['rank']:5d} {r['instructions']:9,} {r['lowering s']:9.2f} "
            f"{r['lowering cpu s']:7.2f}"
            f" {r['actions']:10,} {r['check + simulate s']:9.2f} "
            f"{r['check + simulate cpu s']:7.2f} {r['GiB']:5.2f}",
            flush=True,
        )
    save(rows, args.json)


if __name__ == "__main__":
    main()
