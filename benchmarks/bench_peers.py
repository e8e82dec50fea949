"""fpipe beside its peers: one transformer, with the same weights, tokens, microbatches and threads.

Every library runs as a job of its own; jobs alternate. Losses and norms of gradients are compared
with plain PyTorch first. Peers live in an environment of their own (``make peers``).

    python -m benchmarks.bench_peers [--model "GPT-2 small"] [--ranks 2] [--only fpipe:ZBV torch]
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.command import options, save
from benchmarks.measure import load
from benchmarks.peers.model import MODELS, Setting

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBV")
#: library and schedule of each row; plain PyTorch is first, and the others must agree with it
JOBS = (
    ("plain", "one process"),
    *(("fpipe", name) for name in SCHEDULES),
    *(("torch", name) for name in SCHEDULES),
    ("deepspeed", "1F1B"),
    ("megatron", "1F1B"),
    ("jax", "GPipe"),
    ("torchgpipe", "GPipe"),
)
SOLE = ("plain", "torchgpipe")  # libraries of one process
LIMIT = 900


def run(setting: Setting, python: str, folder: Path) -> list[dict[str, Any]] | str:
    """What each process of a job found, or its error in a line."""
    count = 1 if setting.library in SOLE else setting.ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(setting.ranks) if setting.library == "plain" else "1",
        "XLA_FLAGS": one,
        "RES_OPTIONS": "attempts:1 timeout:1",
        "LAUNCHED": str(time.time()),
    }
    outs = [folder / f"{rank}.json" for rank in range(count)]
    processes = []
    for rank, out in enumerate(outs):
        out.unlink(missing_ok=True)
        pinned = (
            ["taskset", "-c", str(rank % (os.cpu_count() or 1))] if setting.library == "jax" else []
        )
        processes.append(
            subprocess.Popen(
                [
                    *pinned,
                    python,
                    "-m",
                    "benchmarks.peers.job",
                    json.dumps(asdict(setting)),
                    str(out),
                ],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"{rank}.txt").open("w"),
            )
        )
    deadline = time.monotonic() + LIMIT
    try:
        while any(p.poll() is None for p in processes):
            if time.monotonic() > deadline or any(p.poll() for p in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not all(out.exists() for out in outs):
        lines = [
            line
            for rank in range(count)
            for line in (folder / f"{rank}.txt")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
            if "Error" in line
        ]
        return (lines[-1] if lines else f"no result in {LIMIT} s")[:300]
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    """A job's figures, over its processes."""
    ends = [max(times) for times in zip(*(f["ends"] for f in found), strict=True)]
    losses = next(f["losses"] for f in found if f["losses"][0] is not None)
    return {
        "step": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "peak": max(f["peak"] for f in found),
        "first": max(f["first"] for f in found),
        "losses": losses,
        "norms": {k: v for f in found for k, v in f["norms"].items()},
        "limit": found[0]["limit"],
        "load": load(),
    }


def difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float]:
    """The largest relative differences of losses, and of norms of gradients."""
    losses = max(abs(x / y - 1) for x, y in zip(a["losses"], b["losses"], strict=True))
    norms = [abs(v - b["norms"][k]) / max(b["norms"][k], 1e-6) for k, v in a["norms"].items()]
    return losses, max(norms, default=float("nan"))


def measure(settings: list[Setting], cycles: int, python: str) -> list[dict[str, Any]]:
    """A row for each setting: medians over jobs that alternate."""
    found: list[list[dict[str, Any]]] = [[] for _ in settings]
    errors: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for cycle in range(cycles):
            for i, setting in enumerate(settings):
                if i in errors:
                    continue
                got = run(setting, python, Path(name))
                what = f"{cycle + 1}/{cycles} {setting.library} {setting.schedule}"
                if isinstance(got, str):
                    errors[i] = got
                    print(f"{what}: {got}", flush=True)
                    continue
                found[i].append(figures(got))
                last = found[i][-1]
                print(
                    f"{what}: step {last['step']:.3f} s, peak {last['peak'] / 1e6:,.0f} MB,"
                    f" first step {last['first']:.1f} s, load {load()}",
                    flush=True,
                )
    return [
        row(setting, jobs, errors.get(i), found[0])
        for i, (setting, jobs) in enumerate(zip(settings, found, strict=True))
    ]


def row(
    setting: Setting, jobs: list[dict[str, Any]], error: str | None, plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """The figures of a setting."""
    given = asdict(setting)
    if not jobs:
        return {**given, "error": error}
    losses, norms = difference(jobs[0], plain[0]) if plain else (float("nan"),) * 2
    middle = {
        key: statistics.median(job[key] for job in jobs)
        for key in ("step", "peak", "first", "load")
    }
    limits = [job["limit"] for job in jobs if job["limit"]]
    extra = {"limit": statistics.median(limits)} if limits else {}
    return {**given, **middle, **extra, "losses": losses, "norms": norms}


def about(s: Setting) -> str:
    """A scenario in words."""
    count = f"{s.microbatches} microbatches of {s.rows} x {s.tokens} tokens"
    more = [s.dtype, *([s.optimizer] if s.optimizer != "sgd" else [])]
    more += ["recompute"] if s.recompute else []
    more += [f"with and without {s.compile}"] if s.compile else []
    return f"{s.model}, {s.ranks} processes, {count}, {', '.join(more)}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines for a terminal."""
    peers = [r["step"] for r in rows if "step" in r and r["library"] not in ("fpipe", "plain")]
    best = min(peers, default=float("nan"))
    lines = [
        f"{'':28} {'step s':>8} {'of best peer':>12} {'peak MB':>9} {'first s':>8} {'limit':>6}"
        "  losses  gradients"
    ]
    for r in rows:
        name = f"{r['library']} {r['schedule']}{' ' + r['compile'] if r['compile'] else ''}"
        if "error" in r:
            lines.append(f"{name:28} {r['error']}")
            continue
        over = f"{r['step'] / r['limit']:.2f}" if "limit" in r else "-"
        lines.append(
            f"{name:28} {r['step']:8.3f} {r['step'] / best:12.3f} {r['peak'] / 1e6:9,.0f}"
            f" {r['first']:8.1f} {over:>6}  {r['losses']:.0e}  {r['norms']:.0e}"
        )
    return lines


#: What ``make bench ARGS=peers`` runs: what differs from the defaults, and the jobs.
FEW = ["fpipe:1F1B", "fpipe:ZBV", "torch", "deepspeed"]
SCENARIOS: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({"model": "16M", "rows": 2}, []),
    ({"model": "16M", "rows": 2, "ranks": 4}, []),
    ({}, []),
    ({"ranks": 4}, FEW),
    ({"tokens": 512}, FEW),
    ({"dtype": "bfloat16"}, FEW),
    ({"optimizer": "adamw"}, FEW),
    ({"recompute": True}, FEW),
    ({"compile": "inductor"}, FEW),
)


def chosen(base: Setting, only: list[str]) -> list[Setting]:
    """The settings of a scenario: plain PyTorch, and the jobs of ``only``, or all."""
    wanted = [pair.partition(":") for pair in only]
    jobs = [
        (library, name)
        for library, name in JOBS
        if not wanted
        or library == "plain"
        or any(w[0] == library and w[2] in ("", name) for w in wanted)
    ]
    compilers = {"fpipe": ("", "addmm", base.compile)}
    compilers |= dict.fromkeys(("torch", "plain"), ("", base.compile))
    return [
        replace(base, library=library, schedule=name, compile=compiled)
        for library, name in jobs
        for compiled in dict.fromkeys(compilers.get(library, ("",)))
    ]


def main() -> None:
    """Print the tables."""
    parser = options(__doc__, ranks=2, microbatches=8, rows=1, tokens=128, steps=3, cycles=2)
    parser.add_argument("--model", choices=MODELS, default="GPT-2 small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", choices=("inductor",), default="", help="compiled rows too")
    parser.add_argument("--only", nargs="*", default=[], metavar="LIBRARY[:SCHEDULE]")
    parser.add_argument("--scenarios", action="store_true", help="those of the page, in turn")
    parser.add_argument("--python", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    args = vars(parser.parse_args())
    own = {name: args[name] for name in Setting.__dataclass_fields__ if name in args}
    scenarios = SCENARIOS if args["scenarios"] else (({}, args["only"]),)
    python = args["python"] if Path(args["python"]).exists() else sys.executable
    rows = []
    for changes, only in scenarios:
        base = Setting("", "", **{**own, **changes})
        print(about(base), flush=True)
        found = measure(chosen(base, only), args["cycles"], python)
        print("\n".join(table(found)) + "\n", flush=True)
        rows += [{**r, "scenario": about(base)} for r in found]
        save(rows, args["json"])


if __name__ == "__main__":
    main()
