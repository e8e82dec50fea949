# SPDX-License-Identifier: Apache-2.0
"""Timelines as figures of matplotlib, which authors can edit; ``.png`` and ``.pdf`` are written
from them.

The x axis is time, in the unit of the timeline, and a rank takes 1 on the y axis. A length in
pixels is for a screen with 96 of them to the inch. matplotlib is an extra, so this module is
imported when it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from math import ceil
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerPatch, HandlerTuple
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, Bbox

from ...actions import OPS
from . import labels
from .colours import ink, palette
from .labels import widest_name, wrapped
from .scene import Look, Scene, Scenes, has_curves, has_fused, step_of
from .shapes import (
    CURVE,
    GAP,
    LETTERS,
    NARROW,
    PALE,
    PAPER_LETTERS,
    Frame,
    Label,
    Rect,
    frame,
    natural_size,
    shapes,
)

PAPER_WIDTH = 650.0  #: of a figure in the style "paper": a page of a paper is about 7 inches wide
FOOT = 70.0  #: pixels below the last scene
LINE = 13.0  #: of the text above a scene
LEFT, RIGHT = 42.0, 8.0  #: pixels beside the lanes


def paint(scenes: Scenes, look: Look, suffix: str) -> bytes:
    """The scenes as a ``.png`` or ``.pdf``."""
    figure = Figure()
    plot(scenes, look, new_axes(figure, scenes, look))
    if not look.paper:
        return figure_bytes(figure, suffix, look)
    drawn = figure.get_tightbbox()
    width = figure.get_figwidth()  # as wide as was asked for
    box = Bbox([[0, drawn.y0 - 0.04], [width, drawn.y1 + 0.04]])
    return figure_bytes(figure, suffix, look, box)


def figure_bytes(
    figure: Figure,
    suffix: str,
    look: Look,
    box: Bbox | str | None = "tight",
) -> bytes:
    """A figure as a file, the same bytes each time; a PDF contains its fonts. A PNG for a paper has
    the 300 dots to the inch that journals ask for, another one two to a pixel.
    """
    file = BytesIO()
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "fpipe"}):
        figure.savefig(
            file,
            format=suffix[1:],
            bbox_inches=box,
            pad_inches=0.15,
            dpi=300 if look.paper else 192,
            metadata={".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(suffix),
        )
    return file.getvalue()


def new_axes(figure: Figure, scenes: Scenes, look: Look) -> Axes:
    """Axes as large as the scenes need, alone in a figure."""
    width, lane = natural_size(scenes)
    if look.paper:
        width = min(width, PAPER_WIDTH - LEFT - RIGHT)
        lane = min(lane + 4, 24) if has_fused(scenes) else min(lane, 16)
    if look.width:
        width = max(look.width - LEFT - RIGHT, 60.0)
    pitch = frame(scenes, look, width, lane).pitch
    above = _above(scenes, look, width)
    height = sum(len(scene.lanes) for scene in scenes) * pitch + (len(scenes) - 1) * above
    wide = width + LEFT + RIGHT
    high = height + FOOT + above
    figure.set_size_inches(wide / 96, high / 96)
    figure.set_facecolor(palette(1, bool(look.dark))["paper"])
    corner = LEFT / wide, FOOT / high
    return figure.add_axes((*corner, width / wide, height / high))


def width_with_numbers(scenes: Scenes, look: Look) -> float:
    """The inches that a picture for a paper needs for numbers in its short bars; 0 if it has
    them.
    """
    widest = widest_name(scenes, 1 + bool(scenes[-1].against)) - 0.2
    cells = max(scene.length for scene in scenes) / min(scene.cell for scene in scenes)
    need = LEFT + RIGHT + cells * PAPER_LETTERS * NARROW * widest
    return ceil(need / 9.6) / 10 if need > (look.width or PAPER_WIDTH) else 0.0


def _heading(scene: Scene, look: Look, width: float) -> list[str]:
    """The lines above a scene; for a paper its name, total and bubble."""
    texts = [labels.title(scene), *labels.summary(scene), *labels.notes(scene)]
    if look.paper:
        texts = [scene.name, ", ".join(map(" ".join, labels.facts(scene)[:2]))]
    return [line for text in texts for line in wrapped(text, 13, width)]


def _above(scenes: Scenes, look: Look, width: float) -> float:
    """Pixels between scenes."""
    lines = max(len(_heading(scene, look, width)) for scene in scenes)
    return (13 if look.paper else 30 + LINE) + LINE * lines


def plot(scenes: Scenes, look: Look, axes: Axes | None = None) -> Axes:
    """Draw scenes one over the other into axes, or into those of a new figure of pyplot."""
    if axes is None:
        from matplotlib import pyplot  # it chooses a backend

        axes = new_axes(pyplot.figure(), scenes, look)
    window = axes.get_window_extent()
    pixel = axes.figure.dpi / 96
    width, height = window.width / pixel, window.height / pixel
    above = _above(scenes, look, width)
    pitch = (height - (len(scenes) - 1) * above) / sum(len(scene.lanes) for scene in scenes)
    curve = CURVE if has_curves(scenes, look) else 0.0
    f = frame(scenes, look, width, (pitch - GAP) / (1 + curve), NARROW if look.paper else LETTERS)
    font = 7 if look.paper else 8
    colours = palette(max(scene.shades for scene in scenes), bool(look.dark))
    ticks: dict[float, str] = {}
    beside: dict[float, str] = {}
    y = 0.0
    for scene in scenes:
        axes.axhspan(y - above / f.pitch, y, color=colours["paper"])  # over the grid
        title, *notes = _heading(scene, look, width)
        top = int(not look.paper and y == 0)  # a line for the axis
        if len(scenes) > 1 or not look.paper:
            write(axes, notes, y, top, color=colours["ink"], fontsize=font)
            size = font if look.paper else 10
            top += len(notes)
            write(axes, [title], y, top, color=colours["ink"], fontsize=size, weight="bold")
        for rank, figures in enumerate(labels.figures_of(scene)):
            place = y + rank + 0.5 * f.lane / f.pitch
            ticks[place], beside[place] = f"rank {rank}", figures
        _draw(axes, scene, y, f, colours)
        y += len(scene.lanes) + above / f.pitch
    unit = scenes[0].timeline.unit
    axes.set(
        xlim=(0, width / f.scale),
        ylim=(y - above / f.pitch, 0),
        xlabel=f"time in {unit}" if unit else "time",
        facecolor=colours["paper"],
        axisbelow=True,
    )
    if fold := scenes[0].fold:
        _ticks(axes, scenes[0], fold.microbatches, step_of(45 / f.scale))
    _label(axes, ticks, colours["ink"], font)
    axes.xaxis.label.set(color=colours["ink"], fontsize=font)
    axes.grid(axis="x", color=colours["line"], linewidth=0.6)
    if not look.paper:
        axes.xaxis.set(ticks_position="top", label_text="")  # the heading has the unit
        _label(axes.secondary_yaxis("right"), beside, colours["faint"], font)
    entries = labels.legend(scenes, look, f.dense, f.detail)
    _legend(axes, entries, colours, (42 if look.paper else 14) / height, font)
    return axes


def _label(axes: Any, ticks: Mapping[float, str], colour: str, font: float) -> None:
    """Texts beside the lanes, without ticks and edges."""
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(length=0, labelsize=font, colors=colour)
    axes.spines[:].set_visible(False)


def write(axes: Axes, lines: Sequence[str], y: float, above: int, **style: Any) -> None:
    """Write lines over the lanes at ``y``, with so many lines below them."""
    foot = 8 + above * 0.75 * LINE
    axes.annotate("\n".join(lines), (0, y), (0, foot), textcoords="offset points", **style)


def _ticks(axes: Axes, scene: Scene, hidden: int, step: float) -> None:
    """The times beside what is not drawn, and of how many microbatches that is."""
    times = [k * step for k in range(int(scene.total / step + 1e-9) + 1)]
    times = [time for time in times if not scene.is_hidden(time)]
    axes.set_xticks(list(map(scene.place, times)), list(map(labels.number, times)))
    axes.set_xlabel(f"{axes.get_xlabel()} (gap: {hidden} microbatches not drawn)")


def _draw(axes: Axes, scene: Scene, y: float, f: Frame, colours: Mapping[str, str]) -> None:
    """Put the lanes of a scene into axes, ``y`` ranks below their top. All rectangles are one
    collection, and so are all names.
    """

    def place(time: float, height: float) -> tuple[float, float]:
        return scene.place(time), y + height / f.pitch

    boxes: list[Rect] = []
    names: list[Label] = []
    for shape in shapes(scene, f):
        if isinstance(shape, Rect):
            boxes.append(shape)
        elif isinstance(shape, Label):
            names.append(shape)
        else:
            times, heights = zip(*(place(*point) for point in shape.points), strict=True)
            colour = colours[shape.colour]
            axes.fill_between(
                times,
                heights,
                heights[0],
                step="post",
                linewidth=0,
                facecolor=colour,
                alpha=PALE.get(shape.colour),
            )
            if shape.colour == "curve":
                axes.step(times, heights, where="post", color=colour, linewidth=0.6, zorder=1)
    corners = [
        [place(*corner) for corner in ((a, top), (b, top), (b, top + high), (a, top + high))]
        for a, b, top, high, *_ in boxes
    ]
    rectangles = PolyCollection(
        corners,
        facecolors=[colours[box.colour] for box in boxes],
        edgecolors=colours["paper"],
        linewidths=[box.inset for box in boxes],
    )
    # outlines of texts: thousands of texts take half a minute
    stamps = PathCollection(
        [_outline(name.text, 0.75 * name.size) for name in names],
        offsets=[place(name.time, name.y) for name in names],
        offset_transform=axes.transData,
        facecolors=[ink(colours[name.colour]) for name in names],
        linewidths=0,
    )
    stamps.set_transform(Affine2D().scale(f.narrow / 72, 1 / 72) + axes.figure.dpi_scale_trans)
    axes.add_collection(rectangles, autolim=False)
    if names:
        axes.add_collection(stamps, autolim=False)


@lru_cache(maxsize=4096)
def _outline(text: str, size: float) -> Path:
    """A text around its middle, in points."""
    outline = TextPath((0, 0), text, size=size)
    box = outline.get_extents()
    middle = box.x0 + box.width / 2
    return outline.transformed(Affine2D().translate(-middle, -0.36 * size))


def _legend(
    axes: Axes,
    entries: Iterable[labels.Entry],
    colours: Mapping[str, str],
    below: float,
    font: float,
) -> None:
    """The legend below the axes, by a share of their height; below each heading it is another
    one.
    """
    window = axes.get_window_extent()
    for heading, part in _by_heading(entries, colours).items():
        if before := axes.get_legend():
            axes.add_artist(before)
        box = window
        for rows in range(1, len(part) + 1):  # as few as fit
            legend = axes.legend(
                *zip(*part, strict=True),
                loc="upper left",
                bbox_to_anchor=(0, -below),
                borderaxespad=0,
                borderpad=0,
                ncols=ceil(len(part) / rows),
                columnspacing=0.9,
                handlelength=1.2,
                handleheight=0.9,
                frameon=False,
                fontsize=font,
                labelcolor=colours["ink"],
                title=heading,
                title_fontsize=font,
                alignment="left",
                handler_map={tuple: HandlerTuple(None, pad=0), Patch: _Lettered()},
            )
            legend.get_title().set_color(colours["ink"])
            box = legend.get_window_extent()
            if box.width <= window.width:
                break
        below += 1.2 * box.height / window.height


def _by_heading(
    entries: Iterable[labels.Entry], colours: Mapping[str, str]
) -> dict[str, list[tuple[tuple[Patch, ...], str]]]:
    """The swatches and meanings of entries below each heading."""
    parts = defaultdict(list)
    heading = ""
    for keys, text in entries:
        if text.endswith(":"):
            heading = text
            continue
        if keys == ("warmup",):
            heading = ""
        swatches = [
            Patch(
                color=colours[key],
                alpha=PALE.get(key),
                label=key[0] * (len(keys) == 1 and key[0] in OPS),
            )
            for key in keys
        ]
        parts[heading].append((tuple(swatches) or (Patch(alpha=0),), text))
    return parts


class _Lettered(HandlerPatch):
    """A patch with its label in it."""

    def create_artists(self, legend: Any, orig_handle: Any, *args: Any, **kwargs: Any) -> list[Any]:
        box: Any
        [box] = super().create_artists(legend, orig_handle, *args, **kwargs)
        *_, size, transform = args
        letter = Text(
            x=box.get_x() + box.get_width() / 2,
            y=box.get_y() + box.get_height() / 2,
            text=orig_handle.get_label(),
            color=ink(to_hex(box.get_facecolor())),
            size=size,
            ha="center",
            va="center_baseline",
            transform=transform,
        )
        return [box, letter]
