# SPDX-License-Identifier: Apache-2.0
"""A still picture in SVG, which follows its reader's light or dark mode: titles, axis, lanes and
legend.

The class of an element names its colour, a key of ``colours.palette``: ``F0`` fills it, and
``F0t`` is a text on it, black or white.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ...actions import OPS
from . import labels
from .colours import ink, palette
from .labels import text_width, wrapped
from .scene import Look, Scene, Scenes, step_of
from .shapes import GAP, PALE, Frame, Label, Rect, Shape, frame, natural_size, shapes

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
EDGE = 24  # around the page
PHONE = 700  # pages narrower than this have short labels beside the lanes
SWATCH = 16  # of the legend
BOLD = 1.15  # letters in bold than others, at most
WIDER = 1.15  # letters of a reader's typeface than those of `text_width`, at most
#: where paper is dark or not: by the reader's system, or else by the notebook's theme
PLACES = (
    ("@media(prefers-color-scheme:dark)", True),
    (":is([data-jp-theme-light=true],.vscode-light)", False),
    (":is([data-jp-theme-light=false],.vscode-dark)", True),
)


class _Sheet(NamedTuple):
    """Where things are on the page."""

    frame: Frame
    short: bool  # labels beside the lanes
    margin: float
    left: float  # of the lanes
    width: float  # of the lanes
    right: float  # of the page

    def x(self, time: float, scene: Scene) -> float:
        """Where a time is."""
        return self.left + scene.place(time) * self.frame.scale


def paint(scenes: Scenes, look: Look, inline: bool = False) -> str:
    """The scenes as SVG, one over the other on one axis. The style of an ``inline`` one concerns
    itself alone, so that a page of HTML may contain others.
    """
    sheet = _sheet(scenes, look)
    elements, height = _elements(scenes, look, sheet)
    size = f'width="{sheet.right:g}" height="{height:g}"'
    body = "\n".join([f'<rect class="paper" {size} rx="8"/>', *elements, "</svg>", ""])
    number = "fp" + sha256(f"{look.dark}{body}".encode()).hexdigest()[:12]
    place = 'style="max-width:100%;height:auto"'
    if inline:
        least = 600 * (not sheet.short)
        place = f'id="{number}" style="width:100%;min-width:{least}px;max-width:1000px;height:auto"'
    shades = max(scene.shades for scene in scenes)
    scope = f"#{number} " if inline else ""
    style = "".join(_style(body, shades, look.dark, scope))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {sheet.right:g} {height:g}" font-family="{FONT}" role="img" {place}>\n'
        f"<title>{_clean('; '.join(scene.name for scene in scenes))}</title>\n"
        f"<style>{style}</style>\n{body}"
    )


def _elements(scenes: Scenes, look: Look, sheet: _Sheet) -> tuple[list[str], float]:
    """All elements, and the height of the page."""
    end = max(scene.total for scene in scenes)
    elements: list[str] = []
    y: float = EDGE
    for scene in scenes:
        lines = [(labels.title(scene), 15 if sheet.short else 17, 20, "ink b")] * look.titled
        notes = (*labels.summary(scene, most=16 * sheet.short), *labels.notes(scene))
        lines += [(note, 12.5, 17, "faint") for note in notes]
        for content, size, height, kind in lines:
            wide = BOLD * size if kind == "ink b" else size
            for line in wrapped(content, WIDER * wide, sheet.right - sheet.margin - 12):
                elements.append(text(sheet.margin, y + 14, line, size, kind))
                y += height
        y += 30
        elements += _axis(end, scene, sheet, y)
        elements += (_element(shape, scene, sheet, y) for shape in shapes(scene, sheet.frame))
        y += len(scene.lanes) * sheet.frame.pitch - GAP + 22
    legend, y = _legend(scenes, look, sheet, y)
    return elements + legend, y + EDGE - 8


def _sheet(scenes: Scenes, look: Look) -> _Sheet:
    short = look.width is not None and look.width < PHONE
    last = max(len(scene.lanes) for scene in scenes) - 1
    margin = 12 if short else EDGE
    left = margin + 10 + 7 * len(str(last) if short else f"rank {last}")
    beside = 12.0
    if not short:
        figures = [figure for scene in scenes for figure in labels.figures_of(scene)]
        beside = 24 + WIDER * max(text_width(figure, 11) for figure in figures)
    width, lane = natural_size(scenes)
    if look.width is not None:
        width = max(look.width - left - beside, 60.0)
    measures = frame(scenes, look, width, lane)
    return _Sheet(measures, short, margin, left, width, left + width + beside)


def _axis(end: float, scene: Scene, sheet: _Sheet, y: float) -> Iterator[str]:
    """The times above the lanes, and what is beside them."""
    f = sheet.frame
    step = step_of((45 if sheet.short else 70) / f.scale)
    height = len(scene.lanes) * f.pitch - GAP + 10
    for tick in range(int(end / step + 1e-9) + 1):
        x = sheet.x(tick * step, scene)
        if scene.is_hidden(tick * step):
            continue
        label = labels.number(tick * step) if tick else labels.time(0, scene)
        yield rect(x - 0.5, y - 5, 1, height, "line")
        yield text(x, y - 9, label, 10.5, "faint m")
    for rank, figures in enumerate(labels.figures_of(scene)):
        foot = y + rank * f.pitch + f.lane / 2 + 4
        label = str(rank) if sheet.short else f"rank {rank}"
        yield text(sheet.left - 8, foot, label, 12, "ink e")
        if not sheet.short:
            yield text(sheet.left + sheet.width + 10, foot, figures, 11, "faint")


def _element(shape: Shape, scene: Scene, sheet: _Sheet, y: float) -> str:
    if isinstance(shape, Rect):
        x = sheet.x(shape.start, scene) + shape.inset
        wide = sheet.x(shape.end, scene) - x - shape.inset
        return rect(x, y + shape.y, wide, shape.height, shape.colour, shape.hint)
    if isinstance(shape, Label):
        foot = y + shape.y + 0.36 * shape.size
        kind = f"{shape.colour}t m"
        return text(sheet.x(shape.time, scene), foot, shape.text, shape.size, kind, shape.space)
    points = ((sheet.x(time, scene), y + height) for time, height in shape.points)
    return f'<path class="{shape.colour}" d="{outline(points)}"/>'


def outline(points: Iterable[tuple[float, float]]) -> str:
    """The path of steps, each at its height from its place on."""
    (left, foot), *steps = (next(level) for _, level in groupby(points, key=itemgetter(1)))
    return f"M{left:g} {foot:g}" + "".join(f"H{x:g}V{foot:g}" for x, foot in steps)


def _legend(scenes: Scenes, look: Look, sheet: _Sheet, y: float) -> tuple[list[str], float]:
    """The legend, in as many lines as it needs, and where it ends."""
    first = sheet.margin if sheet.short else sheet.left
    elements: list[str] = []
    x = first
    before = ""
    for colours, content in labels.legend(scenes, look, sheet.frame.dense, sheet.frame.detail):
        swatches = SWATCH * len(colours) + 7 if colours else 0
        wide = swatches + WIDER * text_width(content, 12)
        key = colours[0] if colours else ""
        begins = key == "warmup" or content.endswith(":") or (key.startswith("t") and not before)
        before = key
        if x > first and (begins or x + wide > sheet.right - 5):
            x = first
            y = y + 22
        for k, colour in enumerate(colours):
            left = x + SWATCH * k
            letter = colour[0]
            elements.append(rect(left, y, SWATCH, SWATCH, colour))
            if letter in OPS:
                elements.append(text(left + 8, y + 12, letter, 11, f"{colour}t m"))
        elements.append(text(x + swatches, y + 12.5, content, 12))
        x += wide + 20
    return elements, y + SWATCH


# ---- elements ----
def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    hint: str = "",
) -> str:
    """A filled rectangle; ``hint`` is shown under the mouse."""
    title = f"<title>{_clean(hint)}</title>" if hint else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{colour}" {place}>{title}</rect>'


def text(
    x: float,
    y: float,
    content: str,
    size: float,
    kind: str = "ink",
    space: float = 0.0,
) -> str:
    """A line of text: ``y`` is its baseline, and ``x`` its left end, or its middle or right end if
    ``kind``, the classes of it, ends in ``m`` or ``e``. A typeface that is wider than ``space`` is
    condensed.
    """
    wide = text_width(content, size)
    fit = ""
    if space and 1.25 * wide > space:
        fit = f' textLength="{min(wide, space):g}" lengthAdjust="spacingAndGlyphs"'
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}"'
    return f'<text class="{kind}"{fit} {place}>{_clean(content)}</text>'


def _style(body: str, shades: int, dark: bool | None, scope: str) -> Iterator[str]:
    used = dict.fromkeys(re.findall(r'<\w+ class="([\w-]+)', body))

    def rules(dark: bool) -> Iterator[str]:
        colours = palette(shades, dark)
        for kind in used:
            fill = colours[kind] if kind in colours else ink(colours[kind[:-1]])
            yield f"{scope}.{kind}{{fill:{fill}}}"
        yield f"{scope}.curve{{stroke-width:.8;stroke:{colours['curve']};"
        yield f"fill-opacity:{PALE['curve']}}}"

    yield f"{scope}text{{pointer-events:none}}{scope}.b{{font-weight:600}}"
    yield f"{scope}.m{{text-anchor:middle}}{scope}.e{{text-anchor:end}}"
    yield from rules(bool(dark))
    if dark is None:
        for place, is_dark in PLACES if scope else PLACES[:1]:
            yield from (place, "{", *rules(is_dark), "}")


def _clean(text: str) -> str:
    """Without the control characters that XML forbids."""
    return escape(re.sub(r"[\0-\x1f]", " ", text))
