# SPDX-License-Identifier: Apache-2.0
"""Elements of SVG, and a document of them that follows its reader's light or dark mode.

The class of an element names its colour, a key of ``colours.palette``: ``F0`` fills it, ``F0l`` is
a line in it, and ``F0t`` is a text on it, black or white.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape

from .colours import ink, palette
from .text_width import text_width

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


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


def path(
    outlines: Sequence[Sequence[tuple[float, float]]],
    colour: str,
    width: float = 0.0,
    opacity: float = 1.0,
) -> str:
    """Lines through points, or the areas that they enclose where ``width`` is 0."""
    kind = f'{colour}l" stroke-width="{_n(width)}"' if width else f'{colour}"'
    kind += f' opacity="{_n(opacity)}"' if opacity < 1 else ""
    return f'<path class="{kind} d="{"".join(map(_outline, outlines))}"/>'


def _outline(points: Sequence[tuple[float, float]]) -> str:
    """Steps are written as differences along one axis, which are shorter."""
    x, y = (round(value, 1) for value in points[0])
    text = f"M{_n(x)} {_n(y)}"
    for point in points[1:]:
        right, down = round(point[0], 1), round(point[1], 2)
        across, along = _n(right - x), _n(down - y)
        if across == "0" or along == "0":
            text += (f"h{across}" if across != "0" else "") + (f"v{along}" if along != "0" else "")
        else:
            text += f"l{across} {along}"
        x, y = right, down
    return text


def document(
    elements: Sequence[str],
    size: tuple[float, float],
    shades: int,
    alt: str,
    dark: bool | None,
    inline: bool = False,
) -> str:
    """The elements as SVG, for light, dark or the reader's paper. The style of an ``inline`` one
    concerns itself alone, so that a page of HTML may contain others.
    """
    width, height = map(_n, size)
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    body = "\n".join([paper, *elements, "</svg>", ""])
    own = "fp" + sha256(f"{dark}{body}".encode()).hexdigest()[:12]
    place = f'id="{own}"' if inline else 'style="max-width:100%;height:auto"'
    style = "".join(_style(body, shades, dark, f"#{own} " if inline else ""))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img" {place}>\n'
        f"<title>{_clean(alt)}</title>\n<style>{style}</style>\n{body}"
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
