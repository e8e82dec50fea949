# SPDX-License-Identifier: Apache-2.0
"""``fpipe check``, ``fpipe names`` and ``fpipe compare``: facts about schedules as text. Never
imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from math import inf
from pathlib import Path
from shlex import quote
from textwrap import fill
from typing import Any

import click

from ...actions import Costs, Per, counted, progress
from ...errors import ScheduleError
from ...generators import about_schedule, make_schedule
from .. import pictures
from ..pictures.labels import percent
from ..search import comparison
from ..search.comparison import held, in_microbatches
from ..search.memory_limit import limits
from ..search.problem import ALMOST
from ..search.solve import Kind, Solved, solve as solve_schedule, stages_of
from . import options
from .options import INVALID, json_option, option, print_json, report_error, say, usage_error


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@option("-p --ranks N", "Ranks that the schedule must have.")
@option("--forward-only", "Check a schedule of forward passes alone.")
@json_option
def check(files: tuple[str, ...], ranks: int | None, forward_only: bool, as_json: bool) -> int:
    """Check schedules in CSV files, or as text with brackets; - is standard input.

    Each error names rank, position, rule and remedy; the exit status is then 1.

    \b
    fpipe check plan.csv && echo good
    """
    results = [_checked(file, ranks, forward_only) for file in files]
    if as_json:
        print_json(results)
    else:
        for result in results:
            if result["good"]:
                counts = [f"{value} {name}" for name, value in [*result.items()][2:]]
                click.echo(f"{result['file']}: good: {', '.join(counts)}")
            else:
                report_error(f"{result['file']}: {result['error']}", INVALID)
    return 0 if all(result["good"] for result in results) else INVALID


def _checked(file: str, ranks: int | None, forward_only: bool) -> dict[str, Any]:
    """The result for a file: its counts, or the error and its place."""
    try:
        schedule = options.read_file(Path(file))
        if ranks is not None and schedule.ranks != ranks:
            raise ScheduleError(
                f"the schedule has {schedule.ranks} ranks, not {ranks}; give --ranks "
                f"{schedule.ranks}, or another file",
                rule="ranks",
            )
        options.check(schedule, training=not forward_only)
    except ScheduleError as error:
        place = {"rank": error.rank, "position": error.position, "rule": error.rule}
        return {"file": file, "good": False, "error": str(error), **place}
    names = ["ranks", "stages", "microbatches", "slices"][: 3 + (schedule.slices > 1)]
    counted = {name: getattr(schedule, name) for name in names}
    return {"file": file, "good": True, **counted, "actions": sum(map(len, schedule))}


@click.command()
@click.argument(
    "patterns", nargs=-1, metavar="[PATTERN...]", shell_complete=options.schedule_names_for
)
@json_option
def names(patterns: tuple[str, ...], as_json: bool) -> None:
    """List the schedules that have a name, all or those that match a PATTERN.

    \b
    fpipe names "ZB*"
    """
    lines = {name: about_schedule(name).replace("``", "") for name in options.matching(patterns)}
    if as_json:
        print_json([{"name": name, "about": about} for name, about in lines.items()])
        return
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS}
    for name, about in lines.items():
        schedule = make_schedule(name, 4, 4)
        placed = schedule.placement
        title = _GROUPS[-1] if len(placed.paths) > 1 else _GROUPS["W" in str(schedule)]
        facts = f"  {name:<22}{len(placed.stages_of(0))}  {about}"
        groups[title].append(fill(facts, 80, subsequent_indent=" " * 27))
    click.echo(_START)
    for title, listed in groups.items():
        if listed:
            click.echo("\n".join(["", title, *listed]))


_START = """\
start with ZBV, short for ZBVZeroBubble; fpipe compare has times and memory

  schedule              stages of a rank, and what it does"""
_GROUPS = (
    "a backward is one action, B",
    "a backward can be two actions, I and W, so that ranks wait less",
    "every stage is on two ranks, which hold its weights twice",
)


_COLUMNS = """\
total: time of a step, from the first start to the last end of all ranks
bubble: idle share, 1 - work / span; the span is the longest time of one rank, \
from its first action to its last, so equal totals can have other bubbles
memory: the fullest rank's peak{}
* is the best of a column{}
the one to take has the least total; of equal ones the fewest weights, then the \
least memory, then the least bubble"""


def _one(price: Costs) -> str:
    """What a memory of 1 is, where it is not bytes."""
    if price.saved == 1:
        return "; 1 is one microbatch's activations on one rank"
    return ", in units of saved=, or in bytes"


@click.command(cls=options.Priced)
@options.ranks_option
@options.microbatches_option
@options.stages_option
@options.slices_option
@options.costs_option
@options.per_option
@options.memory_option
@option(
    "--only PATTERN",
    "Only these schedules, such as 'ZB*'.",
    multiple=True,
    shell_complete=options.schedule_names_for,
)
@option(
    "-o --out FILE",
    "Draw total against memory: .svg, .png, .pdf, .html.",
    type=options.ending_in(".svg", ".png", ".pdf", ".html"),
)
@options.look_options
@json_option
def compare(
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    slices: int,
    costs: str,
    per: Per,
    memory: str | None,
    only: tuple[str, ...],
    out: str | None,
    as_json: bool,
    look: pictures.Look,
) -> None:
    """Compare all schedules: time, bubble, memory, messages; the shortest step first.

    The total is the time of a step, from the first start to the last end of all ranks. The bubble
    is the share of time in which ranks are idle: 1 - work / span, where the span is the longest
    time from the first start to the last end of one rank. Memory is what the fullest rank holds at
    most, in activations of its whole share of the model for one microbatch, and weights are copies
    of a share. A message carries the activations of one microbatch, or their gradient, from one
    rank to another. With --slices, those over slices of sequences have so many; with --memory,
    those within it come first.

    \b
    fpipe compare --ranks 8 --microbatches 24
    fpipe compare -p 8 -m 24 --costs F=18.5,I=18.1,W=9.3,comm=0.6
    fpipe compare -p 8 -m 24 --only "ZB*" --only 1F1B
    fpipe compare -p 8 -m 24 --memory 6 --out frontier.svg
    """
    p, m = options.counts(ranks, microbatches)
    price = options.parse_costs(costs)
    with options.as_usage_error(), progress("comparing schedules") as track:
        entries, unsupported = comparison.compare(
            p,
            m,
            stages=stages,
            costs=price,
            per=per,
            names=options.matching(only),
            track=track,
            slices=slices,
        )
        [limit] = limits(memory, 1, price)
    if not entries:
        raise usage_error("no schedule fits these counts: " + ", ".join(unsupported))
    priced = _priced(price, per)
    chosen = comparison.take(entries, limit)
    taken = _taken(entries, chosen, limit)
    entries.sort(key=lambda entry: entry.memory > limit * ALMOST)
    take = chosen and chosen.name
    columns = _COLUMNS.format(_one(price), " within the limit; ! is over it" * (limit < inf))
    rows = comparison.table(entries, limit)
    if out:
        counts = f"{counted(p, 'rank')}, {counted(m, 'microbatch')}"
        title = f"Time against memory: {counts}\n{taken}\n{priced}"
        below = f"{pictures.table(*rows)}<p>{escape(columns)}</p>"
        pictures.frontier([*comparison.points(entries)], out, look, title, limit, take or "", below)
        if not as_json:
            say(taken)
            options.say_written(out)
            return
    if as_json:
        found = [entry._asdict() for entry in entries]
        print_json({"schedules": found, "take": take, "not for these counts": unsupported})
        return
    say(f"ranks {p}, microbatches {m}, {priced}\n\n{taken}\n\n")
    click.echo("\n".join(pictures.aligned(rows, " ")))
    say(f"\n{columns}")
    if unsupported:
        say(f"\nnot for these counts: {', '.join(unsupported)}")
    if chosen is None:
        given = f" --stages {stages}" * bool(stages) + _given(costs, price, per, memory)
        click.echo(f"\ntry: fpipe solve -p {p} -m {m}{given}")


def _given(costs: str, price: Costs, per: Per, memory: str | None = None) -> str:
    """The options of a command for the same costs and memory."""
    given = " --per stage" * (per == "stage" and not price.counts)
    given += f" --costs {quote(costs)}" if costs else ""
    return given + (f" --memory {quote(memory)}" if memory else "")


def _priced(price: Costs, per: Per) -> str:
    whose = "each stage" if per == "stage" or price.counts else "a rank's whole share"
    told = re.sub(r"\((.*?)\)", lambda m: m[1].replace(", ", ":"), repr(price)[6:-1])
    return re.sub(r"\.0\b", "", f"costs {told} of {whose}")


def _taken(
    entries: Sequence[comparison.Entry], chosen: comparison.Entry | None, limit: float
) -> str:
    if chosen is None:
        return (
            f"none of these schedules holds at most {held(limit)}; give more, or let fpipe solve "
            "search for one"
        )
    within = f" within memory {held(limit)}" * (limit < inf)
    text = f"take {chosen.name}, the shortest step{within}: {_figures(chosen)}"
    once = comparison.take(entries, limit, copies=1)
    if once and once != chosen:
        text += f"\nor {once.name}: {_figures(once)}"
    return text


def _figures(entry: comparison.Entry) -> str:
    return (
        f"total {entry.total:.6g}, bubble {percent(entry.bubble)}, memory {held(entry.memory)}"
        f"{', weights 2x' * (entry.weights > 1)}"
    )


_MEANINGS = """
total: one step alone: from the first start to the last end of all ranks
span: from step to step: the longest time of one rank, first to last action
memory: the fullest rank's peak{}
bubble: idle share, 1 - work / span
no schedule with weights once has a span below {:.6g} ({})"""


def _times(entry: comparison.Entry) -> str:
    return f"{entry.name}, total {entry.total:.6g}, {entry.span:.6g} from step to step"


def _verdict(
    best: Solved, entries: Sequence[comparison.Entry], limit: float
) -> tuple[str, str, str]:
    """The named schedule that is as good, or ""; whether another cut of the layers is better and
    what to take; and a table of these schedules.
    """
    named = ""
    t, bound = best.timeline, best.bound
    taken = comparison.take(entries, limit, "span", copies=1)
    rows = [comparison.entry_of("the solved schedule", best, t)]
    more = f"\nno named schedule holds at most {held(limit)}"
    if taken:
        pairs = zip(taken[3:6], rows[0][3:6], strict=True)  # total, span, memory
        rows.append(taken)
        more = f"\nbest named schedule: {_times(taken)}"
        if all(theirs <= ours * ALMOST for theirs, ours in pairs):
            rows, named, more = [taken], taken.name, ""
    first = "take"
    least = comparison.take(entries, limit)
    if least and least not in rows and least.total * ALMOST < t.total:
        rows.append(least)
        first = "take with weights once:"
        way = "with weights twice" if least.weights > 1 else "for one step alone"
        more += f"\nor {way}: {_times(least)}"
    good = f"within {best.gap:.2%} of the least" if best.gap else "optimal"
    text = f"{first} {_times(rows[0])} ({good}){more}"
    mean = sum(t.busy) / best.ranks
    if bound.reason.endswith("its work") and bound > mean * ALMOST:
        text = (
            f"the busiest rank works {bound:.6g}, the mean is {mean:.6g}: cut the layers more "
            f"evenly by\n  fpipe.balance(layers, ranks={best.ranks})\n{text}"
        )
    cells = [
        (
            f"{e.name}{', as solved' * (e.name == named)}",
            f"{e.total:.6g}",
            f"{e.span:.6g}",
            held(e.memory),
            percent(e.bubble),
        )
        for e in rows
    ]
    table = pictures.aligned([("", "total", "span", "memory", "bubble"), *cells])
    return named, text, "\n".join(table)


@click.command(cls=options.Priced)
@options.ranks_option
@options.microbatches_option
@options.stages_option
@options.costs_option
@options.per_option
@options.memory_option
@option("--placement one|loop|V|any", "Which stages share a rank.", "any")
@option("--seconds SECONDS", "Time of the search.", 10.0, type=click.FloatRange(0.01, 86400))
@option("-o --out FILE", "Write the schedule as .csv.", type=options.ending_in(".csv"))
def solve(
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    costs: str,
    per: Per,
    memory: str | None,
    placement: Kind,
    seconds: float,
    out: str | None,
) -> None:
    """Search for the schedule with the least span for costs and memory; --out writes it.

    The span is the longest time of a rank from its first action to its last: the time of a step
    where steps follow each other. A schedule is optimal where none with weights once has a shorter
    span. Of those with the same span that it finds, it takes the least total, then the least
    memory. Ctrl-C ends the search.

    \b
    fpipe solve -p 8 -m 32 --costs costs.json --memory 60GB --out plan.csv
    fpipe solve -p 4 -m 16 --placement V --costs F=1,comm=0.1 --memory 6
    """
    p, m = options.counts(ranks, microbatches)
    price = options.parse_costs(costs)
    scaled = in_microbatches(price, per, p / stages_of(price, p, placement, stages))
    with options.as_usage_error():
        best = solve_schedule(
            scaled, p, m, placement, per=per, stages=stages, memory=memory, time_limit=seconds
        )
    with progress("comparing schedules") as track:
        entries, _ = comparison.compare(p, m, stages=best.stages, costs=price, per=per, track=track)
    priced = _given(costs, price, per)
    [limit] = limits(memory, 1, price)
    named, verdict, table = _verdict(best, entries, limit)
    say(verdict)
    counts = f"-p {p} -m {m} --stages {best.stages}"
    if named:
        click.echo(f"try: fpipe draw {named} {counts}{priced}")
    elif best.gap or not out:  # else this schedule is the best, and in the file
        then = f"fpipe solve {counts}{_given(costs, price, per, memory)}"
        then += f" --placement {placement}" * (placement != "any")
        then += f" --seconds {min(6 * seconds, 86400):g}" * (best.gap > 0)
        click.echo(f"try: {then} --out {quote(out or 'plan.csv')}")
    within = f", memory at most {held(limit)}" * (limit < inf)
    count = f"stages {best.stages}{' (from the costs)' * bool(price.counts)}"
    say(f"\nranks {p}, microbatches {m}, {count}, {_priced(price, per)}{within}\n\n")
    click.echo(table)
    say(_MEANINGS.format(_one(price), best.bound, best.bound.reason))
    if not named:
        say(f"\nstages by rank: {repr(best.placement)[10:-1]}\n\n")
        click.echo(pictures.draw(best.timeline), color=True)
    if out:
        best.to_csv(out)
        click.echo(f"\nwrote {out}; try: fpipe draw {out}{priced}")
