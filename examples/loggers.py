"""Logging to Weights & Biases (W&B, wandb), TensorBoard and a progress bar: callbacks of ``fpipe.Loop``.

``Loop(log=...)`` calls a function with a record of each step, on the first process alone: step, loss, seconds, learning
rate and norm of the gradients. TensorBoard and wandb are used where they are installed. wandb is in the mode
"offline", which sends nothing: leave it out for your own runs. The loss, of a regression, falls as 32 rows are learned.

python examples/loggers.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/loggers.py              # or a process for each
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fpipe

STAGES, WIDTH = 8, 16
Record = dict[str, Any]
Log = Callable[[Record], object]


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def bar(steps: int) -> Log:
    """A progress bar on standard error."""

    def show(record: Record) -> None:
        done = record["step"]
        line = f"\r[{'#' * (30 * done // steps):30s}] {done}/{steps}  loss {record['loss']:.4f}"
        print(line, end="\n" if done == steps else "", file=sys.stderr, flush=True)

    return show


def tensorboard(folder: str) -> Log | None:
    """One chart for each number of the records; see them with ``tensorboard --logdir FOLDER``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(folder)

    def write(record: Record) -> None:
        for name, value in record.items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()

    return write


def weights_and_biases(folder: str) -> Log | None:
    try:
        import wandb
    except ImportError:
        return None
    run = wandb.init(project="fpipe", dir=folder, mode="offline")
    return lambda record: run.log(record, step=record["step"])


def main(steps: int = 20, folder: str | None = None) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    params = [{"w": normal(WIDTH, WIDTH) / 4} for _ in range(STAGES)]
    x, t = normal(32, WIDTH), normal(32, WIDTH)

    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline([layer] * STAGES, "ZBV", loss=loss, microbatches=8, group=group)
    rate = fpipe.transforms.warmup_cosine(1e-2, warmup=1, steps=steps)
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(rate))
    records: list[Record] = []
    logs: list[Log] = [records.append]
    if 0 in group.here:  # the process whose log is called opens the others
        folder = folder or tempfile.mkdtemp()
        found = {"bar": bar(steps), "tensorboard": tensorboard(folder), "wandb": weights_and_biases(folder)}
        logs += [log for log in found.values() if log]
        print("logs:", ", ".join(name for name, log in found.items() if log), "in", folder)
    fpipe.Loop(pipe, tx, log=lambda record: [log(record) for log in logs]).run(
        pipe.place(params), lambda _: (x, t), steps
    )
    for record in records[4::5]:
        print("  ".join(f"{name} {record[name]:.4g}" for name in ("step", "loss", "rate", "norm")))
    return [record["loss"] for record in records]  # those of other processes are empty


if __name__ == "__main__":
    main()
