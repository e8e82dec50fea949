# SPDX-License-Identifier: Apache-2.0
"""``fpipe check``, ``fpipe names`` and ``fpipe compare``: facts about schedules as text. Never imports torch."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ScheduleError
from ..generators import about_schedule, comparison, schedule_names
from .options import INVALID, Count, as_usage_error, bounded, costs_option, counts, parse_costs, read_file, report_error
from .options import check as check_schedule


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("-p", "--ranks", metavar="N", type=Count(), help="Ranks that the schedule must have.")
@click.option("--forward-only", is_flag=True, help="Check a schedule of forward passes alone.")
def check(files: tuple[str, ...], ranks: int | None, forward_only: bool) -> int:
    """Check schedules in CSV files, or as text with brackets.

    Each error names rank, position, rule and remedy; the exit status is then 1.

    \b
    fpipe check plan.csv && echo good
    """
    status = 0
    for file in files:
        try:
            schedule = read_file(Path(file))
            if ranks is not None and schedule.ranks != ranks:
                raise ScheduleError(f"the schedule has {schedule.ranks} ranks, not {ranks}", rule="ranks")
            check_schedule(schedule, training=not forward_only)
        except ScheduleError as error:
            status = report_error(f"{file}: {error}", INVALID)
            continue
        counts = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        click.echo(f"{file}: good: {counts}, {sum(map(len, schedule))} actions")
    return status


@click.command()
def names() -> None:
    """List the schedules that have a name."""
    known = schedule_names()
    width = max(map(len, known))
    for name in known:
        click.echo(f"{name:<{width}}  {about_schedule(name).replace('``', '')}".rstrip())


@click.command()
@counts
@costs_option
def compare(ranks: int | None, microbatches: int | None, stages: int | None, costs: str) -> None:
    """Compare all schedules: bubble, time, memory, messages.

    Costs are those of a rank's whole share of the model: each stage of a schedule with two stages per rank costs half.
    The bubble is 1 - work / span, where span is the longest time from the first start to the last end of one rank;
    total is the time from the first start to the last end of all ranks. Memory is counted in activations of a whole
    share for one microbatch, and weights in copies of a share. A message carries the activations of one microbatch, or
    their gradient, from one rank to another. A star marks the best of each column.

    \b
    fpipe compare --ranks 8 --microbatches 24
    fpipe compare -p 8 -m 24 --costs F=18.5,I=18.1,W=9.3,comm=0.6
    """
    p, m = bounded(ranks, microbatches)
    price = parse_costs(costs)
    with as_usage_error():
        entries, unsupported = comparison.compare(p, m, stages=stages, costs=price)
    click.echo(f"ranks {p}, microbatches {m}, {price!r} for a rank's whole share\n")
    for line in comparison.table(entries, best=lambda cell: click.style(cell, bold=True)):
        click.echo(line)
    if unsupported:
        click.echo("\nnot for these counts:\n" + "\n".join(f"  {line}" for line in unsupported))
