"""Copies of a pipeline and their lighthouse killed at random moments of a run, with 3 copies of 2
processes.

    python -m benchmarks.trial_copies                # 20 runs of 60 steps, seeded; a line each, a
                                                     # table, and exit code 1 where one failed
    python -m benchmarks.trial_copies --only 3 7     # these runs alone
    python -m benchmarks.trial_copies --runs 4 --seed 1

Each run has two faults. Their kinds are

    copy        a process, at any moment of a step
    commit      a process, while the ranks of its copy agree that a step counts
    quorum      a process, while the copies find out who takes part
    transfer    a process, and when its copy is back and takes over a state, one more: of the copy
                that sends, of the one that receives, or of the third
    lighthouse  the lighthouse, which returns on its port 0.5 to 2 seconds later

All others must finish their next steps within 10 seconds of each other and of the fault. Each copy
that was lost must return and take over a state. At the end, each process must have the parameters
and the optimizer state of plain autograd, bit for bit: in each step the mean over the members,
added in the order of the copies. The log must name these members.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import fpipe
from benchmarks.copy_faults import COUNT, RANKS, STEPS, Fault, Notes, expected, same, train
from fpipe.products.training.elastic import COPIES, COPY, LIGHTHOUSE, import_torchft
from fpipe.products.training.outcome import store

LIMIT = 10.0  #: seconds until the others go on
AWAY = 2.0  #: seconds after which a copy is started again
KINDS = ("copy", "commit", "quorum", "transfer", "lighthouse")
#: Imported once, before processes are forked.
PRELOADED = (
    "benchmarks.copy_faults",
    "fpipe.collectives.setup",
    "fpipe.engine.prepare",
    "fpipe.engine.gradients",
    "torch._dynamo",
    "torchft.coordination",
)


class Outcome(NamedTuple):
    """Of a run: what went wrong, the kills with the longest time until all others had gone on, and
    how long it took.
    """

    wrong: list[str]
    kills: list[tuple[str, float]]
    seconds: float


def faults_of(number: int, seed: int) -> list[Fault]:
    """The two faults of a run."""
    draw = random.Random(f"{seed}/{number}")
    kinds = KINDS[number % len(KINDS)], draw.choice(KINDS)
    return [
        Fault(
            kind,
            draw.randrange(start, start + 10),
            draw.randrange(COUNT),
            draw.randrange(RANKS),
            draw.random(),
            draw.choice(("sends", "receives", "looks on")),
            draw.randrange(10),
            draw.uniform(0.5, 2.0),
        )
        for kind, start in zip(kinds, (5, 25), strict=True)
    ]


# ---- one run ----
def serve(port: int) -> None:
    """In a process of its own: a lighthouse."""
    serving = None
    while serving is None:
        try:
            serving = import_torchft("torchft.coordination").LighthouseServer(
                bind=f"127.0.0.1:{port}",
                min_replicas=1,
                heartbeat_timeout_ms=2_000,
                join_timeout_ms=60_000,
            )
        except RuntimeError:  # the port is free a moment after the last one has ended
            time.sleep(0.05)
    threading.Event().wait()


def lighthouses(notes: Notes, faults: Sequence[Fault], port: int, ended: threading.Event) -> None:
    """Serve a lighthouse, and kill and start it where faults say so."""
    context = mp.get_context("forkserver")

    def started() -> Any:
        process = context.Process(target=serve, args=(port,), daemon=True)
        process.start()
        return process

    process = started()
    while not ended.wait(0.01):
        for number, fault in enumerate(faults):
            fallen = notes.happened(f"lighthouse-{number}")
            if fallen and notes.once(f"dark-{number}"):
                process.kill()
                process.join()
                notes.add("kill-lighthouse", kind="lighthouse", copy=None, rank=None)
                time.sleep(fault.away)
                process = started()
    process.kill()
    process.join()


def copies(notes: Notes, faults: Sequence[Fault], port: int) -> list[list[Any]]:
    """The results of each copy by rank, none of one that failed for good; a copy that fails is
    started again.
    """
    results: list[list[Any]] = [[] for _ in range(COUNT)]

    def run(copy: int) -> None:
        env = {LIGHTHOUSE: f"http://127.0.0.1:{port}", COPY: str(copy), COPIES: str(COUNT)}
        for _ in range(4):
            try:
                results[copy] = fpipe.launch(
                    train, notes.folder, faults, ranks=RANKS, env=env, timeout=240
                )
            except Exception as error:  # of the user's function, or of the processes
                notes.add(f"error-{copy}", copy=copy, text=str(error))
                time.sleep(AWAY)
            else:
                return

    threads = [threading.Thread(target=run, args=(copy,)) for copy in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def trial(faults: Sequence[Fault], notes: Notes) -> Outcome:
    """One run, judged."""
    port = store("127.0.0.1").port  # free when the store is gone
    ended = threading.Event()
    began = time.monotonic()
    watcher = threading.Thread(target=lighthouses, args=(notes, faults, port, ended))
    watcher.start()
    results = copies(notes, faults, port)
    ended.set()
    watcher.join()
    seconds = time.monotonic() - began
    kills = notes.read("kill-*")
    last_kills = {kill["copy"]: kill["when"] for kill in kills if kill["copy"] is not None}
    wrong = [*unlike(results, notes), *not_returned(last_kills, notes)]
    wrong += [
        f"fault {fault.kind} did not happen"
        for number, fault in enumerate(faults)
        if not notes.happened(f"{'transfer' if fault.kind == 'transfer' else 'fault'}-{number}")
    ]
    stalls = []
    for kill in kills:
        stall, copy = max(stalls_after(kill, kills, notes), default=(0.0, None))
        stalls.append((kill["kind"], stall))
        if stall > LIMIT:
            wrong.append(f"copy {copy} went on {stall:.1f} s after {kill['kind']}")
    return Outcome(wrong, stalls, seconds)


def unlike(results: Sequence[Sequence[Any]], notes: Notes) -> list[str]:
    """What is not as the members of the steps say: parameters, states, the log."""
    steps = {row["step"]: row for row in notes.read("done-*")}
    if sorted(steps) != list(range(1, STEPS + 1)):
        return [f"steps {sorted(set(range(1, STEPS + 1)).difference(steps))} were not done"]
    want = expected([steps[step]["members"] for step in sorted(steps)])
    wrong = []
    for copy, ranks in enumerate(results):
        if not ranks:
            wrong.append(f"copy {copy} FAILED: {notes.read(f'error-{copy}*')[-1]['text'][-600:]}")
        for rank, found in enumerate(ranks):
            if not same(found, want):
                wrong.append(f"OTHER BITS in copy {copy}, rank {rank}")
    log = {row["step"]: row for row in notes.read("log-*")}
    for step, row in steps.items():
        if step not in log:
            wrong.append(f"step {step} is not in the log")
        elif log[step]["members"] != row["members"]:
            wrong.append(f"the log of step {step} has {log[step]['members']}, not {row['members']}")
    return wrong


def not_returned(last_kills: dict[int, float], notes: Notes) -> list[str]:
    """Copies that were lost, and did not take over a state and the steps that it has."""
    last = [member for row in notes.read("done-*")[-1:] for member in row["members"]]
    return [
        f"copy {copy} did not return"
        for copy, when in last_kills.items()
        if copy not in last
        or not any(row["when"] > when for row in notes.read(f"taken-{copy}.jsonl"))
    ]


def stalls_after(
    kill: dict[str, Any], kills: Sequence[dict[str, Any]], notes: Notes
) -> list[tuple[float, int]]:
    """Of each copy that was not killed: the longest time between the fault and its next three
    finished steps.
    """
    found = []
    for copy in range(COUNT):
        later = [k["when"] for k in kills if k["copy"] == copy and k["when"] >= kill["when"]]
        until = min(later, default=float("inf"))
        times = [row["when"] for row in notes.read(f"done-{copy}.jsonl")]
        times = [when for when in times if kill["when"] < when < until][:3]
        starts = [row["when"] for row in notes.read(f"start-{copy}.jsonl")]
        ends = [k["when"] for k in kills if k["copy"] == copy and k["when"] < kill["when"]]
        absent = max([s for s in starts if s < kill["when"]], default=0.0) < max(ends, default=0.0)
        if copy != kill["copy"] and not absent and times:
            stall = max(after - before for before, after in pairwise([kill["when"], *times]))
            found.append((stall, copy))
    return found


def main() -> int:
    """All runs; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of the runs to try")
    parser.add_argument("--keep", action="store_true", help="keep the notes of runs that failed")
    options = parser.parse_args()
    for name in ("RUST_LOG", "TORCH_CPP_LOG_LEVEL"):  # of each request, and of each lost connection
        os.environ.setdefault(name, "ERROR")
    mp.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    outcomes = []
    for number in options.only if options.only is not None else range(options.runs):
        faults = faults_of(number, options.seed)
        notes = Notes(Path(tempfile.mkdtemp(prefix=f"copies-{number}-")))
        outcome = trial(faults, notes)
        outcomes.append(outcome)
        kills = ", ".join(f"{kind}: {stall:.1f} s" for kind, stall in outcome.kills)
        load = os.getloadavg()[0]
        print(
            f"{number:3}  {outcome.seconds:5.1f} s  load {load:4.1f}  {kills}  "
            f"{'; '.join(outcome.wrong) or 'right'}",
            flush=True,
        )
        if options.keep and outcome.wrong:
            print(f"     {notes.folder}")
        else:
            shutil.rmtree(notes.folder)
    print("\nkilled                            times   others went on after: median, longest")
    every = [kill for outcome in outcomes for kill in outcome.kills]
    for kind in sorted({kind for kind, _ in every}):
        stalls = sorted(stall for other, stall in every if other == kind)
        print(f"{kind:33} {len(stalls):5}   {stalls[len(stalls) // 2]:5.1f} s, {stalls[-1]:5.1f} s")
    right = sum(not outcome.wrong for outcome in outcomes)
    print(f"{right} of {len(outcomes)} runs right")
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
