"""Woven against sequential fused actions, with all_to_all inside the stages;
torch.distributed.pipelining beside them.

Two processes hold the experts of each other's tokens. A first run determines how many layers an
expert needs for communication alone to take ``--share`` of compute alone; then woven, sequential,
compute alone, communication alone and, with ``--torch``, torch's DualPipeV alternate. All figures
are medians over the rounds; ratios are medians of the ratios of neighbouring runs.

Between two processes of one small host the cores that compute also move the bytes, and there is
little to hide. The plain check says how much: one exchange beside products of matrices, without a
library. ``narrow_link.sh`` puts a link between them that takes its time without a core.

    python -m benchmarks.bench_overlap [--torch] [--schedule Overlapped1F1B] [--mb 8] [--share 0.75]
    python -m benchmarks.bench_overlap --narrow 200mbit --mb 1 --microbatches 24 --rounds 3
    torchrun --nproc-per-node 2 -m benchmarks.bench_overlap --link  # over a link set up by hand
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from benchmarks.command import narrowed
from fpipe.passes import ops


def stage_of(members: Any, layers: int) -> Callable[..., torch.Tensor]:
    """A stage: a dense part, dispatch, experts of so many layers, combine."""

    def stage(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = torch.tanh(x @ p["dense"])
        d = ops.all_to_all(x, members)
        for _ in range(layers):
            d = torch.tanh(d @ p["expert"])
        return x + ops.all_to_all(d, members)

    return stage


def mean_square(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (y - t).square().mean()


class Bench:
    """One process's share of the measurement."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.world = given, dist.group.WORLD
        self.rows, self.width = int(given.mb * 2**20 / 4 / given.width), given.width
        self.group = fpipe.local(1)
        self.stages = fpipe.make_schedule(given.schedule, 1, given.microbatches).stages
        generator = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        self.params = [
            {k: normal(self.width, self.width) / self.width**0.5 for k in ("dense", "expert")}
            for _ in range(self.stages)
        ]
        self.x, self.t = (
            normal(self.rows * given.microbatches, self.width),
            normal(self.rows * given.microbatches, self.width),
        )

    def step(self, members: Any, layers: int, overlap: str) -> Callable[[], Any]:
        """A training step."""
        pipe = fpipe.pipeline(
            [stage_of(members, layers)] * self.stages,
            self.given.schedule,
            loss=mean_square,
            microbatches=self.given.microbatches,
            group=self.group,
            overlap=overlap,
        )
        run = fpipe.value_and_grad(pipe)
        self.plan = pipe.plan(self.params, self.x, self.t)
        return lambda: run(self.params, self.x, self.t)

    def carry(self) -> None:
        """The communication of a step, by itself."""
        part = self.x[: self.rows]
        for _ in range(4 * self.stages * self.given.microbatches):
            ops.all_to_all(part, self.world)

    def plain(self) -> tuple[float, float]:
        """How far the machine overlaps at all: an exchange beside products of matrices of the same
        length, over the longer of the two; and how much of a core an exchange alone keeps busy, in
        this process.
        """
        part, side = self.x[: self.rows], torch.randn(256, 256)
        taken = torch.empty_like(part)
        start_exchange = lambda: dist.all_to_all_single(taken, part, async_op=True)
        exchange = lambda: start_exchange().wait()  # type: ignore[union-attr]
        busy, start = time.process_time(), time.perf_counter()
        long = statistics.median(timed(exchange) for _ in range(9))
        busy = (time.process_time() - busy) / (time.perf_counter() - start)
        one = (
            statistics.median(
                timed(lambda: [torch.mm(side, side) for _ in range(20)]) for _ in range(5)
            )
            / 20
        )
        count = max(1, round(agreed(long / one)))
        products = lambda: [torch.mm(side, side) for _ in range(count)]

        def both() -> None:
            work = start_exchange()
            products()
            work.wait()  # type: ignore[union-attr]

        longer = max(long, statistics.median(timed(products) for _ in range(9)))
        return agreed(statistics.median(timed(both) for _ in range(9)) / longer), agreed(busy)

    def torchs(self, layers: int) -> Callable[[], Any]:
        """The same model under torch.distributed.pipelining's DualPipeV."""
        from torch.distributed.pipelining import schedules as peers
        from torch.distributed.pipelining.stage import PipelineStage

        class Module(torch.nn.Module):
            def __init__(self, p: dict[str, torch.Tensor], fn: Callable[..., torch.Tensor]):
                super().__init__()
                self.p = torch.nn.ParameterDict(
                    {k: torch.nn.Parameter(v.clone()) for k, v in p.items()}
                )
                self.fn = fn

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fn(self.p, x)

        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        modules = [Module(p, stage_of(self.world, layers)) for p in self.params]
        stages = [
            PipelineStage(m, k, self.stages, torch.device("cpu"), group=alone)  # pyright: ignore[reportArgumentType]
            for k, m in enumerate(modules)
        ]
        schedule = peers.ScheduleDualPipeV(stages, self.given.microbatches, loss_fn=mean_square)  # pyright: ignore

        def run() -> Any:
            for module in modules:
                module.zero_grad(set_to_none=True)
            losses: list[Any] = []
            schedule.step(self.x, target=self.t, losses=losses)
            grads = [p.grad for m in modules for p in m.p.values()]
            return torch.stack(losses).mean(), grads

        return run


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the slower of the two is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def agreed(value: float) -> float:
    """The mean over the processes."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / 2


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All figures, the same on both processes."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    bench = Bench(given)
    layers = given.layers or _layers(bench, given.share)
    runs = {
        "woven": bench.step(bench.world, layers, "weave"),
        "sequential": bench.step(bench.world, layers, "sequential"),
        "compute": bench.step(None, layers, "sequential"),
        "communication": bench.carry,
    }
    if given.torch:
        runs["torch"] = bench.torchs(layers)
    first = {name: run() for name, run in runs.items() if name in ("woven", "sequential")}
    times: dict[str, list[float]] = {name: [] for name in runs}
    before = os.getloadavg()[0]
    for _ in range(given.rounds):
        for name, run in runs.items():
            times[name].append(timed(run))
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
    longer = [max(x, y) for x, y in zip(times["compute"], times["communication"], strict=True)]
    found = {
        "schedule": given.schedule,
        "microbatches": given.microbatches,
        "layers": layers,
        "MB": given.mb,
        "load": f"{before:.1f} to {os.getloadavg()[0]:.1f}",
        "same bits": bool(torch.equal(first["woven"][0], first["sequential"][0])),
        **{f"{name} ms": round(1e3 * statistics.median(each), 1) for name, each in times.items()},
        "communication/compute": round(ratio("communication", "compute"), 3),
        "woven/sequential": round(ratio("woven", "sequential"), 3),
        "woven/longer": round(
            statistics.median(x / y for x, y in zip(times["woven"], longer, strict=True)), 3
        ),
    }
    both, busy = bench.plain()
    found |= {"plain check: both/longer": round(both, 3), "plain check: core busy": round(busy, 2)}
    if given.torch:
        found["woven/torch"] = round(ratio("woven", "torch"), 3)
    return found


def _layers(bench: Bench, share: float) -> int:
    """How many layers make communication that share of compute."""
    carry = statistics.median(timed(bench.carry) for _ in range(3))
    one, five = (
        statistics.median(timed(bench.step(None, layers, "sequential")) for _ in range(2))
        for layers in (1, 5)
    )
    return max(1, round(agreed(1 + (carry / share - one) / max((five - one) / 4, 1e-6))))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="DualPipeV")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--mb", type=float, default=4, help="of what each process exchanges at once"
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--layers", type=int, default=0, help="of an expert; 0: find out by --share"
    )
    parser.add_argument(
        "--share", type=float, default=0.75, help="communication alone over compute alone"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--torch", action="store_true", help="torch.distributed.pipelining's DualPipeV too"
    )
    parser.add_argument("--link", action="store_true", help="this is one of two processes already")
    parser.add_argument(
        "--narrow",
        metavar="RATE",
        help="between two network namespaces, such as 200mbit (needs root)",
    )
    parser.add_argument("--json", help="write the results into this file too")
    given = parser.parse_args()
    if given.narrow:
        return narrowed(given.narrow, "--link")
    warnings.filterwarnings("ignore")
    found = measure(given) if given.link else fpipe.launch(measure, given, ranks=2, timeout=600)[0]
    if not given.link or dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if given.json:
            Path(given.json).write_text(json.dumps([found], indent=1) + "\n", encoding="utf-8")
    if given.link:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
