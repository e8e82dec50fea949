"""A rank killed, stopped or raising at random instructions of a step, with 4 processes: the errors
of the survivors.

    python -m benchmarks.trial_faults                # 20 points each, seeded; a table, and exit
                                                     # code 1 where one failed
    python -m benchmarks.trial_faults --how stop --points 3
    python -m benchmarks.trial_faults --gloo         # messages through gloo, none through memory
    python -m benchmarks.trial_faults --matrix       # who x what x when x how: see fault_matrix.py
    python -m benchmarks.trial_faults --matrix --cells 50 --with what=stop --with when=init,save
    python -m benchmarks.trial_faults --matrix --cells 500 --part 1/10 --json part1.json

Every survivor must raise within the time-out + 5 seconds of the fault, with an error that names
what it waited for, the rank that failed, how it failed, and its last action.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fpipe
from benchmarks import fault_matrix
from benchmarks.stages import residual, square
from fpipe.collectives.c10d import C10dGroup
from fpipe.collectives.shared_memory import SWITCH
from fpipe.engine.execute import WATCH
from fpipe.products.training.outcome import environment, store

RANKS = 4
SCHEDULES = ("1F1B", "ZBV", "Interleaved1F1B", "GPipe", "DualPipeV")
#: the text that the error of a survivor must have about a rank
EXPECTED = {
    "kill": r"[Rr]ank {0} (is gone|does not answer), and its last known action was \S+",
    "stop": r"[Rr]ank {0} does not answer, and its last known action was \S+",
    "raise": r"[Rr]ank {0} \(.+\) raised .*boo",
}


class Point(NamedTuple):
    """Where a fault is to happen: of which rank, after which share of its instructions, in the
    third step.
    """

    how: str
    number: int
    schedule: str
    victim: int
    share: float


def rank_main(folder: str, point: Point, timeout: float, env: dict[str, str]) -> None:
    """In one process: two steps, and one in which the victim fails; a survivor writes the error
    that it raises.
    """
    os.environ.update(env)
    torch.set_num_threads(1)
    group = fpipe.init(timeout=120)  # to start and to trace may take long where there are few cores
    assert isinstance(group, C10dGroup)
    rank = group.here[0]
    plan = fpipe.make_schedule(point.schedule, ranks=RANKS, microbatches=8)
    pipe = fpipe.pipeline([residual] * plan.stages, plan, loss=square, group=group)
    params = pipe.place([torch.randn(8, 8) * 0.1 for _ in range(plan.stages)])
    x = torch.randn(16, 8)
    step = fpipe.value_and_grad(pipe)
    try:
        for number in range(1000):
            if number == 2:
                _shorten(group, timeout)
            if number == 2 and rank == point.victim:
                WATCH.set(lambda bound, phase: enumerate(_fated(bound.steps, point, folder)))
            step(params, x, x)
            time.sleep(0.15)  # the journals are written
    except Exception as error:
        report = {
            "when": time.monotonic(),
            "kind": type(error).__name__,
            "text": str(error),
            "of": str(error.__cause__),
        }
        Path(folder, f"report{rank}.new").write_text(json.dumps(report))
        Path(folder, f"report{rank}.new").rename(Path(folder, f"report{rank}"))


def _shorten(group: C10dGroup, timeout: float) -> None:
    """The time-out that is on trial, now that all have met."""
    group.barrier()
    group._monitor.timeout = timeout


def _fated(steps: Sequence[Any], point: Point, folder: str) -> list[Any]:
    """The steps of one rank, one of which is its last."""
    at = int(point.share * len(steps))

    def fate(r: Any) -> None:
        Path(folder, "fault").write_text(json.dumps([time.monotonic(), at, len(steps)]))
        if point.how == "raise":
            raise ValueError("boo")
        os.kill(os.getpid(), signal.SIGKILL if point.how == "kill" else signal.SIGSTOP)

    return [*steps[:at], fate, *steps[at + 1 :]]


def trial(point: Point, timeout: float) -> tuple[bool, str]:
    """Whether every survivor raised the right error in time, and a line of the table."""
    context = mp.get_context("forkserver")
    tcp_store = store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            env = environment(rank, RANKS, tcp_store)
            children.append(
                context.Process(target=rank_main, args=(folder, point, timeout, env), daemon=True)
            )
            children[-1].start()
        survivors = [rank for rank in range(RANKS) if rank != point.victim]
        end = time.monotonic() + 120 + 2 * timeout
        begun = None
        while time.monotonic() < end and not all(
            Path(folder, f"report{rank}").exists() for rank in survivors
        ):
            if begun is None and Path(folder, "fault").exists():
                begun = time.monotonic()
                end = begun + timeout + 10
            if begun is None and all(child.exitcode is not None for child in children):
                break
            time.sleep(0.05)
        for child in children:
            child.kill()
            child.join()
        return _judge(point, timeout, Path(folder), survivors)


def _judge(point: Point, timeout: float, folder: Path, survivors: list[int]) -> tuple[bool, str]:
    where = f"{point.how:6}{point.number:3}  {point.schedule:16} rank {point.victim}"
    if not (folder / "fault").exists():
        text = " | ".join(path.read_text() for path in folder.glob("report*"))
        return False, f"{where}  NO FAULT HAPPENED: {text or 'no rank reported an error'}"
    when, at, count = json.loads((folder / "fault").read_text())
    wrong, latest = [], 0.0
    for rank in survivors:
        path = folder / f"report{rank}"
        if not path.exists():
            wrong.append(f"rank {rank} HANGS")
            continue
        report = json.loads(path.read_text())
        latest = max(latest, report["when"] - when)
        if report["when"] - when > timeout + 5:
            wrong.append(
                f"rank {rank} LATE by {report['when'] - when - timeout - 5:.1f} s: {report['text']}"
            )
        right = (
            report["kind"] in ("PeerError", "StalledError")
            and re.match(rf"rank {rank} \(.+\) waited ", report["text"])
            and re.search(EXPECTED[point.how].format(point.victim), report["text"])
            and f"Look at rank {point.victim} first" in report["text"]
        )
        if not right:
            wrong.append(f"rank {rank} RAISED {report['kind']}: {report['text']}")
    line = f"{where}  instruction {at:3} of {count:3}  all raised after {latest:5.1f} s  "
    return not wrong, line + ("right" if not wrong else "; ".join(wrong))


def main() -> int:
    """All trials; how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--how", choices=list(EXPECTED), nargs="*", default=list(EXPECTED))
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of the points to try")
    parser.add_argument(
        "--gloo", action="store_true", help="messages through gloo, none through memory"
    )
    parser.add_argument("--at-once", type=int, default=1, help="trials side by side")
    parser.add_argument("--matrix", action="store_true", help="the matrix of faults")
    parser.add_argument("--cells", type=int, help="of the matrix: so many cells, at random")
    parser.add_argument(
        "--with",
        dest="values",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the matrix",
    )
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="of the matrix: the K-th of N parts"
    )
    parser.add_argument("--verbose", action="store_true", help="of the matrix: print every cell")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="of the matrix: write the results to this file; cells that it has do not run again",
    )
    options = parser.parse_args()
    if options.matrix:
        chosen = fault_matrix.choose(options.cells, options.values, options.seed, options.part)
        return fault_matrix.run(
            chosen, options.timeout, options.at_once, options.json, options.verbose
        )
    if options.gloo:
        os.environ[SWITCH] = "0"  # the children are started with it
    mp.get_context("forkserver").set_forkserver_preload(
        ["torch", "torch.distributed", "fpipe.collectives.setup"]
    )
    draw = random.Random(options.seed)
    points = [
        Point(how, number, draw.choice(SCHEDULES), draw.randrange(RANKS), draw.random())
        for how in EXPECTED
        for number in range(options.points)
    ]
    points = [
        p
        for p in points
        if p.how in options.how and (options.only is None or p.number in options.only)
    ]
    right = dict.fromkeys(options.how, 0)
    with ThreadPoolExecutor(options.at_once) as pool:
        for point, (well, line) in zip(
            points, pool.map(lambda p: trial(p, options.timeout), points), strict=True
        ):
            right[point.how] += well
            print(line, flush=True)
    for how, count in right.items():
        print(f"{how}: {count} of {sum(p.how == how for p in points)}")
    return 0 if sum(right.values()) == len(points) else 1


if __name__ == "__main__":
    sys.exit(main())
