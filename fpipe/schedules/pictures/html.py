# SPDX-License-Identifier: Apache-2.0
"""A timeline as one self-contained HTML file: the viewer's page, style and scripts, and the timelines as data.

The viewer's files are in ``viewer/``; this module joins them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any, TypeAlias

from . import labels
from .colours import fill, ink, rgb
from .scene import Lane, Scene
from .text_width import text_width

Json: TypeAlias = dict[str, Any]

VIEWER = Path(__file__).parent / "viewer"
SCRIPTS = ("data.js", "paint.js", "view.js")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a shade as one letter


def paint(scenes: Sequence[Scene]) -> str:
    """The page."""
    parts = {
        "title": escape(" · ".join(labels.title(scene) for scene in scenes)),
        "style": _read("style.css"),
        "script": "\n".join(_read(name) for name in SCRIPTS),
        "data": json.dumps(data(scenes), separators=(",", ":")).replace("<", "\\u003c"),
    }
    before, *pieces = _read("page.html").split("{{")
    text = [before]
    for piece in pieces:
        name, rest = piece.split("}}", 1)
        text += [parts[name], rest]
    return "".join(text)


def _read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def data(scenes: Sequence[Scene]) -> Json:
    """The data of the page: plain lists and numbers."""
    names = _names(scenes)
    return {
        "scenes": [_scene(scene, label) for scene, label in zip(scenes, names, strict=True)],
        "legend": list(_legend(scenes)),
    }


def _names(scenes: Sequence[Scene]) -> list[str]:
    """A short name for each timeline, unlike the others."""
    names = [scene.name or f"timeline {k}" for k, scene in enumerate(scenes, 1)]
    return [name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names, 1)]


def _scene(scene: Scene, label: str) -> Json:
    places = 8 - floor(log10(scene.total)) if scene.total > 0 else 8
    unit = f" {scene.unit}" if scene.unit else ""
    peak = max((lane.peak for lane in scene.lanes), default=0.0)
    return {
        "label": label,
        "title": label + labels.title(scene)[len(scene.name or "schedule") :],
        "figures": [
            ("total", labels.number(scene.total) + unit),
            ("span", labels.number(scene.span) + unit),
            ("bubble", labels.percent(scene.bubble)),
            ("peak", labels.held(peak, scene.memory_unit)),
            *([("its unit is drawn as", labels.number(scene.one) + unit)] if scene.one else []),
        ],
        "total": round(scene.total, places),
        "unit": scene.unit,
        "memoryUnit": scene.memory_unit,
        "cell": scene.cell,
        "longest": [_em(scene.short_names(detail)) for detail in (3, 2)],
        "palette": [_colour(op, k, scene.shades) for op in scene.ops for k in range(scene.shades)],
        "lanes": [_lane(lane, places) for lane in scene.lanes],
    }


def _colour(op: str, shade: int, shades: int) -> Json:
    colour = fill(op, shade, shades)
    return {"key": op + _DIGITS[min(shade, 35)], "colour": colour, "ink": ink(colour), "rgb": rgb(colour)}


def _em(names: Iterable[str]) -> float:
    """The width of the widest name in units of the size of its letters, about as in the typeface of a browser."""
    return round(1.1 * max(text_width(name, 1.0) for name in names), 3)


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


def _legend(scenes: Sequence[Scene]) -> Iterator[Json]:
    shades = max(scene.shades for scene in scenes)
    for op, word in {op: word for scene in scenes for op, word in labels.legend(scene)}.items():
        yield {"op": op, "word": word, "colours": [_colour(op, k, shades) for k in range(shades)]}
    if any(scene.fused for scene in scenes):
        yield {"op": "fused", "word": "fused", "colours": [_colour("F", 0, 1), _colour("B", 0, 1)]}
