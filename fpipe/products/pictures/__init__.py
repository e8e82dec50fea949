# SPDX-License-Identifier: Apache-2.0
"""Pictures of timelines: text, ``.svg``, ``.png``, ``.pdf``, an interactive page, a trace for
Perfetto.

A module is loaded when one of its names is first used: training draws nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .notebook import figure, folded, table, titled
    from .output import FORMATS, draw, load, plot, save
    from .plotting import frontier
    from .scene import Drawable
    from .shapes import Look
    from .trace import is_timeline

_TABLE = {
    "notebook": "figure folded table titled",
    "output": "FORMATS draw load plot save",
    "plotting": "frontier",
    "scene": "Drawable",
    "shapes": "Look",
    "trace": "is_timeline",
}
_NAMES = {name: module for module, names in _TABLE.items() for name in names.split()}

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
    "plot",
    "save",
    "table",
    "titled",
]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
