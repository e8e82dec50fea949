"""A small typeface of strokes, so that ``.png`` files can be written wherever Python runs.

Each glyph is its width and its strokes, on a grid where capitals are 7 high and small letters 5: lines as
``x,y x,y ...`` and arcs as ``@x,y,rx,ry,from,to`` (degrees, counter-clockwise from the right), parted by ``;``.
Glyphs are drawn by distance: a pixel is as dark as the pen, laid along the strokes, covers it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import ceil, cos, floor, hypot, radians, sin
from typing import NamedTuple, TypeAlias

_BOWL = "@1.9,2.5,1.9,2.5,0,360"
_ARCH = "0,5 0,0; @1.8,3.1,1.8,1.9,180,0; 3.6,3.1 3.6,0"

GLYPHS: dict[str, tuple[float, str]] = {
    "0": (4.2, "@2.1,3.5,2.1,3.5,0,360"),
    "1": (4.2, "0.7,5.7 2.3,7 2.3,0"),
    "2": (4.2, "@2.1,4.95,1.95,2.05,170,-35; 3.7,3.77 0.1,0 4.1,0"),
    "3": (4.2, "@2,5.35,1.85,1.65,150,-90; @2,1.85,2.1,1.85,90,-150"),
    "4": (4.2, "3.2,0 3.2,7 0,2 4.3,2"),
    "5": (4.2, "3.8,7 0.75,7 0.4,3.7; @1.95,2.25,2.15,2.25,136,-150"),
    "6": (4.2, "@2.1,2.2,2.1,2.2,0,360; @3.5,2.2,3.5,4.8,95,180"),
    "7": (4.2, "0,7 4.2,7 1.5,0"),
    "8": (4.2, "@2.1,5.35,1.75,1.65,0,360; @2.1,1.85,2.1,1.85,0,360"),
    "9": (4.2, "@2.1,4.8,2.1,2.2,0,360; @0.7,4.8,3.5,4.8,0,-85"),
    "A": (4.8, "0,0 2.4,7 4.8,0; 0.85,2.4 3.95,2.4"),
    "B": (4.4, "2.2,3.7 0,3.7 0,7 2.2,7; @2.2,5.35,1.8,1.65,90,-90; 0,3.7 0,0 2.4,0; @2.4,1.85,2,1.85,90,-90"),
    "C": (4.8, "@2.7,3.5,2.7,3.5,45,315"),
    "D": (4.8, "1.8,0 0,0 0,7 1.8,7; @1.8,3.5,3,3.5,90,-90"),
    "E": (4.0, "4,0 0,0 0,7 4,7; 0,3.7 3.4,3.7"),
    "F": (3.9, "0,0 0,7 3.9,7; 0,3.6 3.4,3.6"),
    "G": (5.0, "@2.7,3.5,2.7,3.5,45,325; 4.91,1.5 4.91,3.3 3,3.3"),
    "H": (4.6, "0,0 0,7; 4.6,0 4.6,7; 0,3.6 4.6,3.6"),
    "I": (2.4, "0,0 2.4,0; 1.2,0 1.2,7; 0,7 2.4,7"),
    "J": (3.0, "3,7 3,2; @1.5,2,1.5,2,0,-160"),
    "K": (4.5, "0,0 0,7; 4.3,7 0,2.6; 1.5,4.1 4.5,0"),
    "L": (3.8, "0,7 0,0 3.8,0"),
    "M": (5.4, "0,0 0,7 2.7,2 5.4,7 5.4,0"),
    "N": (4.6, "0,0 0,7 4.6,0 4.6,7"),
    "O": (5.6, "@2.8,3.5,2.8,3.5,0,360"),
    "P": (4.3, "0,0 0,7 2.3,7; @2.3,5.1,2,1.9,90,-90; 2.3,3.2 0,3.2"),
    "Q": (5.6, "@2.8,3.5,2.8,3.5,0,360; 3.5,1.6 5.4,-0.6"),
    "R": (4.5, "0,0 0,7 2.3,7; @2.3,5.1,2,1.9,90,-90; 2.3,3.2 0,3.2; 2.2,3.2 4.5,0"),
    "S": (4.3, "@2.15,5.3,1.95,1.7,35,270; @2.15,1.8,2.1,1.8,90,-145"),
    "T": (4.8, "0,7 4.8,7; 2.4,7 2.4,0"),
    "U": (4.6, "0,7 0,2.3; @2.3,2.3,2.3,2.3,180,360; 4.6,2.3 4.6,7"),
    "V": (4.8, "0,7 2.4,0 4.8,7"),
    "W": (6.6, "0,7 1.65,0 3.3,6.4 4.95,0 6.6,7"),
    "X": (4.6, "0,0 4.6,7; 0,7 4.6,0"),
    "Y": (4.6, "0,7 2.3,3.4 4.6,7; 2.3,3.4 2.3,0"),
    "Z": (4.5, "0.2,7 4.4,7 0,0 4.5,0"),
    "a": (3.8, f"{_BOWL}; 3.8,5 3.8,0"),
    "b": (3.8, f"0,7.2 0,0; {_BOWL}"),
    "c": (3.4, "@1.9,2.5,1.9,2.5,50,310"),
    "d": (3.8, f"{_BOWL}; 3.8,7.2 3.8,0"),
    "e": (3.8, "0.05,2.6 3.8,2.6; @1.9,2.5,1.9,2.5,0,310"),
    "f": (2.4, "1,0 1,5.7; @2.3,5.7,1.3,1.5,180,85; 0,4.8 2.3,4.8"),
    "g": (3.8, f"{_BOWL}; 3.8,5 3.8,-0.3; @1.9,-0.3,1.9,1.8,0,-150"),
    "h": (3.6, _ARCH.replace("0,5", "0,7.2", 1)),
    "i": (0.8, "0.4,5 0.4,0; 0.4,6.7 0.4,6.9"),
    "j": (1.2, "0.8,5 0.8,-0.6; @-0.4,-0.6,1.2,1.4,0,-90; 0.8,6.7 0.8,6.9"),
    "k": (3.5, "0,7.2 0,0; 3.3,5 0,1.8; 1.2,3 3.5,0"),
    "l": (0.8, "0.4,7.2 0.4,0"),
    "m": (5.8, "0,5 0,0; @1.45,3.5,1.45,1.5,180,0; 2.9,3.5 2.9,0; @4.35,3.5,1.45,1.5,180,0; 5.8,3.5 5.8,0"),
    "n": (3.6, _ARCH),
    "o": (4.0, "@2,2.5,2,2.5,0,360"),
    "p": (3.8, f"0,5 0,-2; {_BOWL}"),
    "q": (3.8, f"{_BOWL}; 3.8,5 3.8,-2"),
    "r": (2.3, "0,5 0,0; @1.7,3.2,1.7,1.8,180,70"),
    "s": (3.3, "@1.65,3.75,1.5,1.25,35,270; @1.65,1.25,1.65,1.25,90,-140"),
    "t": (2.4, "1,6.6 1,1.3; @2.2,1.3,1.2,1.3,180,280; 0,5 2.3,5"),
    "u": (3.6, "0,5 0,1.9; @1.8,1.9,1.8,1.9,180,360; 3.6,5 3.6,0"),
    "v": (3.8, "0,5 1.9,0 3.8,5"),
    "w": (5.4, "0,5 1.35,0 2.7,4.6 4.05,0 5.4,5"),
    "x": (3.6, "0,5 3.6,0; 0,0 3.6,5"),
    "y": (3.8, "0,5 1.95,0; 3.8,5 1.2,-2"),
    "z": (3.5, "0.1,5 3.4,5 0,0 3.5,0"),
    " ": (1.6, ""),
    ".": (0.8, "0.4,0 0.4,0.15"),
    ",": (0.8, "0.5,0.2 0.2,-1.2"),
    ":": (0.8, "0.4,0 0.4,0.15; 0.4,4 0.4,4.15"),
    ";": (0.8, "0.5,0.2 0.2,-1.2; 0.4,4 0.4,4.15"),
    "%": (5.6, "@1.1,5.5,1.1,1.4,0,360; @4.5,1.5,1.1,1.4,0,360; 0.9,0 4.7,7"),
    "-": (2.4, "0,2.7 2.4,2.7"),
    "+": (3.8, "0,2.9 3.8,2.9; 1.9,4.8 1.9,1"),
    "=": (3.8, "0,3.8 3.8,3.8; 0,2 3.8,2"),
    "_": (3.8, "0,-1 3.8,-1"),
    "/": (2.8, "0,-0.8 2.8,7.4"),
    "(": (1.4, "@2.6,3.1,2.6,4.6,115,245"),
    ")": (1.4, "@-1.2,3.1,2.6,4.6,65,-65"),
    "[": (1.4, "1.4,7.4 0,7.4 0,-1 1.4,-1"),
    "]": (1.4, "0,7.4 1.4,7.4 1.4,-1 0,-1"),
    "'": (0.6, "0.3,7.2 0.3,5.4"),
    "&": (
        5.0,
        "5,0 1,5 0.9,6; @1.9,5.75,1.15,1.25,180,0; 3.05,5.7 1.2,3.7; @1.8,1.85,1.8,1.85,115,330; 3.4,0.9 4.6,3.2",
    ),
    "*": (2.8, "1.4,7 1.4,4; 0.1,6.3 2.7,4.7; 2.7,6.3 0.1,4.7"),
    "#": (4.6, "1,0 1.9,7; 2.8,0 3.7,7; 0.3,4.6 4.5,4.6; 0,2.3 4.3,2.3"),
    "!": (0.6, "0.3,7 0.3,2.2; 0.3,0 0.3,0.15"),
    "?": (3.4, "@1.7,5.3,1.7,1.7,170,-60; 2.5,3.8 1.6,2.2; 1.6,0 1.6,0.15"),
    "<": (3.4, "3.4,5 0,2.7 3.4,0.4"),
    ">": (3.4, "0,5 3.4,2.7 0,0.4"),
}
_UNKNOWN = (3.6, "0,0 3.6,0 3.6,7 0,7 0,0")
_SPACING, _CAPITAL = 1.5, 7.0

Segment: TypeAlias = tuple[float, float, float, float]


class Glyph(NamedTuple):
    """A glyph as pixels: ``rows`` of coverage 0 to 255, whose left top pixel stands at (``x``, ``y``) from the pen's
    place on the baseline, and how far the pen moves on."""

    x: int
    y: int
    rows: tuple[bytes, ...]
    advance: float


def width(text: str, size: float) -> float:
    """How wide ``text`` is, in pixels.

    >>> width("11", 10) == 2 * width("1", 10)
    True
    """
    return sum(GLYPHS.get(char, _UNKNOWN)[0] + _SPACING for char in text) * _unit(size)


@lru_cache(maxsize=4096)
def glyph(char: str, size: float, bold: bool = False) -> Glyph:
    """The pixels of ``char`` in letters ``size`` high (as fonts count it: capitals are 0.72 of it)."""
    wide, strokes = GLYPHS.get(char, _UNKNOWN)
    unit = _unit(size)
    pen = max(unit * (0.62 if bold else 0.42), 0.5)  # half the pen's width
    lead = _SPACING / 2
    lines = [((a + lead) * unit, -b * unit, (c + lead) * unit, -d * unit) for a, b, c, d in _segments(strokes)]
    if not lines:
        return Glyph(0, 0, (), (wide + _SPACING) * unit)
    left = floor(min(min(a, c) for a, _, c, _ in lines) - pen) - 1
    top = floor(min(min(b, d) for _, b, _, d in lines) - pen) - 1
    right = ceil(max(max(a, c) for a, _, c, _ in lines) + pen) + 1
    bottom = ceil(max(max(b, d) for _, b, _, d in lines) + pen) + 1
    rows = [bytearray(right - left) for _ in range(bottom - top)]
    for line in lines:
        _stroke(rows, line, pen, left, top)
    return Glyph(left, top, tuple(bytes(row) for row in rows), (wide + _SPACING) * unit)


def _unit(size: float) -> float:
    return 0.72 * size / _CAPITAL


def _segments(strokes: str) -> list[Segment]:
    """The straight pieces of a glyph; arcs become polygons fine enough for letters."""
    found: list[Segment] = []
    for stroke in filter(None, (part.strip() for part in strokes.split(";"))):
        if stroke[0] == "@":
            x, y, rx, ry, first, last = map(float, stroke[1:].split(","))
            steps = max(2, round(abs(last - first) / 24))
            angles = [radians(first + (last - first) * k / steps) for k in range(steps + 1)]
            points = [(x + rx * cos(t), y + ry * sin(t)) for t in angles]
        else:
            points = [(float(x), float(y)) for x, y in (pair.split(",") for pair in stroke.split())]
        found += [(*a, *b) for a, b in pairwise(points)]
    return found


def _stroke(rows: list[bytearray], line: Segment, pen: float, left: int, top: int) -> None:
    """Lay the pen along one piece: each pixel near it is as dark as it is near, or as it was."""
    a, b, c, d = line
    dx, dy = c - a, d - b
    square = dx * dx + dy * dy or 1e-9
    reach = pen + 1
    for y in range(floor(min(b, d) - reach), ceil(max(b, d) + reach)):
        row = rows[y - top] if 0 <= y - top < len(rows) else None
        if row is None:
            continue
        for x in range(max(floor(min(a, c) - reach), left), min(ceil(max(a, c) + reach), left + len(row))):
            px, py = x + 0.5 - a, y + 0.5 - b
            t = min(max((px * dx + py * dy) / square, 0.0), 1.0)
            cover = pen + 0.5 - hypot(px - t * dx, py - t * dy)
            if cover > 0:
                value = min(255, round(255 * cover))
                if value > row[x - left]:
                    row[x - left] = value
