"""The time to build, check and simulate schedules: medians of alternating rounds.

Also one large case in its own process, with its peak memory. Torch is never imported.

    python -m benchmarks.bench_schedules [--ranks 64] [--microbatches 512] [--rounds 5] [--json
    FILE]
"""

from __future__ import annotations

import gc
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


def clocked(times: list[float], call: Callable[[], object]) -> object:
    """Call, and append the seconds that it took."""
    before = time.perf_counter()
    value = call()
    times.append(time.perf_counter() - before)
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


LARGE = """
import resource, time
from fpipe.generators import make_schedule
made = make_schedule("{name}", {ranks}, {microbatches})
before = time.perf_counter()
total = made.check().simulate().total
seconds = time.perf_counter() - before
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sum(map(len, made)))
"""


def large(name: str, ranks: int, microbatches: int) -> dict[str, float]:
    """Seconds of check and simulate, the most bytes held, and the count of actions; in a fresh
    process.
    """
    script = LARGE.format(name=name, ranks=ranks, microbatches=microbatches)
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    unit = 1 if sys.platform == "darwin" else 1024
    return {"check + simulate": float(out[0]), "bytes": int(out[1]) * unit, "actions": int(out[2])}


def start_up() -> float:
    """Median seconds of importing fpipe.schedule beyond those of an empty Python."""
    empty, full = [], []
    for _ in range(9):
        for script, times in (("pass", empty), ("import fpipe.schedule", full)):
            clocked(
                times,
                lambda script=script: subprocess.run([sys.executable, "-c", script], check=True),
            )
    return statistics.median(full) - statistics.median(empty)


def main() -> None:
    """Print the table, or JSON."""
    parser = options(__doc__, ranks=64, microbatches=512, rounds=5)
    parser.add_argument("names", nargs="*", help="schedules; all by default")
    parser.add_argument(
        "--large", default="256x2048", help="ranks x microbatches of the large 1F1B; empty for none"
    )
    given = parser.parse_args()
    table = measure(
        given.names or list(schedule_names()), given.ranks, given.microbatches, given.rounds
    )
    found: dict[str, object] = {"schedules": table, "import": start_up()}
    if given.large:
        found["large"] = large("1F1B", *map(int, given.large.split("x")))
    print(
        f"{given.ranks} ranks, {given.microbatches} microbatches, seconds (median of "
        f"{given.rounds})\n"
    )
    columns = ("actions", *STEPS, "all")
    print(f"{'':22}" + "".join(f"{column:>10}" for column in columns) + "   (all: without figures)")
    for name, row in table.items():
        cells = (f"{row[c]:>10}" if c == "actions" else f"{row[c]:>10.3f}" for c in columns)
        print(f"{name:22}" + "".join(cells))
    print(f"\nimport fpipe.schedule: {found['import']:.3f} s beyond an empty Python")
    if given.large:
        big: dict[str, float] = found["large"]  # type: ignore[assignment]
        print(
            f"1F1B {given.large}: {big['actions']:.0f} actions, check + simulate "
            f"{big['check + simulate']:.2f} s, "
            f"at most {big['bytes'] / 2**30:.2f} GiB"
        )
    save(found, given.json)


if __name__ == "__main__":
    main()
