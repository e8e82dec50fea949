"""One process of a job: build the model with a library, train some steps, and write what was seen.

    RANK=0 WORLD_SIZE=2 ... python -m benchmarks.peers.job '{"library": "torch", ...}' OUT

A library's module has ``build(setting, rank) -> Job``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.model import Setting

#: Steps before those that are timed.
WARM = 2


@dataclass
class Job:
    """What a library makes of a setting.

    Attributes:
        step: trains a step, and returns the loss where this process knows it.
        norms: the norms of the gradients here, by name; filled by the first step.
        limit: the least seconds that the step can take by its programs, where that is known.
    """

    step: Callable[[], float | None]
    norms: Mapping[str, float]
    limit: Callable[[], float | None] = lambda: None


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the last ``mark``."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def mark() -> None:
    """Measure the most memory from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main() -> None:
    """Run the job of this process."""
    warnings.filterwarnings("ignore")
    setting, out = Setting(**json.loads(sys.argv[1])), Path(sys.argv[2])
    rank, launched = int(os.environ["RANK"]), float(os.environ["LAUNCHED"])
    import torch

    torch.set_num_threads(1)
    before = memory("VmRSS")
    library = importlib.import_module(f"benchmarks.peers.with_{setting.library}")
    job = library.build(setting, rank)
    losses, ends = [], []
    first = 0.0
    for number in range(WARM + setting.steps):
        if number == WARM:
            mark()
            ends.append(time.monotonic())
        losses.append(job.step())
        if number == 0:
            first = time.time() - launched
        if number >= WARM:
            ends.append(time.monotonic())
    peak = memory("VmHWM") - before
    found = {
        "losses": losses,
        "norms": dict(job.norms),
        "ends": ends,
        "first": first,
        "peak": peak,
        "limit": job.limit(),
    }
    out.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # a library may wait for its threads


if __name__ == "__main__":
    main()
