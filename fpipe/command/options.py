# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, the schedule that they name, and error reports. Knows no command and no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from ..errors import ScheduleError
from ..generators import is_path, read_schedule, schedule_from
from ..schedule import Schedule
from ..schedules.costs import Costs
from ..schedules.files import read_bytes
from ..schedules.progress import progress

MOST_COSTS = 16 << 20  #: bytes of a file of costs
INVALID = 1  #: exit status for a schedule that is not valid
MAX_SIZE = 1_000_000  #: ranks x microbatches of a schedule that a command builds
Command = TypeVar("Command", bound=Callable[..., object])


class Count(click.IntRange):
    """A whole number within bounds, 1 or more by default."""

    name = "whole number"

    def __init__(self, low: int = 1, high: int | None = None):
        super().__init__(low, high)


def counts(command: Command) -> Command:
    """The options --ranks, --microbatches and --stages."""
    option = partial(click.option, metavar="N", type=Count())
    stages = option("--stages", help="Stages.  [default: what the schedule needs]")
    microbatches = option("-m", "--microbatches", help="Microbatches.  [default: twice the ranks]")
    return option("-p", "--ranks", help="Ranks of the pipeline.  [default: 4]")(microbatches(stages(command)))


costs_option = click.option(
    "--costs",
    metavar="F=1,I=1,...",
    default="",
    help="Costs of actions: F, I, W, B (I + W), overlap (a fused action), comm (a message), send and receive (the time "
    "that a message takes of either rank), and for memory and bandwidth: saved, kept, boundary, bandwidth. F=1:2:1 is "
    "one number per stage. Or a file written by fpipe profile.",
)


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
    """The counts with their defaults; raises where a schedule of this size would fill the memory."""
    ranks = ranks or 4
    microbatches = microbatches or 2 * ranks
    if (size := ranks * microbatches) > MAX_SIZE:
        raise usage_error(f"{ranks} ranks and {microbatches} microbatches multiply to {size}; take at most {MAX_SIZE}")
    return ranks, microbatches


def read_file(path: Path) -> Schedule:
    """The schedule in a file: brackets or CSV."""
    if not path.is_file():
        raise usage_error(f"there is no file {str(path)!r}")
    with progress(f"reading {path}") as track:
        return read_schedule(path, track)


def named_schedule(source: str, ranks: int | None, microbatches: int | None, stages: int | None = None) -> Schedule:
    """The schedule of a name, built with these counts, or of a file, which must have these counts."""
    if not is_path(source):
        with as_usage_error():
            return schedule_from(source, *bounded(ranks, microbatches), stages)
    schedule = read_file(Path(source))
    for name, wanted in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        actual = getattr(schedule, name)
        if wanted is not None and wanted != actual:
            raise usage_error(f"{source} is a schedule of {actual} {name}, not {wanted}; leave out --{name}")
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
        raise click.BadParameter(f"{path}: give a file that ends in {', '.join(suffixes)}", param_hint=option)


def report_error(message: str, status: int) -> int:
    """Print an error, and return ``status``. Control characters are escaped, and long lines cut."""
    lines = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message).splitlines()
    text = "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in lines)
    click.echo(click.style("error:", fg="red", bold=True) + " " + text, err=True)
    return status
