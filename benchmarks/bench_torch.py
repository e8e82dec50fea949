"""fpipe against torch.distributed.pipelining: same model, microbatches and processes, alternating
steps.

Prints the median step of both for every schedule, their ratio, and the peak bytes in tensors of
each, by the same counter. ``--json`` writes the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import schedules as peers
from torch.distributed.pipelining.stage import PipelineStage
from torch.nn.functional import gelu, layer_norm, linear
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from benchmarks.alone import Alone, programs
from benchmarks.command import narrowed, options, save
from benchmarks.measure import begin
from benchmarks.stages import square
from fpipe.collectives.shared_memory import SWITCH

SCHEDULES = {
    "GPipe": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", 2),
    "LoopedBFS": ("ScheduleLoopedBFS", 2),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2),
    "ZBVZeroBubble": ("ScheduleZBVZeroBubble", 2),
    "DualPipeV": ("ScheduleDualPipeV", 2),
}
SIZES = {"small": (16, 4, 1), "medium": (256, 64, 2)}  # width, tokens, blocks a stage


def block(p, x):
    """LayerNorm, Linear, GELU, Linear, residual."""
    h = layer_norm(x, x.shape[-1:], p["norm"], p["bias"])
    return x + linear(gelu(linear(h, p["up"], p["bu"])), p["down"], p["bd"])


def stage(params, x):
    """All blocks of a stage."""
    for p in params:
        x = block(p, x)
    return x


def make(stages: int, width: int, blocks: int) -> list[list[dict[str, torch.Tensor]]]:
    """Parameters, one list of blocks per stage."""
    torch.manual_seed(0)

    def one():
        return {
            "norm": torch.ones(width),
            "bias": torch.zeros(width),
            "up": torch.randn(4 * width, width) * 0.02,
            "bu": torch.zeros(4 * width),
            "down": torch.randn(width, 4 * width) * 0.02,
            "bd": torch.zeros(width),
        }

    return [[one() for _ in range(blocks)] for _ in range(stages)]


class Peer(nn.Module):
    """A stage for torch."""

    def __init__(self, params):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ParameterDict({k: nn.Parameter(v.clone()) for k, v in p.items()}) for p in params
        )

    def forward(self, x):
        """Run the blocks."""
        for p in self.blocks:
            x = block(p, x)
        return x


class Bytes(TorchDispatchMode):
    """Counts the bytes of live storages that were allocated inside the context, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note every new storage."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.seen and key not in given and storage.nbytes():
                self._note(storage, key)
        return out

    def _note(self, storage, key):
        size = storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def _tensors(tree):
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]


def _peer_schedule(name: str, modules, count: int, microbatches: int):
    cls_name, per_rank = SCHEDULES[name]
    stages = [PipelineStage(module, s, count, torch.device("cpu")) for s, module in modules.items()]
    return getattr(peers, cls_name)(
        stages if per_rank > 1 else stages[0], microbatches, loss_fn=square
    )


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
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = fpipe.init(device="cpu")
    rows = []
    for name in names:
        row = _one(name, group, rank, ranks, size, microbatches, rounds)
        if rank == 0:
            rows.append(row)
            print(_line(row), flush=True)
    if rank == 0:
        save(rows, out)
    dist.barrier()
    dist.destroy_process_group()


def _one(name, group, rank, ranks, size, microbatches, rounds):
    width, tokens, blocks = SIZES[size]
    count = ranks * SCHEDULES[name][1]
    params = make(count, width, blocks)
    x, t = torch.randn(microbatches, tokens, width), torch.randn(microbatches, tokens, width)
    pipe = fpipe.pipeline(
        [stage] * count, name, loss=square, microbatches=microbatches, group=group
    )
    modules = {s: Peer(params[s]) for s in pipe.here}
    peer = _peer_schedule(name, modules, count, microbatches)
    placed = pipe.place(params)
    vag = fpipe.value_and_grad(pipe)
    first, last = 0 in pipe.here, count - 1 in pipe.here

    def ours():
        return vag(placed, x, t)

    def theirs():
        for module in modules.values():
            module.zero_grad()
        return peer.step(*((x,) if first else ()), **({"target": t, "losses": []} if last else {}))

    _, grads = ours()
    theirs()
    _agree(grads, modules)
    times = {"fpipe": [], "torch": []}
    for i in range(rounds + 3):
        for who, step in (("fpipe", ours), ("torch", theirs)):
            took = torch.tensor([_timed(step, group)])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if i >= 3:
                times[who].append(took.item())
    bare = _bare(pipe, placed, x, t, rounds) if os.environ.get(SWITCH) == "0" else None
    peaks = {}
    for who in (
        "fpipe",
        "torch",
    ):  # the second step of a fresh start: whatever a library keeps is counted
        with Bytes() as counter:
            if who == "torch":
                peer = _peer_schedule(name, modules, count, microbatches)
            step = theirs if who == "torch" else ours
            step()
            counter.peak = 0
            step()
        peak = torch.tensor([counter.peak])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        peaks[who] = peak.item()
    plan = torch.tensor([pipe.plan(placed, x, t).peak[rank]])
    dist.all_reduce(plan, op=dist.ReduceOp.MAX)
    ratio = statistics.median(a / b for a, b in zip(times["fpipe"], times["torch"], strict=True))
    return {
        "schedule": name,
        "size": size,
        "ranks": ranks,
        "microbatches": microbatches,
        "fpipe ms": 1e3 * statistics.median(times["fpipe"]),
        "torch ms": 1e3 * statistics.median(times["torch"]),
        "ratio": ratio,
        "fpipe bytes": peaks["fpipe"],
        "torch bytes": peaks["torch"],
        "plan bytes": plan.item(),
        **({} if bare is None else {"programs ms": 1e3 * bare}),
    }


def _bare(pipe, placed, x, t, rounds) -> float:
    """The seconds of a step whose messages take no time: the schedule, with the times of the
    programs alone.
    """
    alone = Alone(pipe, placed, x, t)
    with torch.no_grad():
        for _ in range(rounds):
            begin(pipe.group)
            for counts in (False, True):
                alone.round(counts)
    return pipe.schedule(x.shape[0]).simulate(fpipe.Costs(**programs(pipe, alone), unit="s")).total


def _timed(step, group) -> float:
    start = begin(group)
    step()
    return time.perf_counter() - start


def _agree(grads, modules):
    for s, module in modules.items():
        for mine, theirs in zip(grads[s], module.blocks, strict=True):
            for key, value in mine.items():
                torch.testing.assert_close(value, theirs[key].grad, rtol=1e-3, atol=1e-5)


def _line(r) -> str:
    return (
        f"{r['size']:7} {r['ranks']} ranks  {r['schedule']:22} {r['fpipe ms']:9.2f} "
        f"{r['torch ms']:9.2f}"
        f" {r['ratio']:7.3f} {r['fpipe bytes']:12,} {r['torch bytes']:12,} {r['plan bytes']:12,}"
    )


def asking(doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark that goes over sizes and schedules."""
    parser = options(doc, ranks=2, microbatches=8, rounds=15)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    return parser


def spawned(run: Callable[..., None], args: argparse.Namespace, size: str) -> list[Any]:
    """The rows that ``run``, in one process a rank, writes for a size."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        mp.spawn(
            run,
            (
                args.ranks,
                os.path.join(folder, "store"),
                args.schedules,
                size,
                args.microbatches,
                args.rounds,
                out,
            ),
            nprocs=args.ranks,
        )
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """Print the tables."""
    parser = asking(__doc__)
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="messages of fpipe through gloo, none through memory",
    )
    parser.add_argument(
        "--narrow",
        metavar="RATE",
        help="between two network namespaces, such as 200mbit (needs root)",
    )
    parser.add_argument("--link", metavar="FOLDER", help="this is one of two processes already")
    args = parser.parse_args()
    if args.narrow:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(narrowed(args.narrow, "--link", folder))
    if args.gloo or args.link:
        os.environ[SWITCH] = "0"  # processes are started with it
    rows = []
    print(
        f"{'':16}  {'schedule':22} {'fpipe ms':>9} {'torch ms':>9} {'ratio':>7} {'fpipe peak':>12}"
        f" {'torch peak':>12} {'plan peak':>12}"
    )
    for size in args.sizes:
        rows += joined(args, size) if args.link else spawned(run, args, size)
    if rows:
        save(rows, args.json)


def joined(args: argparse.Namespace, size: str) -> list[Any]:
    """The rows of a size, where both processes run already; empty on the second."""
    rank, folder = int(os.environ["RANK"]), Path(args.link)
    out, store = folder / f"{size}.json", str(folder / size)
    run(rank, 2, store, args.schedules, size, args.microbatches, args.rounds, out)
    return [] if rank else json.loads(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
