# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, an interactive page, a trace for Perfetto, and figures of
matplotlib.

``convert`` turns timelines into a ``scene``, which each format draws.
"""

from .convert import Drawable
from .labels import Look
from .output import (
    FORMATS,
    draw,
    figure,
    folded,
    load,
    pipeline,
    plot,
    save,
    table,
    titled,
)
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
