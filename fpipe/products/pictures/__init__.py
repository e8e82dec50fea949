# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, an interactive page, a trace for Perfetto, and figures of
matplotlib.

``scene`` has what each format draws.
"""

from .labels import aligned, size_text, with_code
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
    width_with_numbers,
    write,
)
from .scene import Look

__all__ = [
    "FORMATS",
    "Look",
    "aligned",
    "draw",
    "figure",
    "folded",
    "frontier",
    "plot",
    "save",
    "size_text",
    "strip",
    "table",
    "width_with_numbers",
    "with_code",
    "write",
]
