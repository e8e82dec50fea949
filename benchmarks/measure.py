"""What every benchmark here shares: alternating runs, medians, one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

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
