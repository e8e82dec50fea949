# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, the schedule that they name, and error reports. Knows no command
and no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ...actions import Costs, progress, read_bytes
from ...errors import ScheduleError
from ...generators import is_path, read_schedule, schedule_from, schedule_in, schedule_names
from ...schedule import Schedule
from ..pictures import Look
from ..pictures.labels import aligned, size_text
from ..search.memory_limit import in_bytes

MOST_COSTS = 16 << 20  #: bytes of a file of costs
T = TypeVar("T", bound=Callable[..., object])
INVALID = 1  #: exit status for a schedule that is not valid


def schedule_names_for(ctx: click.Context, param: click.Parameter, typed: str) -> list[str]:
    """The names of schedules that begin with what was typed in a shell, in any case."""
    start = typed.lower()
    return [name for name in ("ZBV", *schedule_names()) if name.lower().startswith(start)]


def schedules_for(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """These names, and files."""
    names = schedule_names_for(ctx, param, typed)
    return [*map(CompletionItem, names), CompletionItem(typed, type="file")]


def matching(patterns: Sequence[str]) -> list[str]:
    """The names of schedules that one of the patterns matches, in any case; all where there is no
    pattern.
    """
    names = schedule_names()
    if not patterns:
        return list(names)
    matched = set[str]()
    for pattern in patterns:
        wanted = "zbvzerobubble" if pattern.lower() == "zbv" else pattern.lower()
        hits = [name for name in names if fnmatchcase(name.lower(), wanted)]
        if not hits:
            raise usage_error(
                f"no schedule is called {pattern!r}; fpipe names lists them, and ZB* is a pattern"
            )
        matched.update(hits)
    return [name for name in names if name in matched]


def option(form: str, about: str, default: object = None, **more: Any) -> Callable[[T], T]:
    """A decorator that adds an option to a command.

    Args:
        form: its names and what stands for its value, as in ``"-p --ranks N"``. ``N``, ``FILE``,
            ``DIR`` and ``LIMIT`` have types; ``a|b`` are choices; an option without a value is a
            flag.
        about: its help.
        default: its value where it is not given.
        more: as for ``click.option``.
    """
    *names, value = form.split()
    if value.startswith("--"):
        default = default if "/" in value else False
        return click.option(*names, value, is_flag=True, default=default, help=about, **more)
    choices = value.split("|")
    kind = click.Choice(choices, case_sensitive=False) if choices[1:] else TYPES.get(value)
    details = {"metavar": value, "type": kind, **more}
    if default is not None:
        details["default"] = default
    return click.option(*names, help=about, **details)


class Count(click.IntRange):
    """A whole number within bounds, 1 or more by default."""

    name = "whole number"

    def __init__(self, low: int = 1, high: int | None = None):
        super().__init__(low, high)


def ending_in(*suffixes: str) -> Callable[[str], str]:
    """The type of the name of a file that ends in one of these."""

    def checked(path: str) -> str:
        if Path(path).suffix.lower() not in suffixes:
            raise click.BadParameter(f"{path}: give a file that ends in {', '.join(suffixes)}")
        return path

    return checked


def number_of(text: str) -> float:
    """A number with a unit, such as 80GiB or 989T."""
    try:
        return in_bytes(text)
    except ScheduleError:
        raise click.BadParameter(
            f"{text!r} is no number above 0 with a unit, such as 80GiB or 989T"
        ) from None


def length_of(text: str) -> float:
    """A length in pixels: a number of them, or with a unit, such as 3.4in or 86mm."""
    number = text.rstrip("ptxmcin")
    unit = text.lstrip("0123456789.")
    try:
        length = float(number) * {"": 1, "px": 1, "pt": 96 / 72, "in": 96, "mm": 96 / 25.4}[unit]
    except (KeyError, ValueError):
        length = 0.0
    if not 1 <= length <= 1e5:
        raise click.BadParameter(f"{text!r} is no width such as 390 (pixels), 3.4in, 240pt or 86mm")
    return length


#: The types of options by what stands for their values.
TYPES = {
    "WIDTH": length_of,
    "N": Count(),
    "FILE": click.Path(dir_okay=False),
    "DIR": click.Path(file_okay=False, path_type=Path),
    "LIMIT": number_of,
}


def look_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that a command gets as one argument, a ``pictures.Look``."""

    @option("--dark/--light", "The background of pictures.  [default: the reader's, or light]")
    @option(
        "--width WIDTH",
        "Of a picture, in pixels or as 3.4in, 240pt, 86mm; or columns of text.  [default: as "
        "needed; or the terminal's]",
    )
    @option(
        "--style screen|paper",
        "paper: .svg, .png and .pdf for a column of a paper, without a header, with letters of 7 "
        "pt or more. All bars have their numbers, or none, where they do not fit the width.",
        "screen",
    )
    @wraps(command)
    def with_look(
        dark: bool | None,
        width: float | None,
        style: str,
        out: str | tuple[str, ...] | None,
        **others: object,
    ) -> None:
        paper = style == "paper"
        for path in (out,) if isinstance(out, str) else out or ():
            if paper and not path.lower().endswith((".svg", ".png", ".pdf")):
                raise usage_error(
                    f"--style paper is for .svg, .png and .pdf; leave it out for {path}"
                )
        command(look=Look(dark=dark, width=width, paper=paper), out=out, **others)

    return with_look


json_option = option("as_json --json", "Print JSON.")
ranks_option = option("-p --ranks N", "Ranks of the pipeline.  [default: 4]")
microbatches_option = option("-m --microbatches N", "Microbatches.  [default: twice the ranks]")
stages_option = option("--stages N", "Stages.  [default: what the schedule needs]")
slices_option = option("--slices N", "Slices of the sequence of a microbatch.", 1)
costs_option = option(
    "--costs COSTS",
    "Costs of actions, such as F=1,I=1,W=1, or a .json file; see below.",
    "",
    show_default=False,
)
_COSTS = """
Costs:
  F, I, W         time of an action
  B               time of a backward that is not split; else I + W
  overlap         time of a fused action; else the sum of its parts
  comm            time of a message on its way
  send, receive   time that a message takes of the rank at either end
  saved           memory from F to B, or to I
  kept            memory from I to W
  boundary        size of a message
  bandwidth       size per time of a link
  load=1:2        factors of times, one per microbatch
  size=1:2        factors of sizes, one per microbatch

F=1:2:1 is one number per stage. A file is that of
fpipe.measure_costs(...).to_json().
"""


class Priced(click.Command):
    """A command that takes costs: its help ends with their names."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write their names."""
        formatter.write(_COSTS)


per_option = option(
    "--per rank|stage",
    "Whose costs these are: of a rank's whole share of the model, of which each of its stages has "
    "a part, or of each stage. One number per stage is always that of the stage.",
    "rank",
)
memory_option = option(
    "--memory LIMIT",
    "What a rank may hold: 6 is the activations of six microbatches on all stages of a rank; with "
    "costs that give saved in bytes, 60GB.  [default: no limit]",
    type=str,
)


def say(text: str) -> None:
    """Print text, its lines of at most 80 columns."""
    for line in text.splitlines():
        click.echo(fill(line, 80, subsequent_indent="  ", break_on_hyphens=False))


def say_written(path: str) -> None:
    """Print which file was written, and how large it is."""
    click.echo(f"wrote {path} ({size_text(Path(path).stat().st_size)})")


def print_json(value: object) -> None:
    """One value as JSON, with infinities and NaN as null, which JSON does not have."""

    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    click.echo(json.dumps(finite, indent=1))


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The lines of a table: names of columns, and the rows.

    >>> print(table([{"x": 1, "double": 2}, {"x": 20, "double": 40}]))
     x double
     1      2
    20     40
    """
    return "\n".join(aligned([rows[0], *(row.values() for row in rows)], " "))


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


def counts(ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The counts with their defaults."""
    ranks = ranks or 4
    return ranks, microbatches or 2 * ranks


def read_file(path: Path) -> Schedule:
    """The schedule in a file, or on standard input for ``-``: brackets or CSV."""
    if str(path) == "-":
        return schedule_in(sys.stdin.read(), "standard input")
    if not path.is_file():
        raise usage_error(f"there is no file {str(path)!r}; give the path of a CSV or of text")
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
            return schedule_from(source, *counts(ranks, microbatches), stages, slices)
    schedule = read_file(Path(source))
    for name, wanted in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        actual = getattr(schedule, name)
        if wanted is not None and wanted != actual:
            raise usage_error(
                f"{source} is a schedule of {actual} {name}, not {wanted}; leave out --{name}"
            )
    return schedule


def check(schedule: Schedule, training: bool = True) -> Schedule:
    """The schedule after a check."""
    with progress(f"checking the schedule of {schedule.ranks} ranks"):
        return schedule.check(training=training)


def report_error(message: str, status: int) -> int:
    """Print an error, and return ``status``. Control characters are escaped, and long lines cut."""
    shown = [c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message]
    lines = "".join(shown).splitlines()
    text = "\n".join(line if len(line) <= 400 else f"{line[:400]} ..." for line in lines)
    click.echo(click.style("error:", fg="red", bold=True) + " " + text, err=True)
    return status
