"""From a cold process to the first step: 32 stages of one block function, traced, lowered, bound
and run.

Each schedule starts in a new process that has imported torch and traced nothing. A second pipeline
of the same functions must then trace nothing. The minimum of several starts counts, since other
load only adds time. Loading the modules behind ``fpipe.pipeline`` is a column of its own; torch is
loaded before.

    python -m benchmarks.bench_cold [--starts 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.command import options, save

STAGES, MICROBATCHES, WIDTH, TOKENS = 32, 8, 256, 64
#: schedule, ranks of a local group; and, over processes, gloo
CASES = (
    ("1F1B", 32, False),
    ("Interleaved1F1B", 4, False),
    ("ZBVZeroBubble", 16, False),
    ("Interleaved1F1B", 2, True),
)
LIMIT = 3.0


def start(name: str, ranks: int, processes: bool) -> dict[str, Any]:
    """Seconds of a cold start, in this process or in one a rank."""
    if not processes:
        return _start(name, ranks)
    import fpipe

    return max(
        fpipe.launch(_start, name, 0, ranks=ranks), key=lambda found: found["first pipeline"]
    )


def _start(name: str, ranks: int) -> dict[str, Any]:
    import torch

    worked = time.process_time()
    import fpipe

    create, transform = fpipe.pipeline, fpipe.value_and_grad
    loaded = time.process_time() - worked
    from benchmarks.bench_torch import make, square, stage
    from fpipe.programs import cache

    torch.set_num_threads(1)
    traces = [0]
    trace = cache._trace

    def counted(*args: Any) -> Any:
        traces[0] += 1
        return trace(*args)

    cache._trace = counted
    group = fpipe.local(ranks) if ranks else fpipe.init(device="cpu")
    params, x = make(STAGES, WIDTH, 1), torch.randn(MICROBATCHES, TOKENS, WIDTH)
    found: dict[str, Any] = {"import cpu": loaded}
    for which in ("first", "second"):
        group.barrier()
        before, worked, count = time.perf_counter(), time.process_time(), traces[0]
        pipe = create([stage] * STAGES, name, loss=square, microbatches=MICROBATCHES, group=group)
        step, placed = transform(pipe), pipe.place(params)
        step(placed, x, x)
        found[f"{which} pipeline"] = time.perf_counter() - before
        found[f"{which} pipeline cpu"] = time.process_time() - worked
        found[f"{which} traces"] = traces[0] - count
        before = time.perf_counter()
        step(placed, x, x)
        found["warm step"] = time.perf_counter() - before
    return found


def main() -> None:
    """Print the table."""
    parser = options(__doc__, starts=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args.one[0], int(args.one[1]), args.one[2] == "True")))
        return
    rows = []
    print(
        f"{STAGES} stages, {MICROBATCHES} microbatches; seconds, at most {LIMIT:g} for the first\n"
    )
    columns = "import", "first", "CPU", "traces", "second", "CPU", "traces", "warm"
    print(f"{'schedule':18} {'ranks':>12}", *(f"{column:>7}" for column in columns))
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.bench_cold", "--one", *map(str, case)]
        outs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for _ in range(args.starts)
        ]
        best = min((json.loads(out) for out in outs), key=lambda found: found["first pipeline"])
        name, ranks, processes = case
        where = f"{ranks} {'processes' if processes else 'local'}"
        rows.append({"schedule": name, "ranks": where, **best})
        cells = (
            f"{best[f'{k} pipeline']:7.2f} {best[f'{k} pipeline cpu']:7.2f} "
            f"{best[f'{k} traces']:7d}"
            for k in ("first", "second")
        )
        print(
            f"{name:18} {where:>12} {best['import cpu']:7.2f}",
            *cells,
            f"{best['warm step']:7.3f}",
            flush=True,
        )
    save(rows, args.json)


if __name__ == "__main__":
    main()
