# SPDX-License-Identifier: Apache-2.0
"""``fpipe draw``: pictures of schedules. Never imports torch."""

from __future__ import annotations

from dataclasses import replace

import click

from ...actions import Per, progress, unfused
from .. import pictures
from . import options
from .options import option


@click.command(cls=options.Priced)
@click.argument(
    "schedules",
    nargs=-1,
    required=True,
    metavar="SCHEDULE...",
    shell_complete=options.schedules_for,
)
@options.ranks_option
@options.microbatches_option
@options.stages_option
@options.slices_option
@options.costs_option
@options.per_option
@option(
    "-o --out FILE",
    "Write .svg, .png, .pdf, .html, .json, .txt.",
    type=options.ending_in(*pictures.FORMATS),
    multiple=True,
)
@options.look_options
@option(
    "--memory/--no-memory",
    "What ranks hold, below their lanes.  [default: memory, but not for a paper]",
)
@option(
    "--difference",
    "Colour actions by how much earlier or later they end than in the first schedule.",
)
@option(
    "--full",
    "All of a long steady state, whose middle is left out otherwise. Text names each action.",
)
@option("--color/--no-color", "Colours.  [default: where the output is a terminal]")
def draw(
    schedules: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    slices: int,
    costs: str,
    per: Per,
    out: tuple[str, ...],
    memory: bool | None,
    difference: bool,
    full: bool,
    color: bool | None,
    look: pictures.Look,
) -> None:
    """Draw schedules by name (fpipe names lists them) or from files; SCHEDULE is either.

    Several schedules are drawn above each other on one axis of time. An .html page is explored in a
    browser: zoom, search, hover.

    \b
    fpipe draw ZBV --ranks 4 --microbatches 8
    fpipe draw DualPipeV -p 4 -m 10 --costs overlap=3,comm=0.1 --out dualpipev.svg
    fpipe draw 1F1B ZBV --out both.html
    fpipe draw Seq1F1B --slices 4
    fpipe draw plan.csv
    """
    price = options.parse_costs(costs)
    if difference and len(schedules) == 1:
        raise options.usage_error(
            "--difference needs two schedules; name another one, or the same with other costs"
        )
    drawn = []
    for source in schedules:
        schedule = options.named_schedule(source, ranks, microbatches, stages, slices)
        ops = {part.op for row in schedule for part in unfused(row)}
        options.check(schedule, training=ops != {"F"})
        with options.as_usage_error():  # costs for another number of stages
            drawn.append(schedule.simulate(price, per=per))
    shown = replace(look, memory=memory, difference=difference, full=full)
    with progress("drawing"):
        for path in out:
            pictures.save(drawn, path, shown)
        width = int(look.width or 0) or None
        text = "" if out else pictures.draw(drawn, width=width, color=color, look=shown)
    for path in out:
        options.say_written(path)
    if out and look.paper and (needed := pictures.width_with_numbers(drawn, shown)):
        click.echo(f"bars have no names; --width {needed}in or fewer microbatches leave room")
    click.echo(text, nl=False, color=True)
