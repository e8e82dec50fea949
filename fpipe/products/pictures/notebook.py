# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML for notebooks: pictures, tables and text that folds. Knows no schedules and no
pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from . import svg
from .scene import Drawable, scenes
from .shapes import Look

MOST_LINES = 400  #: of text that folds


def figure(timeline: Drawable | Sequence[Drawable], look: Look | None = None) -> str:
    """A picture that scrolls sideways where the page is narrower."""
    return f'<div style="overflow-x:auto">{svg.inline(scenes(timeline), look)}</div>'


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
