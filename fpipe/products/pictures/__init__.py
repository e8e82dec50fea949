# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, an interactive page, a trace for Perfetto, and figures of
matplotlib.

``convert`` turns timelines into a ``scene``, which each format draws.
"""

from .convert import Drawable
from .labels import Look
from .notebook import figure, folded, pipeline, table, titled
from .output import FORMATS, draw, load, plot, save
from .plotting import frontier
from .trace import is_timeline

__all__ = [
    "FORMATS",
    "Drawable",
    "Look",
    "draw",
    "figure",
    "folded",
    "frontier",
    "is_timeline",
    "load",
    "pipeline",
    "plot",
    "save",
    "table",
    "titled",
]
