"""Shared by all benchmarks: alternating runs, medians, one thread, and a description of the
machine.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


def alternate(
    runs: Sequence[Callable[[], object]],
    rounds: int = 30,
    warmup: int = 5,
    clock: Callable[[], float] = perf_counter,
) -> list[list[float]]:
    """Seconds of each function in each round; the functions alternate."""
    torch.set_num_threads(1)
    for _ in range(warmup):
        for run in runs:
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            start = clock()
            run()
            seconds.append(clock() - start)
    return times


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of the ratios of neighbouring runs."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def begin(group: Any, ahead: float = 5e-3) -> float:
    """Wait, without sleeping, for a common start time of all processes of a group on one host, and
    return it.

    After a barrier alone they start up to half a millisecond apart, which is the length of a small
    stage.
    """
    start_time = (
        max(group.gather_objects(time.perf_counter())) + ahead
    )  # one clock for all processes of a host
    while time.perf_counter() < start_time:
        pass
    return start_time


def peak(step: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a step allocates on a device, beyond what was there before it; 0 on a
    CPU.
    """
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    kept = step()
    torch.accelerator.synchronize(device)
    most = module.max_memory_allocated(device) - before
    del kept
    return most


def load() -> float:
    """The mean number of runnable processes over the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else float("nan")


def about(before: float) -> dict[str, object]:
    """The machine and its load before and after a benchmark."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [before, load()],
        "real time": _real_time(),
        "day": datetime.now(UTC).date().isoformat(),
    }


def _real_time() -> bool:
    """Whether this process, and those that it starts, run before ordinary ones, as under
    ``chrt -r 5``.
    """
    return hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (
        os.SCHED_RR,
        os.SCHED_FIFO,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
