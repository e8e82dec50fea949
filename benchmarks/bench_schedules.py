"""The time to build, check and simulate schedules, of the processor: medians of alternating rounds.

Also large cases, each in its own process, with its peak memory, and ``fpipe compare``. Torch is
never imported.

    python -m benchmarks.bench_schedules [--ranks 64] [--microbatches 512] [--rounds 5]
                                         [--large 3] [--json FILE]
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.command import options, save
from fpipe.actions.timeline import Timeline
from fpipe.errors import ScheduleError
from fpipe.generators import make_schedule, schedule_names

STEPS = ("make", "check", "simulate", "figures")
#: (schedule, ranks, microbatches) -> seconds of the processor and GiB that it may take
LARGE = {
    ("1F1B", 256, 2048): (0.4, 1.0),
    ("ZBVZeroBubble", 256, 2048): (1.0, 1.0),
    ("1F1B", 1024, 8192): (8.0, 1.0),
}
COMPARE = ("compare", "--ranks", "64", "--microbatches", "512"), 3.0


def clocked(
    times: list[float], call: Callable[[], object], clock: Callable[[], float] = time.process_time
) -> object:
    """Call, and append the seconds that it took."""
    before = clock()
    value = call()
    times.append(clock() - before)
    return value


def figures(timeline: Timeline) -> object:
    """What a table of schedules shows."""
    return timeline.total, timeline.bubble, timeline.peak


def measure(
    names: list[str], ranks: int, microbatches: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Name -> median seconds of each step, how many actions there are, and the sum of the first
    three steps.
    """
    times: dict[str, dict[str, list[float]]] = {
        name: {step: [] for step in STEPS} for name in names
    }
    actions: dict[str, int] = {}
    for _ in range(rounds):
        for name in names:
            gc.collect()
            try:
                made = clocked(
                    times[name]["make"], lambda name=name: make_schedule(name, ranks, microbatches)
                )
            except ScheduleError:
                continue  # not for these counts
            clocked(times[name]["check"], made.check)  # type: ignore[attr-defined]
            timeline = clocked(times[name]["simulate"], made.simulate)  # type: ignore[attr-defined]
            clocked(times[name]["figures"], lambda timeline=timeline: figures(timeline))  # type: ignore[arg-type]
            actions[name] = sum(map(len, made))  # type: ignore[arg-type]
    table = {}
    for name in actions:
        row = {step: statistics.median(times[name][step]) for step in STEPS}
        sums = map(sum, zip(*(times[name][step] for step in STEPS[:3]), strict=True))
        table[name] = {"actions": actions[name], **row, "all": statistics.median(sums)}
    return table


SCRIPT = """
import json, resource, sys, time
from fpipe.generators import make_schedule
times = [time.process_time()]
made = make_schedule(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
times.append(time.process_time())
made.check().simulate().total
times.append(time.process_time())
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before all actions are made
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps({"actions": sum(map(len, made)), "make": times[1] - times[0],
                  "check + simulate": times[2] - times[1], "all": times[2] - times[0],
                  "GiB": held * unit / 2**30}))
"""


def large(name: str, ranks: int, microbatches: int) -> dict[str, float]:
    """Seconds of the processor to make, and to check and simulate, and GiB; in a fresh process."""
    command = [sys.executable, "-c", SCRIPT, name, str(ranks), str(microbatches)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare() -> dict[str, float]:
    """Seconds of the processor of ``fpipe compare``."""
    command = [sys.executable, "-m", "fpipe", *COMPARE[0]]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"all": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def large_cases(rounds: int) -> list[dict[str, object]]:
    """Of each large case and of ``fpipe compare``: the round that took least, since other work on
    the machine only adds, and what it may take.
    """
    found: dict[str, list[dict[str, float]]] = {}
    most = {}
    for _ in range(rounds):
        for (name, ranks, microbatches), limits in LARGE.items():
            case = f"{name}, {ranks:,} ranks, {microbatches:,} microbatches"
            found.setdefault(case, []).append(large(name, ranks, microbatches))
            most[case] = {"at most s": limits[0], "at most GiB": limits[1]}
        case = f"`fpipe {' '.join(COMPARE[0])}`"
        found.setdefault(case, []).append(compare())
        most[case] = {"at most s": COMPARE[1]}
    return [
        {
            "case": case,
            **min(rows, key=lambda row: row["all"]),
            **most[case],
        }
        for case, rows in found.items()
    ]


def start_up() -> float:
    """Median seconds of importing fpipe.schedule beyond those of an empty Python."""
    empty, full = [], []
    for _ in range(9):
        for script, times in (("pass", empty), ("import fpipe.schedule", full)):
            clocked(
                times,
                lambda script=script: subprocess.run([sys.executable, "-c", script], check=True),
                time.perf_counter,
            )
    return statistics.median(full) - statistics.median(empty)


def main() -> None:
    """Print the table, or JSON."""
    parser = options(__doc__, ranks=64, microbatches=512, rounds=5)
    parser.add_argument("names", nargs="*", help="schedules; all by default")
    parser.add_argument("--large", type=int, default=3, help="rounds of the large cases; 0: none")
    given = parser.parse_args()
    table = measure(
        given.names or list(schedule_names()), given.ranks, given.microbatches, given.rounds
    )
    cases = large_cases(given.large)
    found: dict[str, object] = {"schedules": table, "import": start_up(), "large": cases}
    print(
        f"{given.ranks} ranks, {given.microbatches} microbatches, seconds of the processor (median "
        f"of {given.rounds})\n"
    )
    columns = ("actions", *STEPS, "all")
    print(f"{'':22}" + "".join(f"{column:>10}" for column in columns) + "   (all: without figures)")
    for name, row in table.items():
        cells = (f"{row[c]:>10}" if c == "actions" else f"{row[c]:>10.3f}" for c in columns)
        print(f"{name:22}" + "".join(cells))
    print(f"\nimport fpipe.schedule: {found['import']:.3f} s beyond an empty Python")
    for row in cases:
        memory = f", {row['GiB']:.2f} GiB" if "GiB" in row else ""
        print(f"{row['case']}: {row['all']:.2f} s of the processor{memory}")
    save(found, given.json)


if __name__ == "__main__":
    main()
