# SPDX-License-Identifier: Apache-2.0
"""A still picture as SVG text. It knows shapes (``page``), not timelines."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .colours import PAPER
from .page import Page, Rect, Text, page
from .scene import Scene

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def paint(scenes: Sequence[Scene]) -> str:
    """The file's text; an action's name and times show under the mouse."""
    return write(page(scenes), alt="; ".join(scene.name or "schedule" for scene in scenes))


def write(drawn: Page, *, alt: str = "") -> str:
    """A page as SVG."""
    width, height = _n(drawn.width), _n(drawn.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">',
        f"<title>{escape(_clean(alt))}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
    ]
    lines += [_rect(shape) if isinstance(shape, Rect) else _text(shape) for shape in drawn.shapes]
    return "\n".join([*lines, "</svg>", ""])


def _rect(r: Rect) -> str:
    head = f'<rect x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" height="{_n(r.height)}" fill="{r.colour}"'
    return f"{head}><title>{escape(_clean(r.hint))}</title></rect>" if r.hint else f"{head}/>"


def _text(t: Text) -> str:
    anchor = f' text-anchor="{t.anchor}"' if t.anchor != "start" else ""
    weight = ' font-weight="600"' if t.bold else ""
    place = f'x="{_n(t.x)}" y="{_n(t.y)}" font-size="{_n(t.size)}"'
    # labels in bars let the mouse through to the bar and its hint
    return f'<text {place} fill="{t.colour}"{anchor}{weight} pointer-events="none">{escape(_clean(t.text))}</text>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _clean(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(char if char >= " " else " " for char in text)
