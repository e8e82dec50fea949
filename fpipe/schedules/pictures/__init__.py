# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text for a terminal, ``.svg``, ``.png``, an interactive page, a trace for Perfetto."""

from .output import FORMATS, draw, load, save
from .scene import Drawable
from .trace import is_timeline

__all__ = ["FORMATS", "Drawable", "draw", "is_timeline", "load", "save"]
