# SPDX-License-Identifier: Apache-2.0
"""``fpipe draw``: pictures of schedules. Never imports torch."""

from __future__ import annotations

from pathlib import Path

import click

from ...actions import progress
from .. import pictures
from . import options


@click.command()
@click.argument(
    "schedules",
    nargs=-1,
    required=True,
    metavar="SCHEDULE...",
    shell_complete=options.schedules_for,
)
@options.counts
@options.slices_option
@options.costs_option
@options.per_option
@click.option(
    "-o",
    "--out",
    multiple=True,
    type=options.File(),
    help="Write .svg, .png, .pdf, .html, .json, .txt.",
)
@click.option(
    "--width",
    type=options.Count(),
    help="Columns of text, or pixels of a picture.  [default: the terminal's; or as needed]",
)
@click.option(
    "--memory/--no-memory",
    default=True,
    help="What ranks hold, below their lanes.",
)
@click.option(
    "--difference",
    is_flag=True,
    help="Colour actions by how much earlier or later they end than in the first schedule.",
)
@click.option(
    "--dark/--light", default=None, help="The paper of pictures.  [default: the reader's, or light]"
)
@click.option(
    "--color/--no-color", default=None, help="Colours.  [default: where the output is a terminal]"
)
def draw(
    schedules: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    slices: int,
    costs: str,
    per: str,
    out: tuple[str, ...],
    width: int | None,
    memory: bool,
    difference: bool,
    dark: bool | None,
    color: bool | None,
) -> None:
    """Draw schedules by name or from files; SCHEDULE is either.

    Several schedules are drawn above each other on one axis of time. Costs are those of a rank's
    whole share of the model, so that a schedule has the same figures here, beside others and in
    fpipe compare. An .html page is explored in a browser: zoom, search, hover.

    \b
    fpipe draw ZBV --ranks 4 --microbatches 8
    fpipe draw DualPipeV -p 4 -m 10 --costs overlap=3,comm=0.1 --out dualpipev.svg
    fpipe draw 1F1B ZBV --out both.html
    fpipe draw Seq1F1B --slices 4
    fpipe draw plan.csv
    """
    price = options.parse_costs(costs)
    for path in out:
        options.check_suffix(path, pictures.FORMATS, "--out")
    if difference and len(schedules) < 2:
        raise options.usage_error(
            "--difference needs two schedules; name another one, or the same with other costs"
        )
    look = pictures.Look(memory, difference, dark, width)
    drawn = []
    for source in schedules:
        schedule = options.named_schedule(source, ranks, microbatches, stages, slices)
        options.checked(schedule)
        with options.as_usage_error():  # costs for another number of stages
            alone = len(schedules) == 1
            drawn.append(schedule.simulate(options.priced(price, schedule, per, alone)))
    with progress("drawing"):
        for path in out:
            pictures.save(drawn, path, look)
        text = "" if out else pictures.draw(drawn, width=width, color=color, difference=difference)
    for path in out:
        click.echo(f"wrote {path} ({options.size_text(Path(path).stat().st_size)})")
    click.echo(text, nl=False, color=True)
