# SPDX-License-Identifier: Apache-2.0
"""A still picture as SVG text, which follows its reader's light or dark mode. It knows shapes, not
timelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from itertools import groupby
from typing import cast

from .page import page
from .scene import Scene
from .shapes import Look, Page, Path, Rect, Shape, Text, colour_of
from .text_width import text_width

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def paint(scenes: Sequence[Scene], look: Look | None = None) -> str:
    """The file's text; an action's name and times show under the mouse."""
    look = look or Look()
    return write(
        page(scenes, look),
        alt="; ".join(scene.name or "schedule" for scene in scenes),
        dark=look.dark,
    )


def inline(scenes: Sequence[Scene], look: Look | None = None) -> str:
    """A picture for a page of HTML that may contain others: its style concerns itself alone."""
    look = look or Look()
    alt = "; ".join(scene.name or "schedule" for scene in scenes)
    drawn = page(scenes, look)
    own = "fp" + sha256(write(drawn, alt=alt, dark=look.dark).encode()).hexdigest()[:12]
    return write(drawn, alt=alt, dark=look.dark, own=own)


def write(drawn: Page, *, alt: str = "", dark: bool | None = None, own: str = "") -> str:
    """A page as SVG, for light, dark or the reader's paper; ``own`` is an id that its style is
    bound to.
    """
    width, height = _n(drawn.width), _n(drawn.height)
    place = f'id="{own}"' if own else 'style="max-width:100%;height:auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'font-family="{FONT}" role="img" {place}>',
        f"<title>{escape(_clean(alt))}</title>",
        f"<style>{''.join(_style(drawn, dark, f'#{own} ' if own else ''))}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
    ]

    def kind(shape):
        return isinstance(shape, Path) and shape.width > 0 and shape[1:]

    for line, group in groupby(drawn.shapes, kind):
        shapes = list(group)  # thousands of lines of one kind, such as messages, are one element
        lines += [_path(*cast("list[Path]", shapes))] if line else map(_shape, shapes)
    return "\n".join([*lines, "</svg>", ""])


def _class(shape: Shape) -> str:
    """The name of a colour: letters on a colour are black or white, by that colour."""
    if isinstance(shape, Text) and shape.on:
        return f"{shape.on}t"
    return f"{shape.colour}l" if isinstance(shape, Path) and shape.width else shape.colour


def _style(drawn: Page, dark: bool | None, scope: str) -> Iterator[str]:
    used = {_class(shape): shape for shape in [Rect(0, 0, 0, 0, "paper"), *drawn.shapes]}

    def rules(dark: bool) -> Iterator[str]:
        for key, shape in used.items():
            what = "fill:none;stroke" if isinstance(shape, Path) and shape.width else "fill"
            yield f"{scope}.{key}{{{what}:{colour_of(shape, drawn.shades, dark)}}}"

    yield (
        f"{scope}text{{pointer-events:none}}{scope}.b{{font-weight:600}}"
        f"{scope}.m{{text-anchor:middle}}"
    )
    yield f"{scope}.e{{text-anchor:end}}"
    yield from rules(bool(dark))
    if dark is None:
        yield from ("@media(prefers-color-scheme:dark){", *rules(True), "}")


def _shape(shape: Shape) -> str:
    if isinstance(shape, Rect):
        return _rect(shape)
    return _text(shape) if isinstance(shape, Text) else _path(shape)


def _rect(r: Rect) -> str:
    head = (
        f'<rect class="{r.colour}" x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" '
        f'height="{_n(r.height)}"'
    )
    return f"{head}><title>{escape(_clean(r.hint))}</title></rect>" if r.hint else f"{head}/>"


def _text(t: Text) -> str:
    kind = {"start": "", "middle": " m", "end": " e"}[t.anchor] + (" b" if t.bold else "")
    wide = text_width(t.text, t.size)
    if t.space and 1.25 * wide > t.space:  # typefaces differ: one that is wider is condensed
        kind += f'" textLength="{_n(min(wide, t.space))}" lengthAdjust="spacingAndGlyphs'
    place = f'x="{_n(t.x)}" y="{_n(t.y)}" font-size="{_n(t.size)}"'
    return f'<text class="{_class(t)}{kind}" {place}>{escape(_clean(t.text))}</text>'


def _path(p: Path, *more: Path) -> str:
    """Paths of one kind as one element."""
    text = "".join(_outline(one.points) for one in (p, *more))
    width = f' stroke-width="{_n(p.width)}"' if p.width else ""
    opacity = f' opacity="{_n(p.opacity)}"' if p.opacity < 1 else ""
    return f'<path class="{_class(p)}"{width}{opacity} d="{text}"/>'


def _outline(points: Sequence[tuple[float, float]]) -> str:
    """Steps are written as differences along one axis, which are shorter."""
    x, y = (round(value, 1) for value in points[0])
    text = f"M{_n(x)} {_n(y)}"
    for point in points[1:]:
        there, down = round(point[0], 1), round(point[1], 2)
        across, along = _n(there - x), _n(down - y)
        if across == "0" or along == "0":
            text += (f"h{across}" if across != "0" else "") + (f"v{along}" if along != "0" else "")
        else:
            text += f"l{across} {along}"
        x, y = there, down
    return text


def _n(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _clean(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(char if char >= " " else " " for char in text)
