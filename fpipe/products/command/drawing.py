# SPDX-License-Identifier: Apache-2.0
"""``fpipe draw`` and ``fpipe view``: pictures of schedules and timelines. Never imports torch."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from ...actions import Costs, progress
from .. import pictures
from . import options


@click.command()
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...", type=options.Source())
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
    "--critical", is_flag=True, help="A line through the actions on which the total depends."
)
@click.option("--messages", is_flag=True, help="A line for every message between ranks.")
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
    critical: bool,
    messages: bool,
    difference: bool,
    dark: bool | None,
    color: bool | None,
) -> None:
    """Draw schedules by name or from files; SCHEDULE is either.

    Several schedules are drawn above each other on one axis of time. Costs are those of a rank's
    whole share of the model, so that a schedule has the same figures here, beside others and in
    fpipe compare.

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
    made = [
        options.named_schedule(source, ranks, microbatches, stages, slices) for source in schedules
    ]
    valid = list(map(options.checked, made))
    if difference and len(schedules) < 2:
        raise options.usage_error(
            "--difference needs two schedules; name another one, or the same with other costs"
        )
    look = pictures.Look(memory, critical, messages, difference, dark, width)
    with progress("drawing"):
        with options.as_usage_error():  # costs for another number of stages
            timelines = [
                s.simulate(options.priced(price, s, per, alone=len(valid) == 1)) for s in valid
            ]
        for path in out:
            pictures.save(timelines, path, look)
        text = (
            "" if out else pictures.draw(timelines, width=width, color=color, difference=difference)
        )
    for path in out:
        click.echo(f"wrote {path} ({_size(path)})")
    click.echo(text, nl=False, color=True)


@click.command()
@click.argument("path", metavar="FILE|DIR", type=click.Path(exists=True, path_type=Path))
@options.costs_option
@options.per_option
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page.  [default: beside FILE, or in DIR]",
)
@click.option("--open/--no-open", "show", default=True, help="Open it in the browser.")
def view(path: Path, costs: str, per: str, out: Path | None, show: bool) -> None:
    """Explore timelines in a browser: zoom, search, hover.

    FILE is a timeline saved as .json, or a schedule as CSV. DIR is a folder of timelines, as
    written by fpipe train; they are shown above each other. The page needs no network.

    \b
    fpipe view run/
    fpipe view plan.csv --costs F=1,I=1,W=1,comm=0.1 --no-open
    """
    if path.suffix.lower() == ".html":
        out = path
    else:
        out = out or (path / "timeline.html" if path.is_dir() else path.with_suffix(".html"))
        if out.suffix.lower() != ".html":
            raise click.BadParameter(
                f"{out}: the page is a file that ends in .html", param_hint="--out"
            )
        if out.exists() and b'content="fpipe"' not in out.read_bytes()[:4096]:
            raise options.usage_error(
                f"{out} exists, and fpipe did not write it; give another name with --out"
            )
        with progress(f"drawing {path}"):
            pictures.save(_timelines(path, options.parse_costs(costs), per), out)
        click.echo(f"wrote {out} ({_size(out)})")
    if not show and out == path:
        click.echo(str(out.resolve()))
    if show and not webbrowser.open(out.resolve().as_uri()):
        click.echo(f"no browser could be opened here; open {out} in one")


def _timelines(path: Path, price: Costs, per: str) -> Sequence[pictures.Drawable]:
    if not path.is_dir():
        if path.suffix.lower() == ".json":
            return pictures.load(path)
        schedule = options.checked(options.read_file(path))
        return [schedule.simulate(options.priced(price, schedule, per))]
    timelines = [file for file in sorted(path.glob("*.json")) if pictures.is_timeline(file)]
    if not timelines:
        raise options.usage_error(f"{path} holds no timeline; save one there as .json")
    timelines.sort(key=lambda file: "simulated" not in file.name)  # simulated ones first
    return pictures.load(timelines)


def _size(path: str | Path) -> str:
    count = Path(path).stat().st_size
    return (
        f"{count / 1e6:.1f} MB"
        if count >= 1e6
        else f"{count / 1e3:.0f} kB"
        if count >= 1e3
        else f"{count} bytes"
    )
