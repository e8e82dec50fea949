# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML for notebooks: pictures, tables and text that folds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from . import page
from .convert import Drawable, scenes
from .labels import Look

MOST_LINES = 400  #: of text that folds


def figure(timeline: Drawable | Sequence[Drawable]) -> str:
    """A picture that scrolls sideways where the page is narrower."""
    drawing = page.paint(scenes(timeline), Look(), inline=True)
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
