# SPDX-License-Identifier: Apache-2.0
"""A timeline as one self-contained HTML file: the viewer's page, style and scripts, and the timelines as data.

The viewer's files are in ``viewer/``; this module joins them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any, TypeAlias

from . import labels
from .colours import fill, ink, rgb
from .lanes import Lane
from .scene import Scene
from .shapes import Look

Json: TypeAlias = dict[str, Any]

VIEWER = Path(__file__).parent / "viewer"
SCRIPTS = ("data.js", "paint.js", "view.js")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a shade as one letter


def paint(scenes: Sequence[Scene], look: Look | None = None) -> str:
    """The page."""
    parts = {
        "title": escape(" · ".join(labels.title(scene) for scene in scenes)),
        "style": _read("style.css"),
        "script": "\n".join(_read(name) for name in SCRIPTS),
        "data": json.dumps(data(scenes), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub("{{(.*?)}}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def data(scenes: Sequence[Scene]) -> Json:
    """The data of the page: plain lists and numbers."""
    names = [scene.name or f"timeline {k}" for k, scene in enumerate(scenes, 1)]
    unique = [name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names, 1)]
    legend = [
        {"op": op, "word": word, "colours": [_colour(op, k, fill(op, k, shades)) for k in range(shades)]}
        for op, word, shades in labels.legend(scenes)
    ]
    if any(scene.fused for scene in scenes):
        legend.append({"op": "fused", "word": "fused", "colours": [_colour(op, 0, fill(op)) for op in "FB"]})
    return {"scenes": list(map(_scene, scenes, unique)), "legend": legend}


def _scene(scene: Scene, label: str) -> Json:
    places = 8 - floor(log10(scene.total)) if scene.total > 0 else 8
    one = [("its unit is drawn as", labels.time(scene.one, scene))] if scene.one else []
    return {
        "label": label,
        "title": label + labels.title(scene)[len(scene.name or "schedule") :],
        "figures": [*labels.facts(scene), *one],
        "total": round(scene.total, places),
        "unit": scene.unit,
        "memoryUnit": scene.memory_unit,
        "cell": scene.cell,
        # in units of the size of letters, about as in the typeface of a browser
        "longest": [round(1.1 * scene.widest_name(detail), 3) for detail in (3, 2)],
        "palette": [
            _colour(op, k, fill(op, k, shades)) for op, _, shades in labels.legend([scene]) for k in range(shades)
        ],
        "lanes": [_lane(lane, places) for lane in scene.lanes],
    }


def _colour(op: str, shade: int, colour: str) -> Json:
    return {"key": op + _DIGITS[min(shade, 35)], "colour": colour, "ink": ink(colour), "rgb": rgb(colour)}


def _lane(lane: Lane, places: int) -> Json:
    waits: list[float] = []
    for k, bar in enumerate(lane.bars):
        if bar.cause is not None:
            waits += [k, *bar.cause, _short(bar.wait, places)]
    return {
        "bubble": round(lane.bubble, 6),
        "peak": lane.peak,
        "start": [_short(bar.start, places) for bar in lane.bars],
        "end": [_short(bar.end, places) for bar in lane.bars],
        "names": ",".join(";".join(map(str, bar.action.parts)) for bar in lane.bars),
        "shades": "".join(_DIGITS[min(shade, 35)] for bar in lane.bars for shade in bar.shades),
        "waits": waits,
        "times": [_short(time, places) for time, _ in lane.curve],
        "held": [_short(amount, 3) for _, amount in lane.curve],
    }


def _short(value: float, places: int) -> float:
    """Rounded, and an int where it is one: ``12`` is shorter than ``12.0``."""
    value = round(value, places)
    return int(value) if value == int(value) else value
