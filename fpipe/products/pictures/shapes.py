# SPDX-License-Identifier: Apache-2.0
"""What a still picture consists of: rectangles, paths and lines of text. ``page`` arranges them;
``.svg``, ``.png`` and ``.pdf`` write them.

A colour is a key of ``colours.palette``, so that a picture can be written for light and for dark
paper. The unit is the pixel of a plain screen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .colours import ink, palette


class Rect(NamedTuple):
    """A filled rectangle; ``hint`` is shown under the mouse if the format supports it."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    hint: str = ""


class Text(NamedTuple):
    """A line of text: ``x`` is its left end, middle or right end by ``anchor``, ``y`` its baseline;
    ``on`` is the colour under it if that is not the paper, and ``space`` the width that it may
    take, if its typeface is wider.
    """

    x: float
    y: float
    text: str
    size: float
    colour: str = "ink"
    anchor: str = "start"
    bold: bool = False
    on: str = ""
    space: float = 0.0


class Path(NamedTuple):
    """A line through points, or the area that it encloses where ``width`` is 0."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 0.0
    opacity: float = 1.0


Shape: TypeAlias = Rect | Text | Path


class Page(NamedTuple):
    """A picture: its size, its shapes, the later ones over the earlier, and how many shades its
    colours have.
    """

    width: float
    height: float
    shapes: list[Shape]
    shades: int = 1


@dataclass(frozen=True)
class Look:
    """What a picture shows beside the actions, and for which paper and width it is drawn.

    ``difference`` colours the actions of all timelines but the first by how much earlier or later
    they end than there.

    ``dark`` is None for a picture that follows its reader, or light where a format cannot.
    ``width`` is in pixels; by default it follows from the length of the timeline.
    """

    memory: bool = True
    critical: bool = False
    messages: bool = False
    difference: bool = False
    dark: bool | None = None
    width: float | None = None


def colour_of(shape: Shape, shades: int, dark: bool) -> str:
    """The colour of a shape as ``#rrggbb``: black or white for text on a colour."""
    colours = palette(shades, dark)
    if isinstance(shape, Text) and shape.on:
        return ink(colours[shape.on])
    return colours[shape.colour]
