"""fpipe.interop.pipelining against torch.distributed.pipelining: the same script with one import
changed.

Both get the same modules, batches and processes; steps alternate, and each clears ``.grad`` first.
Prints the median step of both for every schedule, the median of their ratios, and that of the
ratios of CPU time over both processes. ``--json`` writes the rows.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining as theirs

from benchmarks.bench_torch import SCHEDULES, SIZES, Peer, _timed, asking, make, spawned
from benchmarks.command import save
from benchmarks.stages import square
from fpipe.interop import pipelining as ours
from fpipe.interop.pipelining.stage import group_of

#: Seconds for which a process waits, computing, for the common start of a step.
_AHEAD = 5e-3


def run(
    rank: int,
    ranks: int,
    store: str,
    names: list[str],
    size: str,
    microbatches: int,
    rounds: int,
    out: Path,
):
    """One process: every schedule, both libraries in turn."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for name in names:
        row = _one(name, rank, ranks, size, microbatches, rounds)
        rows.append(row)
        if rank == 0:
            print(_line(row), flush=True)
    if rank == 0:
        save(rows, out)
    dist.barrier()
    dist.destroy_process_group()


def _one(
    name: str, rank: int, ranks: int, size: str, microbatches: int, rounds: int
) -> dict[str, Any]:
    width, tokens, blocks = SIZES[size]
    count = ranks * SCHEDULES[name][1]
    params = make(count, width, blocks)
    x, t = torch.randn(microbatches, tokens, width), torch.randn(microbatches, tokens, width)
    steps = {}
    modules = {}
    for who, library in (("fpipe", ours), ("torch", theirs)):
        steps[who], modules[who] = _script(library, name, params, count, microbatches, x, t)
    group = group_of(None, torch.device("cpu"))
    for step in steps.values():
        step()
    for mine, peer in zip(modules["fpipe"], modules["torch"], strict=True):
        for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
    times: dict[str, list[float]] = {"fpipe": [], "torch": []}
    busy: dict[str, list[float]] = {"fpipe": [], "torch": []}
    for i in range(rounds + 3):
        for who, step in steps.items():
            took, used = _both(step, group)
            if i >= 3:
                times[who].append(took)
                busy[who].append(used)
    ratio, cpu = (
        statistics.median(a / b for a, b in zip(rows["fpipe"], rows["torch"], strict=True))
        for rows in (times, busy)
    )
    return {
        "schedule": name,
        "size": size,
        "ranks": ranks,
        "microbatches": microbatches,
        "fpipe ms": 1e3 * statistics.median(times["fpipe"]),
        "torch ms": 1e3 * statistics.median(times["torch"]),
        "ratio": ratio,
        "cpu ratio": cpu,
    }


def _both(step: Callable[[], object], group: Any) -> tuple[float, float]:
    """Seconds of a step on the slowest process, and the CPU seconds of all, which other programs
    disturb less.
    """
    before = time.process_time()
    took = torch.tensor([_timed(step, group)])
    used = torch.tensor([time.process_time() - before - _AHEAD])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return took.item(), used.item()


def _script(
    library: Any,
    name: str,
    params: Any,
    count: int,
    microbatches: int,
    x: torch.Tensor,
    t: torch.Tensor,
) -> tuple[Callable[[], object], list[torch.nn.Module]]:
    """What a user writes: stages, a schedule, a step. Only ``library`` differs."""
    cls_name, per_rank = SCHEDULES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    v = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank, 2 * ranks - 1 - rank] if v else list(range(rank, count, ranks))
    modules: list[torch.nn.Module] = [Peer(copy.deepcopy(params[s])) for s in mine]
    stages = [
        library.PipelineStage(m, s, count, torch.device("cpu"))
        for s, m in zip(mine, modules, strict=True)
    ]
    schedule = getattr(library, cls_name)(
        stages if per_rank > 1 else stages[0], microbatches, loss_fn=square
    )
    args = (x,) if 0 in mine else ()
    keywords: dict[str, Any] = {"target": t, "losses": []} if count - 1 in mine else {}

    def step() -> object:
        for module in modules:
            module.zero_grad()
        return schedule.step(*args, **keywords)

    return step, modules


def _line(r: dict[str, Any]) -> str:
    return (
        f"{r['size']:7} {r['ranks']} ranks  {r['schedule']:22} {r['fpipe ms']:9.2f} "
        f"{r['torch ms']:9.2f}"
        f" {r['ratio']:7.3f} {r['cpu ratio']:9.3f}"
    )


def main() -> None:
    """Print the tables."""
    args = asking(__doc__).parse_args()
    rows = []
    print(f"{'':16}  {'schedule':22} {'fpipe ms':>9} {'torch ms':>9} {'ratio':>7} {'cpu ratio':>9}")
    for size in args.sizes:
        rows += spawned(run, args, size)
    save(rows, args.json)


if __name__ == "__main__":
    main()
