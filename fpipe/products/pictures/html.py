# SPDX-License-Identifier: Apache-2.0
"""A timeline as one self-contained HTML file: the viewer's page, style and scripts, and the
timelines as data.

The viewer's files are in ``viewer/``; this module joins them. Times in the data are whole numbers,
``scale`` of which are a unit of time; what a rank holds is in thousandths. A list of numbers
contains the difference of each from the one before, which compresses to a hundredth;
``viewer/data.js`` adds them up again.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import pairwise
from math import floor, log10
from pathlib import Path
from typing import TypeAlias

from ...actions import KINDS
from . import labels
from .colours import THEME, ink, palette
from .scene import CAUSES, Lane, Look, Scene, Scenes

Json: TypeAlias = dict[str, object]
VIEWER = Path(__file__).parent / "viewer"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{}</title><style>{}body{{margin:0;padding:1rem;background:var(--paper);color:var(--ink);
color-scheme:var(--scheme);font:15px/1.5 system-ui,sans-serif}}
body>*{{max-width:1100px;margin:1rem auto}}body>h2{{margin:.25rem auto}}
h2~p:not(h3~p){{margin:.25rem auto}}
table.fp-table{{display:block;overflow-x:auto;border-collapse:collapse;animation:none;
background:linear-gradient(var(--paper) 0 0) right/1.5rem 100% no-repeat local,
linear-gradient(to left,var(--line),transparent) right/1.5rem 100% no-repeat scroll}}
td{{border-top:1px solid var(--line)}}td,th{{padding:.25rem 0;vertical-align:top;white-space:nowrap;
font-variant-numeric:tabular-nums}}
@media(max-width:600px){{body{{padding:.75rem}}*+[style*=left]{{padding-left:.5em}}
td:first-child{{letter-spacing:-.06em;min-width:2em}}}}
p{{white-space:pre-line;overflow-wrap:anywhere}}th{{font-weight:500;color:var(--faint)}}.narrow{{display:none}}
@media(max-width:600px){{.wide{{display:none}}.narrow{{display:block}}}}</style>
<body>{}</body></html>
"""
SCRIPTS = ("data.js", "paint.js", "over.js", "view.js")


def paint(scenes: Scenes, look: Look) -> str:
    """The page."""
    names = [scene.name for scene in scenes]
    drawn: list[Json] = []
    for k, scene in enumerate(scenes, 1):
        is_unique = names.count(scene.name) == 1
        drawn.append(_scene(scene, scene.name if is_unique else f"{scene.name} ({k})"))
    title = " · ".join(map(labels.title, scenes))
    contents: Json = {"scenes": drawn, "show": {"memory": look.memory is not False}}
    return join(title, contents, look.dark)


def page(title: str, body: str, dark: bool | None = None) -> str:
    """A page without scripts, in the colours of the pictures."""
    return PAGE.format(escape(title), _theme(dark), body)


def join(
    title: str,
    contents: Json,
    dark: bool | None = None,
    script: str = "",
    controls: str = "",
) -> str:
    """The viewer with these contents. ``script`` runs after its own scripts, and ``controls``, a
    piece of HTML, stands above its head.
    """
    words = {op: kind.name for op, kind in KINDS.items()}
    data = json.dumps(contents | {"words": words, "idle": CAUSES}, separators=(",", ":"))
    text = data.replace("<", "\\u003c")
    if len(data) > 200_000:  # shorter ones are painted before the page has loaded
        text = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
    parts = {
        "title": escape(title),
        "style": _theme(dark) + _read("style.css"),
        "script": "\n".join([*map(_read, SCRIPTS), script]),
        "data": text,
        "controls": controls,
        "scheme": {None: "light dark", False: "light", True: "dark"}[dark],
    }
    return re.sub("{{(.*?)}}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def _theme(dark: bool | None) -> str:
    """The colours as variables of CSS, for light or dark paper, or for both."""

    def variables(dark: bool) -> str:
        colours = "".join(f"--{name}:{pair[dark]};" for name, pair in THEME.items())
        return f":root{{--scheme:{'dark' if dark else 'light'};{colours}}}\n"

    if dark is not None:
        return variables(dark)
    return f"{variables(False)}@media (prefers-color-scheme:dark){{{variables(True)}}}\n"


# ---- data ----
def _scene(scene: Scene, label: str) -> Json:
    digits = floor(log10(scene.total)) if scene.total > 0 else 0
    scale = 10.0 ** (8 - digits)
    pairs = dict.fromkeys(pair for lane in scene.lanes for pair in _pairs(lane))
    codes = {pair: number for number, pair in enumerate(pairs)}
    return {
        "label": label,
        "title": label + labels.title(scene).removeprefix(scene.name),
        "figures": labels.facts(scene),
        "notes": list(map(labels.with_code, labels.notes(scene))),
        "total": scene.total,
        "unit": scene.timeline.unit,
        "memoryUnit": scene.unit,
        "microbatches": scene.microbatches,
        "slices": scene.timeline.slices,
        "cell": scene.cell,
        "mean": scene.mean,
        "palette": colour_table(palette(scene.shades), scene.shades),
        "paler": labels.paler_stages([scene]),
        "tints": list(labels.tints([scene])),
        "scale": scale,
        "codes": list(codes),
        "lanes": [_lane(lane, scale, codes) for lane in scene.lanes],
    }


def colour_table(keys: Iterable[str], shades: int) -> list[Json]:
    """Colours on light and on dark paper, each with that of its letters."""
    light = palette(shades)
    dark = palette(shades, dark=True)
    return [
        {
            "key": key,
            "light": (light[key], ink(light[key])),
            "dark": (dark[key], ink(dark[key])),
        }
        for key in keys
    ]


def _pairs(lane: Lane) -> Iterator[tuple[str, ...]]:
    """The stage with its op, the colour, and the shade, of each part in a lane."""
    for bar in lane.bars:
        for part, *colours in zip(bar.action.parts, bar.colours, bar.kinds, strict=True):
            yield f"{part.stage}{part.op}", *colours


def _lane(lane: Lane, scale: float, codes: Mapping[tuple[str, ...], int]) -> Json:
    """A lane as lists of numbers."""

    def times(values: Iterable[float]) -> list[int]:
        return _differences(round(value * scale) for value in values)

    waits = [(position, bar.wait) for position, bar in enumerate(lane.bars) if bar.wait]
    units = [part.microbatch for bar in lane.bars for part in bar.action.parts]
    return {
        "bubble": round(lane.bubble, 6),
        "peak": lane.peak,
        "start": times(bar.start for bar in lane.bars),
        "end": times(bar.end for bar in lane.bars),
        "parts": [len(bar.kinds) for bar in lane.bars],
        "codes": [codes[pair] for pair in _pairs(lane)],
        "units": _differences(units),
        "shifts": [bar.shift for bar in lane.bars],
        "waits": [
            _differences(position for position, _ in waits),
            _differences(wait.rank for _, wait in waits),
            _differences(wait.position for _, wait in waits),
            times(wait.time for _, wait in waits),
        ],
        "times": times(time for time, _ in lane.curve),
        "held": _differences(round(1000 * held) for _, held in lane.curve),
        "idle": [
            times(gap.start for gap in lane.gaps),
            times(gap.end for gap in lane.gaps),
            [gap.cause for gap in lane.gaps],
        ],
    }


def _differences(values: Iterable[int]) -> list[int]:
    return [value - before for before, value in pairwise([0, *values])]
