# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, the schedule that they name, and error reports. Knows no command
and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ...actions import Costs, progress, read_bytes
from ...errors import ScheduleError
from ...generators import is_path, read_schedule, schedule_from, schedule_names
from ...schedule import Schedule
from ..search import comparison

MOST_COSTS = 16 << 20  #: bytes of a file of costs
INVALID = 1  #: exit status for a schedule that is not valid
MAX_SIZE = 1_000_000  #: ranks x microbatches of a schedule that a command builds
Command = TypeVar("Command", bound=Callable[..., object])
# Every kind of argument has one metavar: SCHEDULE, FILE, DIR, COSTS, N, SECONDS, LIMIT, PATTERN.


def schedule_names_for(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
    """The names of schedules that begin with what was typed in a shell, in any case."""
    names = ("ZBV", *schedule_names())
    return [name for name in names if name.lower().startswith(typed.lower())]


def schedules_for(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """These names, and files."""
    names = schedule_names_for(ctx, param, typed)
    return [*map(CompletionItem, names), CompletionItem(typed, type="file")]


def matching(patterns: Sequence[str]) -> list[str]:
    """The names of schedules that one of the patterns matches, in any case; all where there is no
    pattern.
    """
    names = schedule_names()
    matched = set[str]()
    for pattern in patterns:
        wanted = "zbvzerobubble" if pattern.lower() == "zbv" else pattern.lower()
        found = [name for name in names if fnmatchcase(name.lower(), wanted)]
        if not found:
            raise usage_error(
                f"no schedule is called {pattern!r}; fpipe names lists them, and ZB* is a pattern"
            )
        matched.update(found)
    return [name for name in names if name in matched or not patterns]


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: object) -> None:
    """One value as JSON, with infinities and NaN as null, which JSON does not have."""

    def plain(item: object) -> object:
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        if isinstance(item, (list, tuple)):
            return list(map(plain, item))
        return None if isinstance(item, float) and not isfinite(item) else item

    click.echo(json.dumps(plain(value), indent=1))


def table(
    columns: Sequence[tuple[str, Callable[[Any], object]]], values: Sequence[Any]
) -> Iterator[str]:
    """The lines of a table: names of columns, and a row for each value.

    >>> list(table([("x", lambda v: v), ("double", lambda v: 2 * v)], [1, 20]))
    [' x  double', ' 1       2', '20      40']
    """
    rows = [
        [name for name, _ in columns],
        *([str(cell(value)) for _, cell in columns] for value in values),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def size_text(count: float) -> str:
    """Bytes for people.

    >>> size_text(10), size_text(3 << 19)
    ('10 B', '1.5 MiB')
    """
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while count >= 1024 and (larger := next(units, None)):
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


class Count(click.IntRange):
    """A whole number within bounds, 1 or more by default."""

    name = "whole number"

    def __init__(self, low: int = 1, high: int | None = None):
        super().__init__(low, high)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands for it in the help."""
        return "N"


class File(click.Path):
    """The name of a file."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands for it in the help."""
        return "FILE"


def counts(command: Command) -> Command:
    """The options --ranks, --microbatches and --stages."""
    option = partial(click.option, metavar="N", type=Count())
    stages = option("--stages", help="Stages.  [default: what the schedule needs]")
    microbatches = option("-m", "--microbatches", help="Microbatches.  [default: twice the ranks]")
    return option("-p", "--ranks", help="Ranks of the pipeline.  [default: 4]")(
        microbatches(stages(command))
    )


slices_option = click.option(
    "--slices",
    type=Count(),
    default=1,
    help="Slices of the sequence of a microbatch.",
)
costs_option = click.option(
    "--costs",
    metavar="COSTS",
    default="",
    show_default=False,
    help="Costs of actions, such as F=1,I=1,W=1: F, I, W, B (I + W), overlap (a fused action), "
    "comm (a message), send "
    "and receive (the time that a message takes of either rank), and for memory and bandwidth: "
    "saved, kept, boundary, "
    "bandwidth. F=1:2:1 is one number per stage. Or a file written by fpipe profile.",
)
per_option = click.option(
    "--per",
    type=click.Choice(["rank", "stage"]),
    default="rank",
    help="Whose costs these are: those of a rank's whole share of the model, of which each of "
    "its stages has a part, "
    "or those of a stage. One number per stage is always that of a stage.",
)


def priced(costs: Costs, schedule: Schedule, per: str, alone: bool = True) -> Costs:
    """The costs of the stages of ``schedule``; of one drawn ``alone``, costs by stage are taken as
    they are.
    """
    by_stage = per == "stage" or (alone and costs.counts)
    return costs if by_stage else comparison.per_share(costs, schedule)


def parse_costs(text: str) -> Costs:
    """The costs of --costs: numbers, or the name of a .json file."""
    try:
        if text.endswith(".json"):
            return Costs.from_json(read_bytes(text, MOST_COSTS).decode())
        return Costs.parse(text)
    except (ScheduleError, ValueError) as error:  # ValueError: too large, or no text
        raise click.BadParameter(str(error), param_hint="--costs") from error


def usage_error(message: str) -> click.UsageError:
    """An error in how the current command was called."""
    return click.UsageError(message, click.get_current_context())


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Report an invalid name or count as an error of the command line, not of a schedule."""
    try:
        yield
    except ScheduleError as error:
        raise usage_error(str(error)) from error


def bounded(ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The counts with their defaults; raises where a schedule of this size would fill the
    memory.
    """
    ranks = ranks or 4
    microbatches = microbatches or 2 * ranks
    if (size := ranks * microbatches) > MAX_SIZE:
        raise usage_error(
            f"{ranks} ranks and {microbatches} microbatches multiply to {size}; take at most "
            f"{MAX_SIZE}"
        )
    return ranks, microbatches


def read_file(path: Path) -> Schedule:
    """The schedule in a file: brackets or CSV."""
    if not path.is_file():
        raise usage_error(f"there is no file {str(path)!r}")
    with progress(f"reading {path}") as track:
        return read_schedule(path, track)


def named_schedule(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    stages: int | None = None,
    slices: int = 1,
) -> Schedule:
    """The schedule of a name, built with these counts, or of a file, which must have these
    counts.
    """
    if not is_path(source):
        with as_usage_error(), progress(f"building {source}"):
            return schedule_from(source, *bounded(ranks, microbatches), stages, slices)
    schedule = read_file(Path(source))
    for name, wanted in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        actual = getattr(schedule, name)
        if wanted is not None and wanted != actual:
            raise usage_error(
                f"{source} is a schedule of {actual} {name}, not {wanted}; leave out --{name}"
            )
    return schedule


def checked(schedule: Schedule) -> Schedule:
    """The schedule after a check, for forward passes alone if it has only those."""
    ops = {part.op for row in schedule for action in row for part in action.parts}
    return check(schedule, training=ops != {"F"})


def check(schedule: Schedule, training: bool = True) -> Schedule:
    """The schedule after a check."""
    with progress(f"checking the schedule of {schedule.ranks} ranks"):
        return schedule.check(training=training)


def check_suffix(path: str, suffixes: Collection[str], option: str) -> None:
    """Raise unless the name of a file ends in one of ``suffixes``."""
    if Path(path).suffix.lower() not in suffixes:
        raise click.BadParameter(
            f"{path}: give a file that ends in {', '.join(suffixes)}", param_hint=option
        )


def report_error(message: str, status: int) -> int:
    """Print an error, and return ``status``. Control characters are escaped, and long lines cut."""
    lines = "".join(
        c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message
    ).splitlines()
    text = "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in lines)
    click.echo(click.style("error:", fg="red", bold=True) + " " + text, err=True)
    return status
