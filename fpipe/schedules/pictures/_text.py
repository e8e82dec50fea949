"""A timeline as a plain text file: what a terminal of 160 columns without colours would show."""

from __future__ import annotations

from collections.abc import Sequence

from . import _terminal
from ._scene import Scene


def paint(scenes: Sequence[Scene]) -> str:
    """The file's text."""
    return _terminal.paint(scenes, 160, 0)
