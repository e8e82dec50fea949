# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, an interactive page, a trace for Perfetto, and figures of
matplotlib.

``convert`` turns timelines into a ``scene``, which each format draws.
"""

from .output import (
    FORMATS,
    draw,
    figure,
    folded,
    frontier,
    plot,
    save,
    strip,
    table,
    write,
)
from .scene import Look

__all__ = [
    "FORMATS",
    "Look",
    "draw",
    "figure",
    "folded",
    "frontier",
    "plot",
    "save",
    "strip",
    "table",
    "write",
]
