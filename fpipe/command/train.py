# SPDX-License-Identifier: Apache-2.0
"""``fpipe train``: train a small GPT through a pipeline of processes on this machine, and report the result.

Parses options, then runs the ranks behind a live display, compares the last gradients with those of one process, and
writes the timelines. torch and rich are imported once the options are known to be valid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import click

from .options import Count, as_usage_error, named_schedule, usage_error

if TYPE_CHECKING:
    from rich.console import Console

    from .training.conduct import Outcome
    from .training.rank import Settings


@click.command("train")
@click.argument("extra", nargs=-1, metavar="")
@click.option("-s", "--schedule", "source", default="ZBV", show_default=True, help="A schedule's name, or a CSV file.")
@click.option("-p", "--ranks", type=Count(1, 32), help="Processes.  [default: 4, or those of the CSV file]")
@click.option("-m", "--microbatches", type=Count(1, 256), help="[default: twice the ranks]")
@click.option("--steps", type=Count(1, 100_000), default=200, show_default=True, help="Training steps.")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("run"), show_default=True,
              help="The folder for the timelines.")  # fmt: skip
@click.option("--layers", type=Count(1, 64), default=8, show_default=True, help="Blocks of the model.")
@click.option("--width", type=Count(4, 1024), default=64, show_default=True, help="Width of the model, for 4 heads.")
@click.option("--seed", type=Count(0), default=0, show_default=True, help="Seed of the model and of the batches.")
def train(
    extra: tuple[str, ...], source: str, ranks: int | None, microbatches: int | None, steps: int, out: Path,
    layers: int, width: int, seed: int,
) -> int:  # fmt: skip
    """Train a small GPT on Shakespeare's sonnets through a pipeline of processes on this machine.

    At the end, the gradients of the last step are compared with those of a single process that runs plain autograd
    (the largest difference is 0), and the simulated and the measured timeline are written as one HTML page. The exit
    status is 1 if the gradients differ.

    \b
    fpipe train --schedule DualPipeV --ranks 4 --steps 200 --out run/
    fpipe train --schedule plan.csv
    """
    if extra:
        raise usage_error(f"unexpected argument {extra[0]!r}; name a schedule with --schedule {extra[0]}")
    if width % 4:
        raise click.BadParameter(f"{width} cannot be split over 4 heads; give a multiple of 4", param_hint="--width")
    if out.exists() and not out.is_dir():
        raise click.BadParameter(f"{out} is a file; name a folder", param_hint="--out")
    with as_usage_error():
        schedule = named_schedule(source, ranks, microbatches).check()
    from rich.console import Console

    from .training.rank import Settings

    settings = Settings(schedule, steps=steps, width=width, layers=layers, seed=seed)
    return _run(settings, source, out, Console(highlight=False))


def _run(settings: Settings, source: str, out: Path, console: Console) -> int:
    import torch

    from .training.conduct import conduct
    from .training.screen import Screen

    torch.set_num_threads(1)  # like the ranks: the order of a sum determines its bits
    s = settings.schedule
    title = f"{s.name or source}: {s.ranks} processes, {s.stages} stages, {s.microbatches} microbatches"
    with Screen(console, title, settings.steps) as screen:
        outcome = conduct(settings, screen)
    return _report(settings, outcome, out, console)


def _report(settings: Settings, outcome: Outcome, out: Path, console: Console) -> int:
    from rich.markup import escape

    from .training.conduct import sample, verdict, write

    text = " / ".join(filter(None, map(str.strip, sample(settings, outcome.after, "Shall I", 120).splitlines())))
    console.print(f"\n[dim]A sample of the model:[/dim] {escape(text)}", soft_wrap=True)
    result = verdict(settings, outcome)
    good = result.largest == 0 and result.loss == 0
    console.print(
        f"Largest difference of its gradients from a single process: [bold {'green' if good else 'red'}]"
        f"{result.largest:g}[/]  ({result.tensors} tensors, {result.numbers:,} numbers; loss {result.loss:g})",
        soft_wrap=True,
    )
    page = write(outcome.measured, out, settings.schedule.name)
    console.print(f"Simulated and measured timeline: [bold]{page}[/bold]", soft_wrap=True)
    if _cores() < settings.schedule.ranks:
        shared = f"{settings.schedule.ranks} processes share {_cores()} of this machine's cores"
        console.print(f"[dim]({shared}: measured actions take turns, and are longer for it)[/dim]", soft_wrap=True)
    console.print("\nThree things to try next:")
    for line, purpose in _next(settings, out):
        console.print(f"  [bold cyan]{line}[/]\n      {purpose}", soft_wrap=True)
    return 0 if good else 1


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _next(settings: Settings, out: Path) -> list[tuple[str, str]]:
    other = "DualPipeV" if settings.schedule.name != "DualPipeV" else "1F1B"
    p, m = settings.schedule.ranks, settings.schedule.microbatches
    fpipe = "fpipe" if which("fpipe") else os.path.relpath(sys.argv[0])  # as it can be typed here
    return [
        (f"{fpipe} view {out}", "open that page: zoom, hover over an action to see what it waited for, search 3F2"),
        (f"{fpipe} train --schedule {other} --ranks {p} --out {out}-{other.lower()}", "the same losses, another order"),
        (f"{fpipe} compare --ranks {p} --microbatches {m}", "all schedules, bubbles and memory"),
    ]
