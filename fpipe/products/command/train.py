# SPDX-License-Identifier: Apache-2.0
"""``fpipe train``: the options. torch and rich are imported once the options are known to be
valid.
"""

from __future__ import annotations

from pathlib import Path

import click

from .options import Count, check, named_schedule, option, schedules_for, usage_error


@click.command()
@click.argument("extra", nargs=-1, metavar="")
@option(
    "source -s --schedule SCHEDULE",
    "A schedule's name, or a CSV file.",
    "ZBV",
    shell_complete=schedules_for,
)
@option("-p --ranks N", "Processes.  [default: 4, or those of the CSV file]", type=Count(1, 32))
@option("-m --microbatches N", "[default: twice the ranks]", type=Count(1, 256))
@option("--steps N", "Training steps.", 200, type=Count(1, 100_000))
@option("-o --out DIR", "The folder for the timelines.", Path("run"))
@option("--layers N", "Blocks of the model.", 8, type=Count(1, 64))
@option("--width N", "Width of the model, for 4 heads.", 64, type=Count(4, 1024))
@option("--seed N", "Seed of the model and of the batches.", 0, type=Count(0))
def train(
    extra: tuple[str, ...],
    source: str,
    ranks: int | None,
    microbatches: int | None,
    out: Path,
    width: int,
    **sizes: int,
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
        raise usage_error(f"--width {width} cannot be split over 4 heads; give a multiple of 4")
    schedule = check(named_schedule(source, ranks, microbatches))
    from ..demo.conduct import run
    from ..demo.rank import Settings

    return run(Settings(schedule, out / "timeline.html", width=width, **sizes), source)
