# SPDX-License-Identifier: Apache-2.0
"""Timelines as figures of matplotlib, which authors can edit; ``.png`` and ``.pdf`` are written
from them.

The x axis is time, in the unit of the timeline, and a rank takes 1 on the y axis. A length in
pixels is for a screen with 96 of them to the inch. matplotlib is an extra, imported when it is
needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from io import BytesIO
from math import nan
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...errors import FpipeError
from . import labels
from .colours import ink, palette
from .labels import Look, text_width, wrapped
from .scene import Points, Scenes
from .shapes import (
    CURVE,
    GAP,
    Frame,
    Label,
    Rect,
    Shape,
    frame,
    has_curves,
    lane_shapes,
    line_shapes,
    natural_size,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("paper", "light", "dark")
PAPER_WIDTH = 560.0  #: of the axes in the style "paper": a page of a paper is about 7 inches wide
HEADING, MARGIN = 90.0, 230.0  #: pixels above a scene, and beside the lanes
LETTERS = 1.12  #: how much wider than ``text_width`` the letters of matplotlib are


def load(module: str) -> Any:
    """A module of matplotlib.

    Raises:
        FpipeError: if it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise FpipeError(
            "figures, .png and .pdf need matplotlib: pip install fpipe[pictures], or write .svg"
        ) from error


def paint(scenes: Scenes, look: Look, suffix: str) -> bytes:
    """The scenes as a ``.png`` or ``.pdf``."""
    style, figure = "dark" if look.dark else "light", load("matplotlib.figure").Figure()
    plot(scenes, look, style, new_axes(figure, scenes, look, style))
    return figure_bytes(figure, suffix)


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """A figure as a file, the same bytes each time; a PDF contains its fonts."""
    file = BytesIO()
    options: Any = {"metadata": {"CreationDate": None}} if suffix == ".pdf" else {"dpi": 192}
    with load("matplotlib").rc_context({"pdf.fonttype": 42}):
        figure.savefig(file, format=suffix[1:], bbox_inches="tight", pad_inches=0.15, **options)
    return file.getvalue()


def new_axes(figure: Figure, scenes: Scenes, look: Look, style: str) -> Axes:
    """Axes as large as the scenes need, alone in a figure."""
    width, lane = natural_size(scenes)
    width = max(look.width - MARGIN, 60.0) if look.width else width
    width = min(width, PAPER_WIDTH) if style == "paper" else width
    pitch = frame(scenes, look, width, lane).pitch
    height = sum(len(scene.lanes) for scene in scenes) * pitch + (len(scenes) - 1) * HEADING
    wide, high = width + MARGIN, height + 2 * HEADING
    figure.set_size_inches(wide / 96, high / 96)
    figure.set_facecolor(palette(1, style == "dark")["paper"])
    return figure.add_axes((0.3 * MARGIN / wide, HEADING / high, width / wide, height / high))


def plot(scenes: Scenes, look: Look, style: str = "paper", axes: Axes | None = None) -> Axes:
    """Draw scenes one over the other into axes, or into those of a new figure of pyplot.

    Raises:
        FpipeError: if there is no such style, or matplotlib is not installed.
    """
    if style not in STYLES:
        raise FpipeError(f"no style is called {style!r}; use {', '.join(STYLES)}")
    if axes is None:
        axes = new_axes(load("matplotlib.pyplot").figure(), scenes, look, style)
    window, pixel = axes.get_window_extent(), axes.figure.dpi / 96
    width, height = window.width / pixel, window.height / pixel
    ranks = sum(len(scene.lanes) for scene in scenes)
    pitch = (height - (len(scenes) - 1) * HEADING) / ranks
    curves = has_curves(scenes, look)
    f = frame(scenes, look, width, (pitch - GAP) / (1 + CURVE * curves), LETTERS)
    colours = palette(max(scene.shades for scene in scenes), style == "dark")
    write = partial(
        axes.annotate,
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        annotation_clip=False,
        color=colours["faint"],
        fontsize=8,
    )
    y, ticks = 0.0, {}
    for scene in scenes:
        notes = [labels.figures(scene), labels.idle(scene)] if style != "paper" else []
        lines = [line for note in notes for line in wrapped(note, 12, width)]
        title = "\n".join(wrapped(labels.title(scene), 18, width))
        bold = {"fontsize": 11, "fontweight": "bold", "color": colours["ink"]}
        write(title, (0, y), (0, 6 + 11 * len(lines)), va="bottom", **bold)
        write("\n".join(lines), (0, y), (0, 5), va="bottom")
        shapes: list[Shape] = [*line_shapes(scene, f)]
        for rank, lane in enumerate(scene.lanes):
            shapes += lane_shapes(rank, scene, f)
            middle = y + rank + 0.5 * f.lane / f.pitch
            ticks[middle] = f"rank {rank}"
            if style != "paper":
                write(labels.figures_of(lane, scene), (1, middle), (6, 0), va="center")
        _draw(axes, shapes, y, f, colours)
        y += len(scene.lanes) + HEADING / f.pitch
    axes.set_xlim(0, width / f.scale)
    axes.set_ylim(y - HEADING / f.pitch, 0)
    axes.set_yticks(list(ticks), list(ticks.values()))
    _decorate(axes, scenes[0].unit, colours)
    _legend(f, scenes, axes, colours, (width, height))
    return axes


def _decorate(axes: Axes, unit: str, colours: Mapping[str, str]) -> None:
    axes.set_xlabel(f"time in {unit}" if unit else "time", color=colours["faint"], fontsize=8)
    axes.tick_params(length=0, labelsize=8, colors=colours["faint"])
    axes.tick_params(axis="y", labelsize=9, labelcolor=colours["ink"])
    axes.set_facecolor(colours["paper"])
    axes.grid(axis="x", color=colours["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _draw(
    axes: Axes, shapes: Iterable[Shape], y: float, f: Frame, colours: Mapping[str, str]
) -> None:
    """Put shapes into axes. Rectangles of one colour and height are one collection, and so are
    equal texts.
    """
    rectangles: defaultdict[tuple[str, float, float, float], list[tuple[float, float]]]
    texts: defaultdict[tuple[str, float, str], list[tuple[float, float]]]
    rectangles, texts = defaultdict(list), defaultdict(list)
    for shape in shapes:
        if isinstance(shape, Rect):
            span = shape.start, shape.end - shape.start
            edge = round(shape.inset, 1)
            rectangles[shape.colour, shape.y, shape.height, edge].append(span)
        elif isinstance(shape, Label):
            place = shape.time, y + shape.y / f.pitch
            texts[shape.text, shape.size, ink(colours[shape.colour])].append(place)
        else:
            points = [point for outline in shape.outlines for point in [*outline, (nan, nan)]]
            xs, ys = [x for x, _ in points], [y + at / f.pitch for _, at in points]
            options: Any = {"color": colours[shape.colour], "alpha": shape.opacity}
            if shape.width:
                axes.plot(xs, ys, lw=0.75 * shape.width, **options)
            else:
                axes.fill(xs, ys, lw=0, **options)
    for (colour, top, height, edge), spans in rectangles.items():
        place, paper = (y + top / f.pitch, height / f.pitch), colours["paper"]
        axes.broken_barh(spans, place, facecolor=colours[colour], edgecolor=paper, lw=edge)
    for (text, size, colour), places in texts.items():
        _stamp(axes, text, 0.75 * size, colour, places)


def _stamp(axes: Axes, text: str, size: float, colour: str, places: Points) -> None:
    """Write a short text at many places, by its outline: thousands of texts take half a minute."""
    affine = load("matplotlib.transforms").Affine2D
    outline = load("matplotlib.textpath").TextPath((0, 0), text, size=size)
    box = outline.get_extents()
    centred = outline.transformed(affine().translate(-box.x0 - box.width / 2, -0.36 * size))
    stamps = load("matplotlib.collections").PathCollection(
        [centred], offsets=places, offset_transform=axes.transData, facecolor=colour, lw=0
    )
    stamps.set_transform(affine().scale(1 / 72) + axes.figure.dpi_scale_trans)
    axes.add_collection(stamps)


def _legend(
    f: Frame,
    scenes: Scenes,
    axes: Axes,
    colours: Mapping[str, str],
    size: tuple[float, float],
) -> None:
    """The legend below the axis, in as many columns as fit."""
    patch, line = load("matplotlib.patches").Patch, load("matplotlib.lines").Line2D
    entries = [*labels.legend(scenes, f.look, all(map(f.is_dense, scenes)))]
    handles = []
    for keys, _, high in entries:
        swatches = [
            patch(color=colours[key]) if high > 0.2 else line([], [], color=colours[key])
            for key in keys
        ]
        handles.append(tuple(swatches) or patch(alpha=0))
    widest = max(text_width(text, 11) for text in ["", *(entry.text for entry in entries)])
    axes.legend(
        handles,
        [entry.text for entry in entries],
        loc="upper left",
        bbox_to_anchor=(0, -42 / size[1]),
        borderaxespad=0,
        borderpad=0,
        ncols=max(int(size[0] // (40 + widest)), 1),
        frameon=False,
        fontsize=8,
        labelcolor=colours["ink"],
        handler_map={tuple: load("matplotlib.legend_handler").HandlerTuple(None, pad=0)},
    )


# ---- bubble against memory ----
def frontier(points: Iterable[tuple[str, float, float, bool]], suffix: str) -> bytes:
    """A ``.png`` or ``.pdf`` of bubble against memory.

    A point is a name, a memory, a bubble, and whether no other one has less of both.
    """
    names: defaultdict[tuple[float, float, bool], list[str]] = defaultdict(list)
    for label, memory, bubble, is_best in points:
        names[memory, bubble, is_best].append(label)
    figure = load("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes, colours = figure.subplots(), palette(1)
    best = sorted((memory, bubble) for memory, bubble, is_best in names if is_best)
    axes.plot(*zip(*best, strict=True), color=colours["curve"], lw=1)
    for k, place in enumerate(sorted(names, key=itemgetter(1, 0))):
        memory, bubble, is_best = place
        axes.plot(memory, bubble, "o", color=colours["curve" if is_best else "faint"], ms=4)
        axes.annotate(
            ", ".join(names[place]),
            (memory, bubble),
            (4, -9 if k % 2 else 3),  # neighbours of one height are not over one another
            textcoords="offset points",
            fontsize=7,
            color=colours["ink" if is_best else "faint"],
        )
    axes.set_title("bubble against memory", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("memory that a rank holds")
    axes.set_ylabel("bubble")
    axes.yaxis.set_major_formatter(load("matplotlib.ticker").PercentFormatter(1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure_bytes(figure, suffix)
