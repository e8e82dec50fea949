"""What every benchmark here shares: alternating runs, medians, one thread, and a note of what it all ran on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def alternate(runs: Sequence[Callable[[], object]], rounds: int = 30, warmup: int = 5) -> list[list[float]]:
    """Seconds of each function in each round, the functions taking turns."""
    torch.set_num_threads(1)
    for _ in range(warmup):
        for run in runs:
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, kept in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            kept.append(time.perf_counter() - start)
    return times


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of the ratios of neighbouring runs."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def begin(group: Any, ahead: float = 5e-3) -> float:
    """The moment at which all processes of a group on one host begin: agreed on, and waited for without sleeping.

    Out of a barrier they come one after the other, by half a millisecond here: as long as a small stage takes.
    """
    soon = max(group.gather_objects(time.perf_counter())) + ahead  # one clock for all processes of a host
    while time.perf_counter() < soon:
        pass
    return soon


def load() -> float:
    """How many processes wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else float("nan")


def about(before: float) -> dict[str, object]:
    """What a benchmark ran on, and the load before and after it."""
    return {
        "processor": _processor(), "cores": os.cpu_count(), "system": platform.system(), "torch": torch.__version__,
        "python": platform.python_version(), "load": [before, load()],
        "day": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
