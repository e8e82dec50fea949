"""A still picture as a PNG file, written with the standard library alone: pixels, and zlib to pack them.

It knows shapes (``page``) and glyphs (``_font``), not timelines.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from ._font import glyph, width
from .colours import PAPER, rgb
from .page import Page, Rect, Text, page
from .scene import Scene

MOST_PIXELS = 12_000_000


def paint(scenes: Sequence[Scene]) -> bytes:
    """The file's bytes, two pixels to a layout unit for sharp screens, one where the picture is very large."""
    drawn = page(scenes)
    return write(drawn, 2 if 4 * drawn.width * drawn.height <= MOST_PIXELS else 1)


def write(drawn: Page, scale: int) -> bytes:
    """A page as PNG."""
    wide, high = round(drawn.width * scale), round(drawn.height * scale)
    rows = [bytearray(bytes(rgb(PAPER)) * wide) for _ in range(high)]
    for shape in drawn.shapes:
        if isinstance(shape, Rect):
            _rect(rows, shape, scale)
        else:
            _text(rows, shape, scale)
    packed = zlib.compress(b"".join(b"\0" + row for row in rows), 6)
    dots = round(72 * scale / 0.0254)  # a metre's worth, so that it is shown at the layout's size
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0))
        + _chunk(b"pHYs", struct.pack(">IIB", dots, dots, 1))
        + _chunk(b"IDAT", packed)
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rect(rows: list[bytearray], r: Rect, scale: int) -> None:
    """Edges are rounded to whole pixels: sharp, and neighbours never overlap."""
    wide = len(rows[0]) // 3
    left, right = max(round(r.x * scale), 0), min(round((r.x + r.width) * scale), wide)
    if right <= left:
        return
    line = bytes(rgb(r.colour)) * (right - left)
    for y in range(max(round(r.y * scale), 0), min(round((r.y + r.height) * scale), len(rows))):
        rows[y][3 * left : 3 * right] = line


def _text(rows: list[bytearray], t: Text, scale: int) -> None:
    size = t.size * scale
    x = t.x * scale - width(t.text, size) * {"start": 0.0, "middle": 0.5, "end": 1.0}[t.anchor]
    baseline = round(t.y * scale)
    colour = rgb(t.colour)
    for char in t.text:
        shape = glyph(char, size, t.bold)
        left = round(x) + shape.x
        for y, line in enumerate(shape.rows, baseline + shape.y):
            if 0 <= y < len(rows):
                _blend(rows[y], left, line, colour)
        x += shape.advance


def _blend(row: bytearray, left: int, line: bytes, colour: tuple[int, int, int]) -> None:
    for x, cover in enumerate(line, left):
        if cover and 0 <= 3 * x < len(row):
            for k in range(3):
                under = row[3 * x + k]
                row[3 * x + k] = under + (colour[k] - under) * cover // 255
