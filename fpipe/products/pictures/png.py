# SPDX-License-Identifier: Apache-2.0
"""A still picture as a PNG file, drawn by Pillow. It knows shapes, not timelines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

from ...errors import FpipeError
from .colours import palette, rgb
from .page import page
from .scene import Scene
from .shapes import Look, Page, Path, Rect, Text, colour_of

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

MOST_PIXELS = 12_000_000
_ANCHORS = {
    "start": "ls",
    "middle": "ms",
    "end": "rs",
}  #: of a layout -> Pillow's, each on the baseline


def paint(scenes: Sequence[Scene], look: Look | None = None) -> bytes:
    """The file's bytes, two pixels to a layout unit for sharp screens, one where the picture is
    very large.
    """
    look = look or Look()
    drawn = page(scenes, look)
    return write(drawn, 2 if 4 * drawn.width * drawn.height <= MOST_PIXELS else 1, bool(look.dark))


def write(drawn: Page, scale: int, dark: bool = False) -> bytes:
    """A page as PNG, for light or for dark paper."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise FpipeError(
            "a .png needs Pillow; pip install '.[pictures]' in a checkout of fpipe, or write .svg"
        ) from error
    image = Image.new(
        "RGB", (round(drawn.width * scale), round(drawn.height * scale)), palette(1, dark)["paper"]
    )
    canvas = ImageDraw.Draw(image)
    for shape in drawn.shapes:
        colour = colour_of(shape, drawn.shades, dark)
        if isinstance(shape, Rect):
            _rect(canvas, shape, scale, colour)
        elif isinstance(shape, Text):
            _text(canvas, shape, scale, colour)
        else:
            _path(image, canvas, shape, scale, colour)
    file = BytesIO()
    image.save(
        file, "PNG", dpi=(72 * scale, 72 * scale)
    )  # so that it is shown at the layout's size
    return file.getvalue()


def _rect(canvas: ImageDraw.ImageDraw, r: Rect, scale: int, colour: str) -> None:
    """Edges are rounded to whole pixels: sharp, and neighbours never overlap."""
    left, top, right, bottom = (round(v * scale) for v in (r.x, r.y, r.x + r.width, r.y + r.height))
    if right > left and bottom > top:
        canvas.rectangle((left, top, right - 1, bottom - 1), colour)


def _text(canvas: ImageDraw.ImageDraw, t: Text, scale: int, colour: str) -> None:
    place = t.x * scale, round(t.y * scale)
    bold = 0.25 * scale if t.bold else 0
    canvas.text(place, t.text, colour, _font(t.size * scale), _ANCHORS[t.anchor], stroke_width=bold)


def _path(
    image: Image.Image, canvas: ImageDraw.ImageDraw, p: Path, scale: int, colour: str
) -> None:
    """A line, or an area of steps, at whole pixels; one that is not opaque is mixed with what it
    covers.
    """
    if p.width:
        points = [(x * scale, y * scale) for x, y in p.points]
        if p.opacity == 1:
            canvas.line(points, colour, max(round(p.width * scale), 1), "curve")
            return
    else:
        points = [(round(x * scale), round(y * scale)) for x, y in p.points]
        if p.opacity == 1:
            for (x, y), (right, _) in pairwise(
                points
            ):  # of a polygon, Pillow draws the right and lower edges too
                if right > x and points[0][1] > y:
                    canvas.rectangle((x, y, right - 1, points[0][1] - 1), colour)
            return
    _mixed(image, points, p, scale, colour)


def _mixed(
    image: Image.Image, points: Sequence[tuple[float, float]], p: Path, scale: int, colour: str
) -> None:
    from PIL import Image, ImageDraw

    left, top = int(min(x for x, _ in points)) - 2, int(min(y for _, y in points)) - 2
    size = int(max(x for x, _ in points)) + 3 - left, int(max(y for _, y in points)) + 3 - top
    mask = Image.new("L", size)
    moved = [(x - left, y - top) for x, y in points]
    if p.width:
        ImageDraw.Draw(mask).line(moved, round(255 * p.opacity), max(round(p.width * scale), 1))
    else:
        ImageDraw.Draw(mask).polygon(moved, round(255 * p.opacity))
    image.paste(Image.new("RGB", size, rgb(colour)), (left, top), mask)


@lru_cache(maxsize=64)
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
