# SPDX-License-Identifier: Apache-2.0
"""A still picture as a PDF file of one page, with Helvetica, which every reader has. It knows
shapes, not timelines.

A file is a list of numbered objects and a table of their places: a catalogue, a page, its contents,
two fonts and one state per opacity. Its y axis points up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from .colours import rgb
from .page import page
from .scene import Scene
from .shapes import Look, Page, Path, Rect, Text, colour_of
from .text_width import text_width

POINT = 0.75  #: of a pixel of a plain screen


def paint(scenes: Sequence[Scene], look: Look | None = None) -> bytes:
    """The file's bytes."""
    look = look or Look()
    return write(page(scenes, look), bool(look.dark))


def write(drawn: Page, dark: bool = False) -> bytes:
    """A page as PDF, for light or for dark paper."""
    states = sorted({shape.opacity for shape in drawn.shapes if isinstance(shape, Path)} | {1.0})
    contents = zlib.compress(
        "\n".join(_contents(drawn, dark, states)).encode("cp1252", "replace"), 9
    )
    size = f"{drawn.width * POINT:.2f} {drawn.height * POINT:.2f}"
    opacities = " ".join(f"/G{k} <</ca {value:g} /CA {value:g}>>" for k, value in enumerate(states))
    fonts = [
        f"<</Type /Font /Subtype /Type1 /BaseFont /{name} /Encoding /WinAnsiEncoding>>".encode()
        for name in ("Helvetica", "Helvetica-Bold")
    ]
    resources = f"<</Font <</F0 5 0 R /F1 6 0 R>> /ExtGState <<{opacities}>>>>"
    return _file(
        [
            b"<</Type /Catalog /Pages 2 0 R>>",
            b"<</Type /Pages /Kids [3 0 R] /Count 1>>",
            f"<</Type /Page /Parent 2 0 R /MediaBox [0 0 {size}] /Contents 4 0 R /Resources "
            f"{resources}>>".encode(),
            f"<</Length {len(contents)} /Filter /FlateDecode>>\nstream\n".encode()
            + contents
            + b"\nendstream",
            *fonts,
        ]
    )


def _file(objects: Sequence[bytes]) -> bytes:
    """The objects, numbered from 1, with the table of their places."""
    data = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    count = len(objects) + 1
    end = (
        f"xref\n0 {count}\n0000000000 65535 f \n{table}trailer\n<</Size {count} /Root 1 0 "
        f"R>>\nstartxref\n{len(data)}\n"
    )
    return data + end.encode() + b"%%EOF\n"


def _contents(drawn: Page, dark: bool, states: Sequence[float]) -> Iterator[str]:
    yield f"{POINT} 0 0 {-POINT} 0 {drawn.height * POINT:.2f} cm"  # pixels, and y downwards
    paper = Rect(0, 0, drawn.width, drawn.height, "paper")
    for shape in (paper, *drawn.shapes):
        colour = " ".join(f"{part / 255:.3g}" for part in rgb(colour_of(shape, drawn.shades, dark)))
        if isinstance(shape, Rect):
            yield (
                f"{colour} rg {_n(shape.x)} {_n(shape.y)} {_n(shape.width)} {_n(shape.height)} re f"
            )
        elif isinstance(shape, Text):
            yield f"{colour} rg {_text(shape)}"
        else:
            points = [f"{_n(x)} {_n(y)}" for x, y in shape.points]
            outline = f"{points[0]} m " + " ".join(f"{point} l" for point in points[1:])
            end = (
                f"{colour} RG {_n(shape.width)} w {outline} S"
                if shape.width
                else f"{colour} rg {outline} h f"
            )
            yield f"q /G{states.index(shape.opacity)} gs {end} Q"


def _text(t: Text) -> str:
    """A line of text; the second minus sign of the matrix turns the letters upright again."""
    wide = text_width(t.text, t.size)
    x = t.x - {"start": 0.0, "middle": wide / 2, "end": wide}[t.anchor]
    text = "".join("\\" + c if c in "()\\" else c if c >= " " else " " for c in t.text)
    return f"BT /F{int(t.bold)} {_n(t.size)} Tf 1 0 0 -1 {_n(x)} {_n(t.y)} Tm ({text}) Tj ET"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
