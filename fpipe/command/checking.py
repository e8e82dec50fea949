# SPDX-License-Identifier: Apache-2.0
"""``fpipe check``, ``fpipe names`` and ``fpipe compare``: facts about schedules as text. Never imports torch."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import click

from ..errors import ScheduleError
from ..generators import about_schedule, comparison, schedule_names
from ..generators.comparison import Entry
from ..generators.solver import frontier
from ..generators.solver.memory import in_bytes
from ..generators.solver.solve import solve as solve_schedule
from ..schedules.costs import Costs
from ..schedules.files import write_bytes
from ..schedules.progress import progress
from .options import (
    INVALID,
    Count,
    as_usage_error,
    bounded,
    check_suffix,
    costs_option,
    counts,
    parse_costs,
    read_file,
    report_error,
)
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
@click.option("--memory", metavar="LIMIT", help="What a rank may hold, such as 60GB; adds schedules of the solver.")
@click.option("--seconds", type=float, default=0.0, metavar="N",
              help="Time of the solver.  [default: 5 with --memory, else 0, without the solver]")  # fmt: skip
@click.option("-o", "--out", type=click.Path(dir_okay=False), help="Draw bubble against memory: .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def compare(
    ranks: int | None, microbatches: int | None, stages: int | None, costs: str, memory: str | None, seconds: float,
    out: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare all schedules: bubble, time, memory, messages.

    Costs are those of a rank's whole share of the model: each stage of a schedule with two stages per rank costs half.
    The bubble is 1 - work / span, where span is the longest time from the first start to the last end of one rank;
    total is the time from the first start to the last end of all ranks. Memory is counted in activations of a whole
    share for one microbatch, and weights in copies of a share. A message carries the activations of one microbatch, or
    their gradient, from one rank to another. A star marks the best of each column.

    \b
    fpipe compare --ranks 8 --microbatches 24
    fpipe compare -p 8 -m 24 --costs F=18.5,I=18.1,W=9.3,comm=0.6
    fpipe compare -p 8 -m 24 --memory 6 --out frontier.svg
    """
    p, m = bounded(ranks, microbatches)
    price = parse_costs(costs)
    if out is not None:
        check_suffix(out, [".svg"], "--out")
    with as_usage_error():
        entries, unsupported = comparison.compare(p, m, stages=stages, costs=price)
        limit = inf if memory is None else in_bytes(memory)
        entries = [*entries, *_solved(p, m, price, memory, seconds)]
    entries.sort(key=lambda e: (round(e.bubble, 9), e.memory, e.total))
    chosen = frontier.take(entries, limit)
    if out is not None:
        write_bytes(out, frontier.svg(entries).encode())
    if as_json:
        taken = None if chosen is None else chosen.name
        click.echo(
            json.dumps(
                {"schedules": [e._asdict() for e in entries], "take": taken, "not for these counts": unsupported}
            )
        )
        return
    click.echo(f"ranks {p}, microbatches {m}, {price!r} for a rank's whole share\n")
    _show(entries, unsupported, chosen, memory)


def _solved(ranks: int, microbatches: int, costs: Costs, memory: str | None, seconds: float) -> list[Entry]:
    """The solver's schedules, where there is a limit of memory or time for them."""
    if seconds <= 0 and memory is None:
        return []
    with progress(f"solving for {ranks} ranks") as track:
        return frontier.solved_entries(ranks, microbatches, costs, memory, seconds or 5.0, track)


def _show(entries: list[Entry], unsupported: list[str], chosen: Entry | None, memory: str | None) -> None:
    for line in comparison.table(entries, best=lambda cell: click.style(cell, bold=True)):
        click.echo(line)
    if unsupported:
        click.echo("\nnot for these counts:\n" + "\n".join(f"  {line}" for line in unsupported))
    click.echo("\n" + frontier.text(entries))
    if chosen is None:
        click.echo(f"\nno schedule holds at most {memory}; give more memory or more ranks")
    else:
        click.echo(
            f"\ntake {chosen.name}: bubble {chosen.bubble:.2%}, span {chosen.span:.6g}, holds {chosen.memory:.6g}"
        )


@click.command("solve")
@counts
@costs_option
@click.option("--memory", metavar="LIMIT", help="What a rank may hold, such as 60GB.  [default: no limit]")
@click.option("--placement", type=click.Choice(["one", "loop", "V", "any"], case_sensitive=False), default="any",
              show_default=True, help="Which stages share a rank.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.01, 86400), default=10.0, show_default=True, metavar="N",
              help="Time of the search.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(dir_okay=False), help="Write the schedule as .csv.")
def solve(
    ranks: int | None, microbatches: int | None, stages: int | None, costs: str, memory: str | None, placement: str,
    seconds: float, out: str | None,
) -> None:  # fmt: skip
    """Search for the best schedule for costs and memory, and write it to a file.

    Costs are those of a stage. The bound is a span that no schedule can be shorter than; the gap is the distance to it.
    Ctrl-C ends the search, and what was found is written.

    \b
    fpipe solve -p 8 -m 32 --costs profile.json --memory 60GB --out plan.csv
    fpipe solve -p 4 -m 16 --placement V --costs F=1,I=1.1,W=0.8,comm=0.1 --memory 6
    """
    p, m = bounded(ranks, microbatches)
    if out is not None:
        check_suffix(out, [".csv"], "--out")
    kind: Any = {"v": "V"}.get(placement, placement)
    with as_usage_error():
        found = solve_schedule(parse_costs(costs), p, m, kind, stages=stages, memory=memory, time_limit=seconds)
    found.check()
    t = found.timeline
    counts_of = f"{found.ranks} ranks, {found.stages} stages, {found.microbatches} microbatches"
    click.echo(f"{found.name}: {counts_of}\n{found.placement!r}")
    click.echo(f"span {t.span:.6g}, bubble {t.bubble:.2%}, a rank holds at most {max(t.peak_bytes):.6g}")
    click.echo(f"no schedule is shorter than {float(found.bound):.6g} ({found.bound.reason}): gap {found.gap:.2%}")
    if out is not None:
        found.to_csv(out)
        click.echo(f"wrote {out}; try: fpipe draw {out} --costs {costs or 'F=1'}")
