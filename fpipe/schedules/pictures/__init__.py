# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, ``.png``, ``.pdf``, an interactive page, a trace for Perfetto."""

from .output import FORMATS, draw, load, save
from .scene import Drawable
from .shapes import Look
from .trace import is_timeline

__all__ = ["FORMATS", "Drawable", "Look", "draw", "is_timeline", "load", "save"]
