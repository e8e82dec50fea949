"""Run all CPU benchmarks in turn; print tables, write JSON to results/ and the page
docs/performance.md.

    python -m benchmarks [NAME ...] [--quick] [--into FOLDER]

Each runs in its own process, with one thread per process. The machine should be idle: each file
records the load before and after. ``--quick`` takes few rounds and writes no results; it checks
that all benchmarks run. The benchmarks of a GPU and of peers run only if they are named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import save
from benchmarks.measure import about, load
from benchmarks.report import PAGE, RESULTS, folder, write

NARROW = ("--narrow", "200mbit", "--mb", "1")
FOUR = ("--ranks", "4", "--sizes", "medium")
EIGHT = ("--ranks", "8", "--microbatches", "16")
SIXTEEN = ("--ranks", "16", "--microbatches", "32")

#: name -> (module, its arguments, the arguments of a quick run)
BENCHES: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "torch": ("bench_torch", ("--rounds", "25"), ("--rounds", "2", "--sizes", "small")),
    "torch4": (
        "bench_torch",
        ("--rounds", "15", *FOUR),
        ("--rounds", "1", *FOUR, "--schedules", "ZBVZeroBubble"),
    ),
    "gloo": (
        "bench_torch",
        ("--rounds", "15", "--gloo"),
        ("--rounds", "1", "--sizes", "small", "--gloo"),
    ),
    "hosts": (
        "bench_torch",
        ("--rounds", "15", "--narrow", "200mbit"),
        ("--rounds", "1", "--sizes", "small", "--narrow", "200mbit"),
    ),
    "many8": (
        "bench_torch",
        ("--rounds", "5", *EIGHT),
        ("--rounds", "1", *EIGHT, "--schedules", "1F1B"),
    ),
    "many16": (
        "bench_torch",
        ("--rounds", "3", *SIXTEEN),
        ("--rounds", "1", *SIXTEEN, "--schedules", "1F1B"),
    ),
    "pipelining": ("bench_pipelining", ("--rounds", "25"), ("--rounds", "1", "--sizes", "small")),
    "limit": ("bench_limit", ("--rounds", "25"), ("--rounds", "2", "--sizes", "small")),
    "split": ("bench_split", ("--rounds", "60"), ("--rounds", "2")),
    "runner": ("bench_runner", (), ("--rounds", "2")),
    "cold": ("bench_cold", (), ("--starts", "1")),
    "scale": ("bench_scale", (), ("--rounds", "1", "--schedules", "1F1B")),
    "lengths": ("bench_lengths", (), ("--rounds", "1", "--lengths", "4")),
    "schedules": (
        "bench_schedules",
        (),
        ("--ranks", "8", "--microbatches", "16", "--rounds", "1", "--large", "0"),
    ),
    "solver": ("bench_solver", (), ("--seconds", "0.2", "--cases", "1", "--rounds", "1")),
    "optimizer": ("bench_optimizer", (), ("--rounds", "2", "--sides", "32")),
    "vocabulary": (
        "bench_vocabulary",
        ("--errors",),
        ("--vocabulary", "512", "--tokens", "32", "--width", "16", "--errors"),
    ),
    "overlap": (
        "bench_overlap",
        ("--torch", "--width", "64"),
        ("--rounds", "1", "--mb", "1", "--microbatches", "4"),
    ),
    "narrow": (
        "bench_overlap",
        (*NARROW, "--microbatches", "24", "--rounds", "3", "--torch"),
        (*NARROW, "--microbatches", "4", "--rounds", "1", "--layers", "4"),
    ),
    "late": ("bench_late", (), ("--seeds", "1", "--microbatches", "8", "--milliseconds", "2")),
    "peers": (
        "bench_peers",
        ("--scenarios",),
        ("--model", "tiny", "--cycles", "1", "--steps", "1", "--only", "fpipe:ZBV", "torch:ZBV"),
    ),
    "gpu": (
        "bench_gpu",
        (),
        ("--rounds", "1", "--width", "256", "--tokens", "64", "--hidden", "512"),
    ),
}
DEFAULT = [name for name in BENCHES if name not in ("gpu", "peers")]
#: benchmark -> commands that it needs, besides root
NEEDED = dict.fromkeys(("narrow", "hosts"), ("ip", "tc"))


def run(name: str, quick: bool, into: Path) -> int:
    """Run one benchmark, and write its results with a description of the machine."""
    if name in NEEDED and (os.geteuid() != 0 or not all(map(shutil.which, NEEDED[name]))):
        print(f"\n---- {name} is skipped: it needs root and the commands {', '.join(NEEDED[name])}")
        return 0
    module, full, short = BENCHES[name]
    print(f"\n---- {name}: {module}, load {load()} " + "-" * 40 + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found, before = Path(folder, "found.json"), load()
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            *(short if quick else full),
            "--json",
            str(found),
        ]
        status = subprocess.run(command, check=False).returncode
        if found.exists() and status == 0 and not quick:
            rows = json.loads(found.read_text(encoding="utf-8"))
            into.mkdir(exist_ok=True, parents=True)
            save({"about": about(before), "rows": rows}, into / f"{name}.json")
    return status


def main() -> int:
    """Run those that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(BENCHES)}; all but gpu and peers by default"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--into", type=Path, default=folder(torch.__version__))
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHES)
    if unknown:
        parser.error(
            f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}"
        )
    failed = [name for name in given.names or DEFAULT if run(name, given.quick, given.into)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
        return 1
    if not given.quick and given.into.is_relative_to(RESULTS) and RESULTS.exists():
        write(PAGE)
        print(
            f"\nwrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
