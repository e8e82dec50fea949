"""``fpipe train``: a small GPT through a pipeline of processes on this machine, and what came of it.

Options become settings, a screen shows what the ranks report; at the end the promise is checked against one process
and the timelines are written. Nothing slow is imported before all options are known to be good.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import click

from ...errors import ScheduleError
from ...generators import make_schedule
from ...schedule import Schedule

if TYPE_CHECKING:
    from rich.console import Console

    from .conduct import Outcome
    from .rank import Settings


class _Count(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


@click.command("train")
@click.argument("alone", nargs=-1, metavar="")
@click.option("-s", "--schedule", "what", default="ZBV", show_default=True, help="A schedule's name, or a CSV file.")
@click.option("-p", "--ranks", type=_Count(1, 32), help="Processes.  [default: 4, or what the CSV has]")
@click.option("-m", "--microbatches", type=_Count(1, 256), help="[default: twice the ranks]")
@click.option("--steps", type=_Count(1, 100_000), default=200, show_default=True, help="Training steps.")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("run"), show_default=True,
              help="Where the timelines are written.")  # fmt: skip
@click.option("--layers", type=_Count(1, 64), default=8, show_default=True, help="Blocks of the model.")
@click.option("--width", type=_Count(4, 1024), default=64, show_default=True, help="Its width, 4 heads.")
@click.option("--seed", type=_Count(0), default=0, show_default=True, help="Of the model and of the batches.")
def train(
    alone: tuple[str, ...], what: str, ranks: int | None, microbatches: int | None, steps: int, out: Path, layers: int,
    width: int, seed: int,
) -> int:  # fmt: skip
    """Train a small GPT on Shakespeare's sonnets through a pipeline of processes on this machine.

    At the end, the gradients of the last step are compared with those of a single process that runs plain autograd
    (the largest difference is 0), and the simulated and the measured timeline are written as one HTML page. The exit
    status is 1 where the gradients differ.

    \b
    fpipe train --schedule DualPipeV --ranks 4 --steps 200 --out run/
    fpipe train --schedule plan.csv
    """
    if alone:
        context = click.get_current_context()
        raise click.UsageError(f"{alone[0]!r} stands alone; a schedule is named by --schedule {alone[0]}", context)
    if width % 4:
        raise click.BadParameter(f"{width}: the 4 heads share it, so give a multiple of 4", param_hint="--width")
    if out.exists() and not out.is_dir():
        raise click.BadParameter(f"{out} is a file; name a folder", param_hint="--out")
    schedule = _schedule(what, ranks, microbatches)
    from rich.console import Console  # here and below: torch and rich take their time

    from .rank import Settings

    settings = Settings(schedule, steps=steps, width=width, layers=layers, seed=seed)
    return _run(settings, what, out, Console(highlight=False))


def _schedule(what: str, ranks: int | None, microbatches: int | None) -> Schedule:
    try:
        if Path(what).suffix.lower() != ".csv":
            p = ranks or 4
            return make_schedule(what, p, microbatches or 2 * p).check()
        found = Schedule.from_csv(what).check()
    except ScheduleError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error
    for name, asked in (("ranks", ranks), ("microbatches", microbatches)):
        if asked is not None and asked != getattr(found, name):
            raise click.UsageError(
                f"{what} is a schedule of {getattr(found, name)} {name}, but --{name} {asked} was asked for; "
                "leave that option out",
                click.get_current_context(),
            )
    return found


def _run(settings: Settings, what: str, out: Path, console: Console) -> int:
    import torch

    from .conduct import conduct
    from .screen import Screen

    torch.set_num_threads(1)  # as the ranks have: sums in another order have other bits
    s = settings.schedule
    title = f"{s.name or what}: {s.ranks} processes, {s.stages} stages, {s.microbatches} microbatches"
    with Screen(console, title, settings.steps) as screen:
        outcome = conduct(settings, screen)
    return _tell(settings, outcome, out, console)


def _tell(settings: Settings, outcome: Outcome, out: Path, console: Console) -> int:
    from .conduct import sample, verdict, write

    console.print()
    console.print(f"[dim]It writes:[/dim] {_shown(sample(settings, outcome.after, 'Shall I', 120))}", soft_wrap=True)
    found = verdict(settings, outcome)
    good = found.largest == 0 and found.loss == 0
    console.print(
        f"Largest difference of its gradients from a single process: [bold {'green' if good else 'red'}]"
        f"{found.largest:g}[/]  ({found.tensors} tensors, {found.numbers:,} numbers; loss {found.loss:g})",
        soft_wrap=True,
    )
    page = write(outcome.measured, out, settings.schedule.name)
    console.print(f"Simulated and measured timeline, one over the other: [bold]{page}[/bold]", soft_wrap=True)
    if _cores() < settings.schedule.ranks:
        shared = f"{settings.schedule.ranks} processes share {_cores()} of this machine's cores"
        console.print(f"[dim]({shared}: measured actions take turns, and are longer for it)[/dim]", soft_wrap=True)
    console.print("\nThree things to try next:")
    for line, why in _next(settings, out):
        console.print(f"  [bold cyan]{line}[/]", soft_wrap=True)
        console.print(f"      {why}", soft_wrap=True)
    return 0 if good else 1


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _next(settings: Settings, out: Path) -> list[tuple[str, str]]:
    other = "DualPipeV" if settings.schedule.name != "DualPipeV" else "1F1B"
    p = settings.schedule.ranks
    fpipe = "fpipe" if which("fpipe") else os.path.relpath(sys.argv[0])  # as it can be typed here
    return [
        (f"{fpipe} view {out}", "open that page: zoom, hover over an action to see what it waited for, search 3F2"),
        (f"{fpipe} train --schedule {other} --ranks {p} --out {out}-{other.lower()}", "the same losses, another order"),
        (
            f"{fpipe} compare --ranks {p} --microbatches {settings.schedule.microbatches}",
            "all schedules, bubbles and memory",
        ),
    ]


def _shown(text: str) -> Any:
    from rich.markup import escape

    return escape(" / ".join(line.strip() for line in text.splitlines() if line.strip()))
