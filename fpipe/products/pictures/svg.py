# SPDX-License-Identifier: Apache-2.0
"""A still picture in SVG, which follows its reader's light or dark mode: titles, axis, lanes and
legend.

The class of an element names its colour, a key of ``colours.palette``: ``F0`` fills it, ``F0l`` is
a line in it, and ``F0t`` is a text on it, black or white.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from itertools import count, takewhile
from typing import NamedTuple

from ...actions import OPS
from . import labels
from .colours import ink, palette
from .labels import text_width, wrapped
from .scene import Look, Points, Scene, Scenes
from .shapes import (
    GAP,
    Frame,
    Label,
    Rect,
    Shape,
    frame,
    natural_size,
    shapes,
)

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
EDGE = 24  # around the page
PHONE = 700  # pages narrower than this have short labels beside the lanes


class _Sheet(NamedTuple):
    """Where things are on the page."""

    frame: Frame
    short: bool  # labels beside the lanes
    margin: float
    left: float  # of the lanes
    width: float  # of the lanes
    right: float  # of the page

    def x(self, time: float) -> float:
        """Where a time is."""
        return self.left + time * self.frame.scale


def paint(scenes: Scenes, look: Look, inline: bool = False) -> str:
    """The scenes as SVG, one over the other on one axis; ``inline`` for a page of HTML."""
    sheet = _sheet(scenes, look)
    elements: list[str] = []
    y: float = EDGE
    for scene in scenes:
        for line, size, height, kind in _heading(scene, sheet):
            elements.append(text(sheet.margin, y + 14, line, size, kind))
            y += height
        y += 30
        elements += _axis(scenes, scene, sheet, y)
        for rank in range(len(scene.lanes)):
            elements += _names(rank, scene, sheet, y)
            drawn = shapes(rank, scene, sheet.frame)
            elements += (_element(shape, sheet, y) for shape in drawn)
        y += len(scene.lanes) * sheet.frame.pitch - GAP + 22
    legend, y = _legend(scenes, look, sheet, y)
    size = sheet.right, y + EDGE - 8
    return document([*elements, *legend], size, scenes, look.dark, inline)


def _sheet(scenes: Scenes, look: Look) -> _Sheet:
    last = max(len(scene.lanes) for scene in scenes) - 1
    short = look.width is not None and look.width < PHONE
    margin = 12 if short else EDGE
    left = margin + 10 + 7 * len(str(last) if short else f"rank {last}")
    beside = 12.0
    if not short:
        figures = [labels.figures_of(lane, scene) for scene in scenes for lane in scene.lanes]
        beside = 24 + max(text_width(figure, 11) for figure in figures)
    width, lane = natural_size(scenes)
    if look.width is not None:
        width = max(look.width - left - beside, 60.0)
    measures = frame(scenes, look, width, lane)
    return _Sheet(measures, short, margin, left, width, left + width + beside)


def _heading(scene: Scene, sheet: _Sheet) -> Iterator[tuple[str, float, float, str]]:
    """Title, figures and what they mean: (line, size, height, kind)."""
    space = sheet.right - sheet.margin - 12
    for line in wrapped(labels.title(scene), 17, space):
        yield line, 17, 20, "ink b"
    for note in labels.notes(scene):
        for line in wrapped(note, 12.5, space):
            yield line, 12.5, 17, "faint"


def _axis(scenes: Scenes, scene: Scene, sheet: _Sheet, y: float) -> Iterator[str]:
    step = labels.step_of((45 if sheet.short else 70) / sheet.frame.scale)
    end = max(scene.total for scene in scenes) * (1 + 1e-9)
    height = len(scene.lanes) * sheet.frame.pitch - GAP + 10
    for time in takewhile(lambda time: time <= end, (tick * step for tick in count())):
        yield rect(sheet.x(time) - 0.5, y - 5, 1, height, "line")
        label = labels.time(time, scene) if time == 0 else labels.number(time)
        yield text(sheet.x(time), y - 9, label, 10.5, "faint m")


def _names(rank: int, scene: Scene, sheet: _Sheet, y: float) -> Iterator[str]:
    """What is beside a lane."""
    foot = y + rank * sheet.frame.pitch + sheet.frame.lane / 2 + 4
    yield text(sheet.left - 8, foot, str(rank) if sheet.short else f"rank {rank}", 12, "ink e")
    if not sheet.short:
        figures = labels.figures_of(scene.lanes[rank], scene)
        yield text(sheet.left + sheet.width + 10, foot, figures, 11, "faint")


def _element(shape: Shape, sheet: _Sheet, y: float) -> str:
    if isinstance(shape, Rect):
        x = sheet.x(shape.start) + shape.inset
        wide = (shape.end - shape.start) * sheet.frame.scale - 2 * shape.inset
        return rect(x, y + shape.y, wide, shape.height, shape.colour, shape.hint)
    if isinstance(shape, Label):
        foot, kind = y + shape.y + 0.36 * shape.size, f"{shape.colour}t m"
        return text(sheet.x(shape.time), foot, shape.text, shape.size, kind, shape.space)
    points = [(sheet.x(time), y + at) for time, at in shape.points]
    return path(points, shape.colour, shape.width, shape.opacity)


def _legend(scenes: Scenes, look: Look, sheet: _Sheet, y: float) -> tuple[list[str], float]:
    """The legend, in as many lines as it needs, and where it ends."""
    first = sheet.margin if sheet.short else sheet.left
    x, elements = first, []
    dense = all(map(sheet.frame.is_dense, scenes))
    for colours, content, height in labels.legend(scenes, look, dense):
        stacked = height == 0.5
        boxes = 16 if stacked else 16 * len(colours)
        space = boxes + 7 + 1.1 * text_width(content, 12) + 20
        if x > first and x + space - 20 > sheet.right - 12:
            x, y = first, y + 22
        for k, colour in enumerate(colours):
            left, top = (x, y + 8 * k) if stacked else (x + 16 * k, y + 16 - 16 * height)
            elements.append(rect(left, top, 16, 16 * height, colour))
            if k == 0 and height == 1 and colour[0] in OPS:
                elements.append(text(left + 8, y + 12, colour[0], 11, f"{colour}t m"))
        elements.append(text(x + boxes + (7 if boxes else 0), y + 12.5, content, 12))
        x += space
    return elements, y + 16


# ---- elements and documents ----
def rect(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    """A filled rectangle; ``hint`` is shown under the mouse."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    title = f"><title>{_clean(hint)}</title></rect>" if hint else "/>"
    return f'<rect class="{colour}" {place}{title}'


def text(
    x: float, y: float, content: str, size: float, kind: str = "ink", space: float = 0.0
) -> str:
    """A line of text: ``y`` is its baseline, and ``x`` its left end, or its middle or right end if
    ``kind``, the classes of it, ends in ``m`` or ``e``. A typeface that is wider than ``space`` is
    condensed.
    """
    wide = text_width(content, size)
    fit = ""
    if space and 1.25 * wide > space:
        fit = f' textLength="{_n(min(wide, space))}" lengthAdjust="spacingAndGlyphs"'
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
    return f'<text class="{kind}"{fit} {place}>{_clean(content)}</text>'


def path(points: Points, colour: str, width: float = 0.0, opacity: float = 1.0) -> str:
    """A line along the axes through points, or the area that it encloses where ``width`` is 0. It
    is written as differences, which are shorter.
    """
    kind = f'{colour}l" stroke-width="{_n(width)}"' if width else f'{colour}"'
    kind += f' opacity="{_n(opacity)}"' if opacity < 1 else ""
    x, y = (round(value, 1) for value in points[0])
    outline = f"M{_n(x)} {_n(y)}"
    for point in points[1:]:
        right, foot = round(point[0], 1), round(point[1], 2)
        outline += f"h{_n(right - x)}" if right != x else ""
        outline += f"v{_n(foot - y)}" if foot != y else ""
        x, y = right, foot
    return f'<path class="{kind} d="{outline}"/>'


def document(
    elements: Sequence[str],
    size: tuple[float, float],
    scenes: Scenes,
    dark: bool | None,
    inline: bool,
) -> str:
    """The elements as SVG, for light, dark or the reader's paper. The style of an ``inline`` one
    concerns itself alone, so that a page of HTML may contain others.
    """
    width, height = map(_n, size)
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    body = "\n".join([paper, *elements, "</svg>", ""])
    own = "fp" + sha256(f"{dark}{body}".encode()).hexdigest()[:12]
    place = f'id="{own}"' if inline else 'style="max-width:100%;height:auto"'
    shades = max(scene.shades for scene in scenes)
    style = "".join(_style(body, shades, dark, f"#{own} " if inline else ""))
    title = "; ".join(scene.name for scene in scenes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img" {place}>\n'
        f"<title>{_clean(title)}</title>\n<style>{style}</style>\n{body}"
    )


def _style(body: str, shades: int, dark: bool | None, scope: str) -> Iterator[str]:
    used = dict.fromkeys(re.findall(r'<\w+ class="([\w-]+)', body))

    def rules(dark: bool) -> Iterator[str]:
        colours = palette(shades, dark)
        for kind in used:
            if kind in colours:
                yield f"{scope}.{kind}{{fill:{colours[kind]}}}"
            elif kind.endswith("t"):
                yield f"{scope}.{kind}{{fill:{ink(colours[kind[:-1]])}}}"
            else:
                yield f"{scope}.{kind}{{fill:none;stroke:{colours[kind[:-1]]}}}"

    yield f"{scope}text{{pointer-events:none}}{scope}.b{{font-weight:600}}"
    yield f"{scope}.m{{text-anchor:middle}}{scope}.e{{text-anchor:end}}"
    yield from rules(bool(dark))
    if dark is None:
        yield from ("@media(prefers-color-scheme:dark){", *rules(True), "}")


def _n(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _clean(text: str) -> str:
    """Without the control characters that XML forbids."""
    return escape("".join(char if char >= " " else " " for char in text))
