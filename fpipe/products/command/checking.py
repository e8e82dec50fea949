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
    if all(result["good"] for result in results):
        return 0
    return INVALID


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
        facts = f"  {name:<23}{len(placed.stages_of(0)):6}  {about}"
        groups[title].append(fill(facts, 80, subsequent_indent=" " * 33))
    click.echo("schedule                 stages  what it does")
    for title, listed in groups.items():
        if listed:
            click.echo("\n".join(["", title, *listed]))
    click.echo(
        "\nstages: of a rank, by default; ZBV, a good first choice, is short for\n"
        "  ZBVZeroBubble; fpipe compare has the times of all"
    )


_GROUPS = (
    "a backward is one action, B",
    "a backward can be two actions, I and W, so that ranks wait less",
    "every stage is on two ranks, which hold its weights twice",
)


_COLUMNS = """\
total: time of a step, from the first start to the last end of all ranks
bubble: idle share, 1 - work / span; the span is the longest time of one rank
memory: the fullest rank's peak{}
* is the best of a column{}
the one to take has the least total; of equal ones the fewest weights, then the \
least memory, then the least bubble"""


def _one(price: Costs) -> str:
    """What a memory of 1 is, where it is not bytes."""
    if price.saved == 1:
        return "; 1 is one microbatch's activations on one rank"
    return ", in units of saved=, or in bytes"


@click.command()
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
    taken = _taken(chosen, limit)
    entries.sort(key=lambda entry: entry.memory > limit * ALMOST)
    take = chosen and chosen.name
    columns = _COLUMNS.format(_one(price), " within the limit; ! is over it" * (limit < inf))
    rows = comparison.table(entries, limit)
    if out:
        counts = f"{counted(p, 'rank')}, {counted(m, 'microbatch')}"
        title = f"Time against memory: {counts}\n{taken}\n{priced}"
        below = f"{pictures.table(rows[0], rows[1:])}<p>{escape(columns)}</p>"
        pictures.frontier([*comparison.points(entries)], out, look, title, limit, take or "", below)
    if as_json:
        found = [entry._asdict() for entry in entries]
        print_json({"schedules": found, "take": take, "not for these counts": unsupported})
        return
    _say_problem(p, m, f"{priced}\n\n{taken}")
    click.echo("\n".join(pictures.aligned(rows, " ")))
    say(f"\n{columns}")
    if unsupported:
        say(f"\nnot for these counts: {', '.join(unsupported)}")
    if out:
        options.say_written(out)


def _priced(price: Costs, per: Per) -> str:
    whose = "each stage" if per == "stage" or price.counts else "a rank's whole share"
    told = re.sub(r"\((.*?)\)", lambda m: m[1].replace(", ", ":"), repr(price)[6:-1])
    return re.sub(r"\.0\b", "", f"costs {told} of {whose}")


def _say_problem(ranks: int, microbatches: int, rest: str) -> None:
    say(f"ranks {ranks}, microbatches {microbatches}, {rest}\n\n")


def _taken(chosen: comparison.Entry | None, limit: float) -> str:
    if chosen is None:
        return (
            f"none of these schedules holds at most {held(limit)}; give more, or try fpipe solve "
            f"--memory {limit:.6g}"
        )
    return (
        f"take {chosen.name}, the shortest step{f' within memory {held(limit)}' * (limit < inf)}: "
        f"total {chosen.total:.6g}, bubble {chosen.bubble:.2%}, memory {held(chosen.memory)}, "
        f"weights {chosen.weights:g}x"
    )


_MEANINGS = """
span: the longest time of one rank, from its first action to its last
total: from the first start to the last end of all ranks; it exceeds the span if
  no rank is both the first to start and the last to end
memory: the fullest rank's peak{}
bubble: idle share, 1 - work / span"""


def _verdict(
    best: Solved, entries: Sequence[comparison.Entry], limit: float, given: str, one: str
) -> str:
    """Whether it is the best, beside the best named ones, and a picture unless one is as good."""
    t = best.timeline
    found = "optimal: yes, no schedule with one copy of each stage has a shorter span"
    if best.gap:
        found = (
            f"gap {best.gap:.2%} above the bound: no schedule has a span below {best.bound:.6g} "
            f"(set by {best.bound.reason})"
        )
    found = fill(found, 80)
    mean = sum(t.busy) / best.ranks
    if best.bound.reason.endswith("its work") and best.bound > mean * ALMOST:
        uneven = (
            f"the busiest rank works for {best.bound:.6g}, ranks on average for {mean:.6g}: a more "
            "even cut of the layers into stages allows a shorter span, see fpipe.balance"
        )
        found += f"\n{fill(uneven, 80)}"
    named = f"no named schedule holds at most {held(limit)}"
    as_good = False
    rows = [("solved", t.span, t.total, max(t.peak_bytes), t.bubble)]
    if taken := comparison.take(entries, limit, "span"):
        rows.append((taken.name, taken.span, taken.total, taken.memory, taken.bubble))
        _, *pairs, _ = zip(*rows, strict=True)
        as_good = all(theirs <= ours * ALMOST for ours, theirs in pairs)
        span, total, more = (f"{theirs / ours - 1:+.1%}" for ours, theirs in pairs)
        named = f"best named schedule: {taken.name} (span {span}, total {total}, memory {more})"
    if as_good:
        named = f"no better than {rows[1][0]}: use that\ntry: fpipe draw {rows[1][0]} {given}"
    cells = [
        (name, f"{span:.6g}", f"{total:.6g}", held(most), f"{max(bubble, 0):.2%}")
        for name, span, total, most, bubble in rows
    ]
    table = "\n".join(pictures.aligned([("", "span", "total", "memory", "bubble"), *cells]))
    text = f"{found}\n{named}\n\n{table}\n{_MEANINGS.format(one)}\n"
    if not as_good:
        places = f"stages by rank: {repr(best.placement)[10:-1]}"
        text += "\n" + fill(places, 80, subsequent_indent="  ")
        text += f"\n\n{pictures.draw(t)}"
    return text


@click.command()
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
    where steps follow each other. The gap is how far it is above a bound that no schedule can be
    below; without a gap the schedule is optimal. Of those that it finds with the same span, it
    takes the least total, then the least memory. Ctrl-C ends the search.

    \b
    fpipe solve -p 8 -m 32 --costs costs.json --memory 60GB --out plan.csv
    fpipe solve -p 4 -m 16 --placement V --costs F=1,I=1.1,W=0.8,comm=0.1 --memory 6
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
    once = [entry for entry in entries if entry.weights <= 1]
    priced = f" --costs {quote(costs)}" if costs else ""
    if costs and not price.counts:
        priced = f" --per {per}{priced}"
    given = f"-p {p} -m {m} --stages {best.stages}{priced}"
    [limit] = limits(memory, 1, price)
    within = f", memory at most {held(limit)}" * (limit < inf)
    count = f"stages {best.stages}{' (from the costs)' * bool(price.counts)}"
    _say_problem(p, m, f"{count}, {_priced(price, per)}{within}")
    click.echo(_verdict(best, once, limit, given, _one(price)), color=True)
    if out:
        best.to_csv(out)
        click.echo(f"wrote {out}; try: fpipe draw {out}{priced}")
