# SPDX-License-Identifier: Apache-2.0
"""Draws timelines as text, into figures and for notebooks, and writes them as files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib import import_module
from itertools import repeat
from math import inf
from os import PathLike, fspath
from pathlib import Path
from shutil import get_terminal_size
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ...actions import Timeline, write_bytes
from ...errors import FpipeError
from . import html, svg, terminal, trace
from .colours import THEME
from .fold import shortened
from .labels import is_numbers
from .scene import Look, Scenes, TimeAndMemory, Timelines, scenes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console


#: the suffixes of pictures
FORMATS = (".svg", ".png", ".pdf", ".html", ".json", ".txt")
STYLES = ("paper", "light", "dark")  #: of figures
#: pixels of a narrow cell of a notebook, and of a phone
CELLS = {"wide": 860.0, "narrow": 360.0}
#: which one is shown, by the width of the cell
FITTING = (
    "<style>.fp-narrow{display:none}@container(max-width:600px)"
    "{.fp-wide{display:none}.fp-narrow{display:block}}</style>"
)
#: a table fades out where it goes on to the right, on a ground of any colour; on a phone its heads
#: and its last column of text break
OPEN = (
    "<style>.fp-table{animation:fp-more linear;animation-timeline:scroll(self x)}@keyframes fp-more"
    "{0%,97%{mask-image:linear-gradient(to left,transparent,black 3rem)}}.fp-table svg{max-width:"
    "30vw}.fp-table td:last-child[style*=left]{white-space:normal!important}@media(max-width:600px)"
    "{.fp-table{font-size:13px}.fp-table th{white-space:normal!important}.fp-table td,.fp-table th"
    "{padding-right:.5em!important}}</style>"
    '<table class="fp-table" style="display:block;overflow-x:auto">'
)
MOST_LINES = 400  #: of text that folds
#: such text scrolls inside its cell
PRE = '<pre style="white-space:pre;overflow:auto;max-height:30em">'


def draw(
    timeline: Timelines,
    *,
    width: int | None = None,
    color: bool | None = None,
    look: Look | None = None,
) -> str:
    """A timeline, or several one over the other, as text for a terminal.

    ``width`` defaults to that of the terminal, and ``color`` to whether standard output is a
    terminal with colours (``NO_COLOR`` turns it off, ``FORCE_COLOR`` on). Without colour the text
    is plain ASCII.

    >>> from fpipe.schedule import Schedule
    >>> t = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\\n[1F0, 1B0, 1F1, 1B1]").simulate()
    >>> print(draw(t, width=60, color=False))
    schedule: 2 ranks, 2 microbatches
    total 9, bubble 33.3%, peak 2 microbatches, by rank: 2, 1
    Bubble by cause: warm-up 16.7%, tail 16.7%.
    A rank's stage takes F 1, B 2.
           0         2         4         6         8
    rank 0 0F0- 0F1- ..........0B0------ .....0B1------
    rank 1 .....1F0- 1B0------ 1F1- 1B1------ ..........
    <BLANKLINE>
    F forward  B backward  - goes on  . idle
    1F0: F of microbatch 0 on stage 1
    <BLANKLINE>
    """
    columns = get_terminal_size().columns if width is None else width
    colours = _colours() if color is None else "truecolor" if color else ""
    shown = look or Look()
    return _text(scenes(timeline, shown.difference), shown, columns, colours)


def _text(
    drawn: Scenes,
    look: Look,
    columns: int,
    colours: str = "",
) -> str:
    if look.full:
        return terminal.paint(drawn, columns, colours, inf)
    return terminal.paint(shortened(drawn, Look()), columns, colours)


def strip(timeline: Timeline, console: Console, width: int) -> str:
    """A timeline on one axis, without notes, for a console of rich."""
    return terminal.paint(scenes(timeline), width, colours_of(console), 0)


def plot(
    timeline: Timelines,
    ax: Axes | None = None,
    style: str = "paper",
    look: Look | None = None,
) -> Axes:
    """Draw a timeline, or several one over the other, into ``ax``, or into a new figure of pyplot.

    Raises:
        FpipeError: if matplotlib is not installed, or no style has this name.
    """
    if style not in STYLES:
        raise FpipeError(f"no style is called {style!r}; use {', '.join(STYLES)}")
    shown = replace(look or Look(), paper=style == "paper", dark=style == "dark")
    return _figures().plot(scenes(timeline, shown.difference), shown, ax)


def save(timeline: Timelines, path: str | PathLike[str], look: Look | None = None) -> None:
    """Write a picture of ``timeline``, or of several, to ``path``; its suffix selects the format
    (see ``FORMATS``).

    ``look`` says what is shown beside the actions, for which paper and how wide.

    >>> save([], "picture.gif")
    Traceback (most recent call last):
    ...
    fpipe.errors.FpipeError: no picture is written as '.gif' (picture.gif); use .svg, .png, .pdf,
    .html, .json or .txt
    """
    shown = look or Look()

    def painted(suffix: str) -> str | bytes:
        drawn = scenes(timeline, shown.difference)
        if suffix == ".html":
            return html.paint(drawn, shown)
        if suffix == ".json":
            return trace.paint(drawn)
        if suffix == ".txt":
            return _text(drawn, shown, int(shown.width or 160))
        drawn = shortened(drawn, shown)
        if suffix == ".svg" and not shown.paper:
            return svg.paint(drawn, shown)
        return _figures().paint(drawn, shown, suffix)

    write("picture", path, FORMATS, painted)


def width_with_numbers(timeline: Timelines, look: Look) -> float:
    """The inches that a picture for a paper needs for numbers in its short bars; 0 if it has
    them.
    """
    drawn = shortened(scenes(timeline, look.difference), look)
    return _figures().width_with_numbers(drawn, look)


def write(
    what: str,
    path: str | PathLike[str],
    suffixes: Sequence[str],
    content_for: Callable[[str], str | bytes],
) -> None:
    """Write a file in the format of its suffix."""
    suffix = Path(fspath(path)).suffix.lower()
    if suffix not in suffixes:
        *most, last = suffixes
        raise FpipeError(
            f"no {what} is written as {suffix!r} ({fspath(path)}); use {', '.join(most)} or {last}"
        )
    content = content_for(suffix)
    try:
        write_bytes(path, content if isinstance(content, bytes) else content.encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise FpipeError(
            f"cannot write {fspath(path)!r}: {why}; give a path that can be written"
        ) from error


def frontier(
    points: Sequence[TimeAndMemory],
    path: str | PathLike[str],
    look: Look,
    title: str,
    limit: float,
    take: str,
    below: str = "",
) -> None:
    """Write time against memory as ``.svg``, ``.png``, ``.pdf`` or ``.html``.

    A point is a name, a memory, a total, and whether no other one has less of one and not more of
    the other. ``limit`` is what a rank may hold, ``take`` the name of the point to take, and
    ``below`` what a page has below the picture, as HTML.
    """
    paint = _figures("scatter").paint
    write(
        "picture",
        path,
        FORMATS[:4],
        lambda suffix: paint(points, look, suffix, title, limit, take, below),
    )


def _figures(module: str = "plotting") -> ModuleType:
    try:
        return import_module(f".{module}", __package__)
    except ImportError as error:
        raise FpipeError(
            "figures, .png and .pdf need matplotlib: pip install fpipe[pictures], or write .svg"
        ) from error


def _colours() -> str:
    """The colours that standard output shows."""
    if not (os.environ.get("FORCE_COLOR") or sys.stdout.isatty()):
        return ""
    from rich.console import Console  # slow, and not needed for files

    return colours_of(Console())


def colours_of(console: Console) -> str:
    """The system of colours of a console. One without UTF has no character for the edges of bars,
    and gets none. Terminals that say to have 16 colours know how to show 256.
    """
    if console.no_color or not console.encoding.startswith("utf"):
        return ""
    return "256" if console.color_system == "standard" else console.color_system or ""


# ---- pieces of HTML for notebooks ----
def figure(timeline: Timelines, titled: bool = True, unit: str = "") -> str:
    """A picture as wide as its cell, and another one for a cell of a phone, where all letters would
    be too small. The first one scrolls sideways where it is less than 600 pixels. ``unit`` is that
    of what ranks hold; by default it follows from the amounts.
    """
    whole = [replace(scene, unit=unit or scene.unit) for scene in scenes(timeline)]
    drawings: list[str] = []
    for kind, width in CELLS.items():
        look = Look(width=width, titled=titled)
        drawing = svg.paint(shortened(whole, look), look, inline=True)
        drawings.append(f'<div class="fp-{kind}" style="overflow-x:auto">{drawing}</div>')
    return f'<div style="container-type:inline-size">{FITTING}{"".join(drawings)}</div>'


class Cell(NamedTuple):
    """What a table shows as text, and as HTML."""

    text: str
    html: str

    def __str__(self) -> str:
        return self.text


def curve(timeline: Timeline, rank: int, most: float) -> str:
    """What a rank holds, as a small picture whose full height is ``most``."""
    across = 240 / (timeline.total or 1.0)
    up = 24 / (most or 1.0)
    points = [
        (across * (time - timeline.start), 24 - up * held) for time, held in timeline.curve(rank)
    ]
    path = svg.outline([(0, 24), *points, (240, 24)])
    return (
        '<svg width="160" height="24" viewBox="0 0 240 24" preserveAspectRatio="none" role="img">'
        "<title>memory over the step</title>"
        f'<path fill="{THEME["curve"][0]}" d="{path}"/></svg>'
    )


def table(head: Sequence[object], *body: Sequence[object]) -> str:
    """A table; cells are text, or a ``Cell``.

    >>> table(["rank"], ["a"])
    '<style>...<tr><th style="...">rank</th></tr><tr><td style="...">a</td></tr></table>'
    """
    columns = zip(*body, strict=True)
    sides = ["right" if is_numbers(map(str, column)) else "left" for column in columns]

    def line(tag: str, cells: Sequence[object]) -> str:
        shown = (cell.html if isinstance(cell, Cell) else escape(str(cell)) for cell in cells)
        styled = zip(sides or repeat("left"), shown, strict=False)
        return "".join(
            f'<{tag} style="padding-right:1em;white-space:nowrap;text-align:{side}">{text}</{tag}>'
            for side, text in styled
        )

    lines = [line("th", head), *(line("td", row) for row in body)]
    inner = "".join(f"<tr>{text}</tr>" for text in lines)
    return f"{OPEN}{inner}</table>"


def folded(text: str) -> str:
    """Text in fixed width below its first line, which opens it; of a long one the beginning."""
    summary, *lines = text.splitlines()
    more = f"\n... and {len(lines) - MOST_LINES} more lines" if len(lines) > MOST_LINES else ""
    shown = escape("\n".join(lines[:MOST_LINES]) + more)
    inner = f"<summary>{escape(summary)}</summary>{PRE}{shown}</pre>"
    return f"<details>{inner}</details>"
