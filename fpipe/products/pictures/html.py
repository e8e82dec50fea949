# SPDX-License-Identifier: Apache-2.0
"""A timeline as one self-contained HTML file: the viewer's page, style and scripts, and the
timelines as data.

The viewer's files are in ``viewer/``; this module joins them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from . import labels
from .colours import NAMES, THEME, fill, ink
from .colours import palette as colours
from .difference import TINTS
from .idle import CAUSES
from .packed import Json, compressed, lanes_of
from .scene import Scene
from .shapes import Look

VIEWER = Path(__file__).parent / "viewer"
SCRIPTS = ("data.js", "paint.js", "over.js", "view.js")


def paint(scenes: Sequence[Scene], look: Look | None = None) -> str:
    """The page."""
    title = " · ".join(labels.title(scene) for scene in scenes)
    return join(title, data(scenes, look or Look()), look=look or Look())


def join(
    title: str,
    contents: Json,
    *,
    look: Look,
    scripts: Sequence[str] = SCRIPTS,
    extra: Mapping[str, str] | None = None,
) -> str:
    """The viewer with these contents; ``extra`` has other scripts by name, and ``controls``, a
    piece of HTML.
    """
    extra = extra or {}
    parts = {
        "title": escape(title),
        "style": _theme(look.dark) + _read("style.css"),
        "script": "\n".join(extra[name] if name in extra else _read(name) for name in scripts),
        "data": compressed(contents),
        "controls": extra.get("controls", ""),
        "scheme": {None: "light dark", False: "light", True: "dark"}[look.dark],
    }
    return re.sub("{{(.*?)}}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (VIEWER / name).read_text(encoding="utf-8")


def _theme(dark: bool | None) -> str:
    """The colours as variables of CSS, for light or dark paper, or for both."""

    def rules(dark: bool) -> Iterator[str]:
        yield f"--scheme:{'dark' if dark else 'light'};--raised:{'#232a32' if dark else '#ffffff'};"
        yield f"--shadow:0 4px 18px rgb({'0 0 0 / 55%' if dark else '20 30 40 / 18%'});"
        yield from (f"--{name}:{pair[dark]};" for name, pair in THEME.items())

    text = f":root{{{''.join(rules(bool(dark)))}}}\n"
    return text + (
        f"@media (prefers-color-scheme:dark){{:root{{{''.join(rules(True))}}}}}\n"
        if dark is None
        else ""
    )


def data(scenes: Sequence[Scene], look: Look) -> Json:
    """The data of the page: plain lists and numbers."""
    names = [scene.name or f"timeline {k}" for k, scene in enumerate(scenes, 1)]
    unique = [
        name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names, 1)
    ]
    show = {"memory": look.memory, "critical": look.critical, "messages": look.messages}
    return {
        "scenes": list(map(_scene, scenes, unique)),
        "show": show,
        "words": NAMES,
        "idle": CAUSES,
    }


def _scene(scene: Scene, label: str) -> Json:
    one = [("its unit is drawn as", labels.time(scene.one, scene))] if scene.one else []
    return {
        "label": label,
        "title": label + labels.title(scene)[len(scene.name or "schedule") :],
        "figures": [*labels.facts(scene), *one],
        "notes": [labels.idle(scene), labels.note(scene)],
        "total": scene.total,
        "unit": scene.unit,
        "memoryUnit": scene.memory_unit,
        "microbatches": scene.microbatches,
        "cell": scene.cell,
        # in units of the size of letters, about as in the typeface of a browser
        "longest": [round(1.1 * scene.widest_name(detail), 3) for detail in (3, 2)],
        "palette": _tints(scene.ops) if scene.against else palette(scene.ops, scene.shades),
        "tints": labels.tints(scene),
        **lanes_of(scene),
    }


def _tints(ops: Sequence[str]) -> list[Json]:
    """The colours of a scene that is compared with another: by the tint alone, for every op."""
    papers = {"light": colours(1), "dark": colours(1, dark=True)}
    return [
        {"op": op, "shade": tint, "tint": f"t{tint}"}
        | {paper: [table[f"t{tint}"], ink(table[f"t{tint}"])] for paper, table in papers.items()}
        for op in ops
        for tint in range(TINTS)
    ]


def palette(ops: Sequence[str], shades: int) -> list[Json]:
    """The colours of work, on light and on dark paper, each with that of its letters."""
    return [
        {"op": op, "shade": shade}
        | {
            paper: [one := fill(op, shade, shades, paper == "dark"), ink(one)]
            for paper in ("light", "dark")
        }
        for op in ops
        for shade in range(shades)
    ]
