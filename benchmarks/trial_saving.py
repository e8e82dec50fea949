"""What a checkpoint that is written behind the next steps costs: blocks of steps with one save and
without, in turn.

python benchmarks/trial_saving.py                       # 96 MiB of parameters and moments every 25
steps, local ranks python benchmarks/trial_saving.py --width 512 --every 100

The time in ``save`` is that of the copy to the host; the rest is what hashing and writing take from
the steps. The ratio of processor times counts the threads that write as if they ran in place of the
steps. Both are ratios of the shortest blocks, which other load delays least.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch

import fpipe
from benchmarks.command import options, save
from benchmarks.stages import residual, square

STAGES, MICROBATCHES = 8, 8


def main() -> None:
    """Measure, and print the ratio."""
    parser = options(__doc__, width=1024, rows=64, every=25, rounds=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    stages = [fpipe.Stage(residual, name=f"block{n}") for n in range(STAGES)]
    pipe = fpipe.pipeline(
        stages, "ZBV", loss=square, microbatches=MICROBATCHES, group=fpipe.local(4)
    )
    params = [torch.randn(given.width, given.width) / 99 for _ in range(STAGES)]
    x = torch.randn(MICROBATCHES * given.rows, given.width)
    tx, step = fpipe.adamw(1e-3), fpipe.value_and_grad(pipe)
    state, folder = tx.init(params), Path(tempfile.mkdtemp())

    def block(path: Path | None) -> tuple[float, float, float]:
        nonlocal params, state
        began, busy, saving, copying = time.perf_counter(), time.process_time(), None, 0.0
        for number in range(given.every):
            _, grads = step(params, x, x)
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)
            if path is not None and number == 0:
                before = time.perf_counter()
                saving = fpipe.save(path, pipe, params=params, state=state, wait=False)
                copying = time.perf_counter() - before
        if saving is not None:
            saving.wait()  # within the time
        return time.perf_counter() - began, time.process_time() - busy, copying

    block(None)
    rows = [(*block(None)[:2], *block(folder / str(n))) for n in range(given.rounds)]
    size = sum(file.stat().st_size for file in (folder / "0").iterdir())
    shutil.rmtree(folder)
    plain, busy, saved, busier, copying = map(min, zip(*rows, strict=True))
    print(
        f"{size / 2**20:.0f} MiB every {given.every} steps of {1e3 * plain / given.every:.1f} ms: "
        "ratio "
        f"{saved / plain:.3f}, of processor times {busier / busy:.3f}, {1e3 * copying:.0f} ms in "
        "save"
    )
    save(
        {
            "plain": plain,
            "saved": saved,
            "busy": busy,
            "busier": busier,
            "copying": copying,
            "bytes": size,
        },
        given.json,
    )


if __name__ == "__main__":
    main()
