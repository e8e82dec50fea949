"""Whether steps leak: resident memory, threads and file descriptors of 2 processes, step by step.

python benchmarks/trial_leak.py                      # 2,000 steps; exit code 1 where something grew
python benchmarks/trial_leak.py --recorder           # with torch's flight recorder, which first
fills a ring

torch keeps a record of its last 2,000 messages (TORCH_FR_BUFFER_SIZE) to analyse hangs; until that
ring is full it grows by about a kilobyte per message. It is off here, so that growth is fpipe's.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

import torch

import fpipe
from benchmarks.stages import residual, square

EVERY = 100
SLACK = 2.0  #: MiB that the allocator may take later


def counts() -> tuple[float, int, int]:
    """MiB resident, threads and open file descriptors of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def rank_main(steps: int, schedule: str) -> list[tuple[int, float, int, int]]:
    """(step, *counts) every 100 steps of one rank: values, gradients, an update."""
    torch.set_num_threads(1)
    group = fpipe.init()
    plan = fpipe.make_schedule(schedule, ranks=group.size, microbatches=4)
    pipe = fpipe.pipeline([residual] * plan.stages, plan, loss=square, group=group)
    params = pipe.place([torch.randn(16, 16) * 0.1 for _ in range(plan.stages)])
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(1e-3))
    state, step = tx.init(params), fpipe.value_and_grad(pipe)
    found = []
    for number in range(steps + 1):
        if number % EVERY == 0 and number:
            gc.collect()
            found.append((number, *counts()))
        x = torch.randn(16, 16)
        _, grads = step(params, x, x)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
    group.barrier()
    return found


def main() -> int:
    """A line every few hundred steps; whether anything grew after the first 100."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--schedule", default="ZBV")
    options.add_argument("--recorder", action="store_true", help="leave torch's flight recorder on")
    given = options.parse_args()
    env = {} if given.recorder else {"TORCH_FR_BUFFER_SIZE": "0"}
    grew = False
    for rank, found in enumerate(
        fpipe.launch(rank_main, given.steps, given.schedule, ranks=2, env=env)
    ):
        for number, memory, threads, files in found:
            if number in (EVERY, given.steps) or number % 500 == 0:
                print(
                    f"rank {rank} step {number:5}  {memory:7.2f} MiB  {threads} threads  {files} "
                    "file descriptors"
                )
        first, last = found[0], found[-1]
        print(f"rank {rank} grew by {last[1] - first[1]:+.2f} MiB in {last[0] - first[0]} steps")
        grew |= last[1] - first[1] > SLACK or last[2] > first[2] or last[3] > first[3]
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
