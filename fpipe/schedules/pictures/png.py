# SPDX-License-Identifier: Apache-2.0
"""A still picture as a PNG file, drawn by Pillow. It knows shapes (``page``), not timelines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING

from ...errors import FpipeError
from .colours import PAPER
from .page import Page, Rect, Text, page
from .scene import Scene

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

MOST_PIXELS = 12_000_000
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  #: of a layout -> Pillow's, each on the baseline


def paint(scenes: Sequence[Scene]) -> bytes:
    """The file's bytes, two pixels to a layout unit for sharp screens, one where the picture is very large."""
    drawn = page(scenes)
    return write(drawn, 2 if 4 * drawn.width * drawn.height <= MOST_PIXELS else 1)


def write(drawn: Page, scale: int) -> bytes:
    """A page as PNG."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise FpipeError("a .png needs Pillow; pip install 'fpipe[pictures]', or write .svg") from error
    image = Image.new("RGB", (round(drawn.width * scale), round(drawn.height * scale)), PAPER)
    canvas = ImageDraw.Draw(image)
    for shape in drawn.shapes:
        if isinstance(shape, Rect):
            _rect(canvas, shape, scale)
        else:
            _text(canvas, shape, scale)
    file = BytesIO()
    image.save(file, "PNG", dpi=(72 * scale, 72 * scale))  # so that it is shown at the layout's size
    return file.getvalue()


def _rect(canvas: ImageDraw.ImageDraw, r: Rect, scale: int) -> None:
    """Edges are rounded to whole pixels: sharp, and neighbours never overlap."""
    left, top, right, bottom = (round(v * scale) for v in (r.x, r.y, r.x + r.width, r.y + r.height))
    if right > left and bottom > top:
        canvas.rectangle((left, top, right - 1, bottom - 1), r.colour)


def _text(canvas: ImageDraw.ImageDraw, t: Text, scale: int) -> None:
    place = t.x * scale, round(t.y * scale)
    bold = 0.25 * scale if t.bold else 0
    canvas.text(place, t.text, t.colour, _font(t.size * scale), _ANCHORS[t.anchor], stroke_width=bold)


@lru_cache(maxsize=64)
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
