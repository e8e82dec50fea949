"""The command ``fpipe``: schedules drawn, checked and compared, timelines viewed; other rooms add their own commands.

Exit status: 0 all is well, 1 a schedule is not valid, 2 the command was not understood or could not do its work, 130
interrupted. Errors are one message on standard error, never a traceback (``FPIPE_TRACEBACK=1`` shows where an
internal one comes from). Nothing here imports torch; a command that needs it stands in ``ELSEWHERE`` by name.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import FpipeError, ScheduleError
from ..generators import about_schedule, comparison, is_path, read_schedule, schedule_from, schedule_names
from ..schedule import Schedule
from ..schedules import pictures
from ..schedules.costs import Costs

#: name -> (module:command, the line that `fpipe --help` shows): loaded when they are run
ELSEWHERE: dict[str, tuple[str, str]] = {
    "train": ("fpipe.command.training.command:train", "Train a small GPT through processes, and check its gradients."),
    "profile": ("fpipe.command.profile:profile", "Measure what stages and messages cost, as a file of costs."),
    "doctor": ("fpipe.command.doctor:command", "Probe this machine's backend, and show what is done about its faults."),
}

MOST = 1_000_000  # ranks x microbatches

INVALID, USAGE, INTERNAL, INTERRUPTED, PIPE = 1, 2, 70, 130, 141


# ---- the frame ------------------------------------------------------------------------------------------------------
class _Commands(click.Group):
    """Commands of this module and, by name, of others; a typo gets the nearest names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ELSEWHERE:
            module, _, attribute = ELSEWHERE[cmd_name][0].partition(":")
            return getattr(import_module(module), attribute)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(known)}"
        if not near and any(name.lower() == schedule.lower() for schedule in (*schedule_names(), "ZBV")):
            hint = f"to see the schedule: fpipe draw {name}"
        raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl([*rows, *((name, line) for name, (_, line) in ELSEWHERE.items())])


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; ``args`` is the command line's where it is left out.

    >>> main(["check", "no-such-file.csv"])
    2
    """
    try:
        status = fpipe.main(args=None if args is None else list(args), prog_name="fpipe", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption):  # the nearest alone, not three by the alphabet
            near = get_close_matches(error.option_name, error.possibilities or (), n=1)
            error = click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)
        where = error.ctx.command_path if error.ctx else "fpipe"
        return _fail(f"{error.format_message()}  ({where} --help tells more)", USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except FpipeError as error:
        return _fail(str(error), INVALID if isinstance(error, ScheduleError) else USAGE)
    except BrokenPipeError:  # the reader, say `head`, has seen enough; nothing more may be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", USAGE)
    except Exception as error:
        if os.environ.get("FPIPE_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"this is a bug in fpipe: {what}; FPIPE_TRACEBACK=1 shows where it comes from", INTERNAL)


def _fail(message: str, status: int) -> int:
    """Tell an error. Control characters are made visible, and lines without end are cut."""
    lines = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message).splitlines()
    text = "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in lines)
    click.echo(click.style("error:", fg="red", bold=True) + " " + text, err=True)
    return status


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="fpipe %(version)s")
@click.pass_context
def fpipe(ctx: click.Context) -> None:
    """Pipeline schedules as data: draw them, check them, compare them.

    \b
    fpipe draw ZBV --ranks 4 --microbatches 8      a schedule in the terminal
    fpipe compare --ranks 8 --microbatches 24      all schedules, with bubbles and memory
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# ---- options that several commands share ----------------------------------------------------------------------------
class _Count(click.ParamType):
    """A whole number, 1 or more."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number < 1:
            self.fail(f"{value} is not a count; give a whole number, 1 or more", param, ctx)
        return number


@contextmanager
def _as_usage() -> Iterator[None]:
    """What is wrong with a name or with counts is the command's fault, not a schedule's."""
    try:
        yield
    except ScheduleError as error:
        raise click.UsageError(str(error), click.get_current_context()) from error


def _counts(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("-p", "--ranks", type=_Count(), help="Ranks of the pipeline.  [default: 4]"),
        click.option("-m", "--microbatches", type=_Count(), help="Microbatches.  [default: twice the ranks]"),
        click.option("--stages", type=_Count(), help="Stages in all.  [default: what the schedule needs]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


_costs_option = click.option(
    "--costs",
    metavar="F=1,I=1,...",
    default="",
    help="What actions cost: F, I, W, B (I + W), overlap (a fused action), comm (a message), send and receive (what it "
    "costs either rank), and for memory and bandwidth saved, kept, boundary, bandwidth. F=1:2:1 is one number per "
    "stage. Or a file that fpipe profile wrote.",
)


def _costs(text: str) -> Costs:
    try:
        if text.endswith(".json"):
            return Costs.from_json(Path(text).read_text(encoding="utf-8"))
        return Costs.parse(text)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise click.BadParameter(str(error), param_hint="--costs") from error


def _given(what: str, ranks: int | None, microbatches: int | None, stages: int | None) -> Schedule:
    """The schedule of a name or a file; the counts make the one and are checked against the other."""
    if not is_path(what):
        p, m = _bounded(ranks, microbatches)
        with _as_usage():
            return schedule_from(what, p, m, stages)
    found = _read(Path(what))
    for name, asked in (("ranks", ranks), ("microbatches", microbatches), ("stages", stages)):
        has = getattr(found, name)
        if asked is not None and asked != has:
            raise click.UsageError(
                f"{what} is a schedule of {has} {name}, but --{name} {asked} was asked for; leave that option out",
                click.get_current_context(),
            )
    return found


def _bounded(ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The counts with their defaults; ones that would fill the machine's memory are refused."""
    p = ranks or 4
    m = microbatches or 2 * p
    if p * m > MOST:
        raise click.UsageError(
            f"{p} ranks with {m} microbatches are {p * m} times the actions of one; take at most {MOST}",
            click.get_current_context(),
        )
    return p, m


def _read(path: Path) -> Schedule:
    """The schedule in a file: brackets or CSV."""
    if not path.is_file():
        raise click.UsageError(f"there is no file {str(path)!r}", click.get_current_context())
    return read_schedule(path)


def _checked(schedule: Schedule) -> Schedule:
    """Checked, as a schedule of forwards alone where it has nothing else."""
    ops = {part.op for row in schedule for action in row for part in action.parts}
    return schedule.check(training=ops != {"F"})


# ---- draw -----------------------------------------------------------------------------------------------------------
@fpipe.command()
@click.argument("schedules", nargs=-1, required=True, metavar="NAME|FILE...")
@_counts
@_costs_option
@click.option(
    "-o", "--out", multiple=True, type=click.Path(dir_okay=False), help="Write .svg, .png, .html, .json, .txt."
)
@click.option("--width", type=_Count(), help="Columns of text.  [default: the terminal's]")
@click.option("--color/--no-color", default=None, help="Colours.  [default: where the output is a terminal]")
def draw(
    schedules: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    costs: str,
    out: tuple[str, ...],
    width: int | None,
    color: bool | None,
) -> None:
    """Draw a schedule by name, or one from a file.

    Several are drawn one over the other, on one axis of time; their costs are then those of a rank's whole share of
    the model, so that schedules with one stage a rank and with two can be compared.

    \b
    fpipe draw ZBV --ranks 4 --microbatches 8
    fpipe draw DualPipeV -p 4 -m 10 --costs overlap=3,comm=0.1 --out dualpipev.svg
    fpipe draw 1F1B ZBV --out both.html
    fpipe draw plan.csv
    """
    price = _costs(costs)
    for path in out:
        if Path(path).suffix.lower() not in pictures.FORMATS:
            raise click.BadParameter(
                f"{path}: give a file that ends in {', '.join(pictures.FORMATS)}", param_hint="--out"
            )
    found = [_checked(_given(what, ranks, microbatches, stages)) for what in schedules]
    with _as_usage():  # costs for another number of stages
        timelines = [s.simulate(comparison.per_share(price, s) if len(found) > 1 else price) for s in found]
    for path in out:
        pictures.save(timelines, path)
        click.echo(f"wrote {path} ({_size(path)})")
    if not out:
        click.echo(pictures.draw(timelines, width=width, color=color), nl=False, color=True)


def _size(path: str | Path) -> str:
    count = Path(path).stat().st_size
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB" if count >= 1e3 else f"{count} bytes"


# ---- check ----------------------------------------------------------------------------------------------------------
@fpipe.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("-p", "--ranks", type=_Count(), help="Ranks that the schedule must have.")
@click.option("--forward-only", is_flag=True, help="Ask for forwards alone.")
def check(files: tuple[str, ...], ranks: int | None, forward_only: bool) -> int:
    """Check schedules in CSV files, or as text with brackets.

    What is wrong is told with its rank, position, rule and remedy, and the exit status is 1.

    \b
    fpipe check plan.csv && echo good
    """
    status = 0
    for file in files:
        schedule = None
        try:
            schedule = _read(Path(file))
            if ranks is not None and schedule.ranks != ranks:
                raise ScheduleError(f"there are {schedule.ranks} ranks, and {ranks} were asked for", rule="ranks")
            schedule.check(training=not forward_only)
        except ScheduleError as error:
            status = _fail(f"{file}: {error}", INVALID)
            continue
        actions = sum(map(len, schedule))
        counts = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        click.echo(f"{file}: good: {counts}, {actions} actions")
    return status


# ---- names ----------------------------------------------------------------------------------------------------------
@fpipe.command()
def names() -> None:
    """List the schedules that have a name."""
    known = schedule_names()
    wide = max(map(len, known))
    for name in known:
        click.echo(f"{name:<{wide}}  {about_schedule(name).replace('``', '')}".rstrip())


# ---- compare --------------------------------------------------------------------------------------------------------
@fpipe.command()
@_counts
@_costs_option
def compare(ranks: int | None, microbatches: int | None, stages: int | None, costs: str) -> None:
    """Compare all schedules: bubble, time, memory, messages.

    Costs are those of a rank's whole share of the model: a schedule with two stages a rank pays half for each. The
    bubble is 1 - work / span, where span is the longest time from a rank's own first start to its own last end; total
    is from the first start of all to the last end of all. Memory is counted in activations of a whole share for one
    microbatch, weights in copies of a share; a message carries one microbatch's activations, or their gradient, from
    one rank to another. The best of a column has a star.

    \b
    fpipe compare --ranks 8 --microbatches 24
    fpipe compare -p 8 -m 24 --costs F=18.5,I=18.1,W=9.3,comm=0.6
    """
    p, m = _bounded(ranks, microbatches)
    price = _costs(costs)
    with _as_usage():
        entries, left_out = comparison.compare(p, m, stages=stages, costs=price)
    click.echo(f"ranks {p}, microbatches {m}, {price!r} for a rank's whole share\n")
    for line in comparison.table(entries, best=lambda cell: click.style(cell, bold=True)):
        click.echo(line)
    if left_out:
        click.echo("\nnot for these counts:\n" + "\n".join(f"  {line}" for line in left_out))


# ---- view -----------------------------------------------------------------------------------------------------------
@fpipe.command()
@click.argument("path", metavar="FILE|DIR", type=click.Path(exists=True, path_type=Path))
@_costs_option
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The page.  [default: beside PATH]")
@click.option("--open/--no-open", "show", default=True, help="Open it in the browser.  [default: open]")
def view(path: Path, costs: str, out: Path | None, show: bool) -> None:
    """Explore timelines in a browser: zoom, search, hover.

    FILE is a timeline that was saved as .json, or a schedule as CSV; DIR is a folder with such timelines, as
    fpipe train writes it, and they are shown one over the other. The page needs no network.

    \b
    fpipe view run/
    fpipe view plan.csv --costs F=1,I=1,W=1,comm=0.1 --no-open
    """
    if path.suffix.lower() == ".html":
        out = path
    else:
        out = out or (path / "timeline.html" if path.is_dir() else path.with_suffix(".html"))
        if out.suffix.lower() != ".html":
            raise click.BadParameter(f"{out}: the page is a file that ends in .html", param_hint="--out")
        if out.exists() and b'content="fpipe"' not in out.read_bytes()[:4096]:
            raise click.UsageError(f"{out} is there and fpipe did not write it; say where with --out")
        pictures.save(_timelines(path, _costs(costs)), out)
        click.echo(f"wrote {out} ({_size(out)})")
    if show and not webbrowser.open(out.resolve().as_uri()):
        click.echo(f"no browser could be opened here; open {out} in one")


def _timelines(path: Path, price: Costs) -> Sequence[pictures.Drawable]:
    if not path.is_dir():
        if path.suffix.lower() == ".json":
            return pictures.load(path)
        return [_checked(_read(path)).simulate(price)]
    found = [file for file in sorted(path.glob("*.json")) if pictures.is_timeline(file)]
    if not found:
        raise click.UsageError(f"{path} holds no timeline; save one there as .json", click.get_current_context())
    found.sort(key=lambda file: "simulated" not in file.name)  # then by name, as it was
    return pictures.load(found)
