# SPDX-License-Identifier: Apache-2.0
"""Draws timelines as text, into figures and for notebooks, writes them as files and reads them
again.

What is drawn is typed by a protocol, :class:`~fpipe.products.pictures.convert.Drawable`, so that
nothing here knows schedules or simulation.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...actions import write_bytes
from ...errors import FpipeError
from . import html, plotting, svg, terminal, trace
from .convert import Drawable, Timelines, scenes
from .labels import Look
from .scene import Scenes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAINTERS: dict[str, Callable[[Scenes, Look], str | bytes]] = {
    ".svg": svg.paint,
    ".png": partial(plotting.paint, suffix=".png"),
    ".pdf": partial(plotting.paint, suffix=".pdf"),
    ".html": html.paint,
    ".json": lambda scenes, look: trace.paint(scenes),
    ".txt": lambda scenes, look: terminal.paint(scenes),
}
#: the suffixes of pictures
FORMATS = tuple(_PAINTERS)
MOST_LINES = 400  #: of text that folds


def draw(
    timeline: Timelines,
    *,
    width: int | None = None,
    color: bool | None = None,
    difference: bool = False,
) -> str:
    """A timeline, or several one over the other, as text for a terminal.

    ``width`` defaults to that of the terminal, and ``color`` to whether standard output is a
    terminal with colours (``NO_COLOR`` turns it off, ``FORCE_COLOR`` on). Without colour the text
    is plain ASCII.

    >>> from fpipe.schedule import Schedule
    >>> t = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\\n[1F0, 1B0, 1F1, 1B1]").simulate()
    >>> print(draw(t, width=60, color=False))
    schedule: 2 ranks, 2 microbatches
           0         2         4         6         8
    rank 0 0F0- 0F1- ..........0B0------ .....0B1------
    rank 1 .....1F0- 1B0------ 1F1- 1B1------ ..........
    <BLANKLINE>
    total 9, span 9, bubble 33.3%, peak 2 (by rank 2 1)
    Idle 33.3% of all ranks' time: warm-up 16.7%, tail 16.7%.
    Times in units of the costs: the stage of a rank takes F 1,
      B 2. Memory in microbatches: F adds 1.
    F forward  B backward
    <BLANKLINE>
    """
    if width is None:
        width = shutil.get_terminal_size().columns
    bits = _colour_bits() if color is None else 24 if color else 0
    return terminal.paint(scenes(timeline, difference), max(width, 16), bits)


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
    look = look or Look()
    return plotting.plot(scenes(timeline, look.difference), look, style, ax)


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
    suffix = Path(fspath(path)).suffix.lower()
    if suffix not in FORMATS:
        *most, last = FORMATS
        raise FpipeError(
            f"no picture is written as {suffix!r} ({fspath(path)}); use {', '.join(most)} or {last}"
        )
    look = look or Look()
    picture = _PAINTERS[suffix](scenes(timeline, look.difference), look)
    try:
        write_bytes(path, picture if isinstance(picture, bytes) else picture.encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise FpipeError(
            f"cannot write {fspath(path)!r}: {why}; give a path that can be written"
        ) from error


def load(paths: str | PathLike[str] | Iterable[str | PathLike[str]]) -> tuple[Drawable, ...]:
    """The timelines that :func:`save` wrote as ``.json``, from one file or several, to be drawn
    again.
    """
    files = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
    return tuple(timeline for path in files for timeline in trace.read(Path(path)))


def _colour_bits() -> int:
    """The bits of colour that standard output shows: 0, 8 or 24."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return 0
    try:
        "▏▌▐".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return 0
    if not (os.environ.get("FORCE_COLOR") or sys.stdout.isatty()):
        return 0
    return 24 if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit") else 8


# ---- pieces of HTML for notebooks ----
def figure(timeline: Timelines) -> str:
    """A picture that scrolls sideways where the page is narrower."""
    drawing = svg.paint(scenes(timeline), Look(), inline=True)
    return f'<div style="overflow-x:auto">{drawing}</div>'


def pipeline(config: Any, picture: str) -> str:
    """What a pipeline is built from, above a picture of its schedule."""
    rows = [
        ("pipeline", repr(config)),
        ("stages of this process", ", ".join(map(str, config.here))),
        ("placement", repr(config.placement)),
        ("microbatches", config.microbatches or "by the call"),
        ("loss", getattr(config.loss, "__name__", config.loss)),
        ("reduction", config.reduction),
    ]
    return table(["", ""], rows) + picture


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; cells are text.

    >>> table(["rank"], [[0]])
    '<table><tr><th>rank</th></tr><tr><td>0</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def titled(text: str) -> str:
    """Text that folds below its first line."""
    head, _, rest = text.partition("\n")
    return folded(head, rest)


def folded(summary: str, text: str) -> str:
    """Text in fixed width below a line that opens it; of a long one the beginning."""
    lines = text.splitlines()
    more = f"\n... and {len(lines) - MOST_LINES} more lines" if len(lines) > MOST_LINES else ""
    shown = escape("\n".join(lines[:MOST_LINES]) + more)
    return f"<details><summary>{escape(summary)}</summary><pre>{shown}</pre></details>"
