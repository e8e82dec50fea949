# SPDX-License-Identifier: Apache-2.0
"""``fpipe train``: the options. torch and rich are imported once the options are known to be
valid.
"""

from __future__ import annotations

from pathlib import Path

import click

from .options import Count, as_usage_error, named_schedule, schedules_for, usage_error


@click.command("train")
@click.argument("extra", nargs=-1, metavar="")
@click.option(
    "-s",
    "--schedule",
    "source",
    default="ZBV",
    metavar="SCHEDULE",
    shell_complete=schedules_for,
    help="A schedule's name, or a CSV file.",
)
@click.option(
    "-p",
    "--ranks",
    type=Count(1, 32),
    help="Processes.  [default: 4, or those of the CSV file]",
)
@click.option("-m", "--microbatches", type=Count(1, 256), help="[default: twice the ranks]")
@click.option(
    "--steps",
    type=Count(1, 100_000),
    default=200,
    help="Training steps.",
)
@click.option(
    "-o",
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("run"),
    help="The folder for the timelines.",
)
@click.option(
    "--layers",
    type=Count(1, 64),
    default=8,
    help="Blocks of the model.",
)
@click.option(
    "--width",
    type=Count(4, 1024),
    default=64,
    help="Width of the model, for 4 heads.",
)
@click.option(
    "--seed",
    type=Count(0),
    default=0,
    help="Seed of the model and of the batches.",
)
def train(
    extra: tuple[str, ...],
    source: str,
    ranks: int | None,
    microbatches: int | None,
    steps: int,
    out: Path,
    layers: int,
    width: int,
    seed: int,
) -> int:
    """Train a small GPT on Shakespeare's sonnets through a pipeline of processes on this machine.

    At the end, the gradients of the last step are compared with those of a single process that runs
    plain autograd (the largest difference is 0), and the simulated and the measured timeline are
    written as one HTML page. The exit status is 1 if the gradients differ.

    \b
    fpipe train --schedule DualPipeV --ranks 4 --steps 200 --out run/
    fpipe train --schedule plan.csv
    """
    if extra:
        raise usage_error(
            f"unexpected argument {extra[0]!r}; name a schedule with --schedule {extra[0]}"
        )
    if width % 4:
        raise click.BadParameter(
            f"{width} cannot be split over 4 heads; give a multiple of 4", param_hint="--width"
        )
    if out.exists() and not out.is_dir():
        raise click.BadParameter(f"{out} is a file; name a folder", param_hint="--out")
    with as_usage_error():
        schedule = named_schedule(source, ranks, microbatches).check()
    from ..demo.conduct import run
    from ..demo.rank import Settings

    page = out / "timeline.html"
    settings = Settings(schedule, page, steps=steps, width=width, layers=layers, seed=seed)
    return run(settings, source)
