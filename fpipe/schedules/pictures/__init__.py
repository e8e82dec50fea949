# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, ``.png``, ``.pdf``, an interactive page, a trace for Perfetto."""

from .notebook import figure, folded, table, titled
from .output import FORMATS, draw, load, save
from .scene import Drawable
from .shapes import Look
from .trace import is_timeline

__all__ = ["FORMATS", "Drawable", "Look", "draw", "figure", "folded", "is_timeline", "load", "save", "table", "titled"]
