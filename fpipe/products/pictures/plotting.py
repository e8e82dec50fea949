# SPDX-License-Identifier: Apache-2.0
"""Timelines as figures of matplotlib, which authors can edit; ``.png`` and ``.pdf`` are written
from them.

The x axis is time, in the unit of the timeline. On the y axis a lane is 1 high. A length in pixels
is for a screen with 96 of them to the inch. matplotlib is an extra, imported when it is needed.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import import_module
from io import BytesIO
from math import nan
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import FpipeError
from . import labels, page
from .colours import ink, palette
from .dense import bands, envelope
from .idle import messages
from .lanes import Lane
from .scene import Scene, name
from .shapes import Look
from .text_width import text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("paper", "light", "dark")
PAPER_WIDTH = 560.0  #: of the axes in the style "paper": a page of a paper is about 7 inches wide
POINT = 0.75  #: points in a pixel
WIDER = 1.12  #: how much wider than ``text_width`` the letters of matplotlib are
HEADING, MARGIN = 90.0, 230.0  #: pixels above a scene, and beside the lanes
CURVE, GAP = 0.45, 0.16  #: the height of a memory curve, and of the space below a lane


class _Frame(NamedTuple):
    """What all parts of a plot share."""

    axes: Axes
    look: Look
    colours: dict[str, str]
    scale: float  # pixels per unit of time
    lane: float  # pixels of a lane
    curve: float  # the height of a memory curve, in lanes
    style: str


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


def paint(scenes: Sequence[Scene], look: Look, suffix: str) -> bytes:
    """The timelines as a ``.png`` or ``.pdf``."""
    figure = load("matplotlib.figure").Figure()
    plot(scenes, look, "dark" if look.dark else "light", figure=figure)
    return figure_bytes(figure, suffix)


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """A figure as a file, the same bytes each time; a PDF contains its fonts."""
    file = BytesIO()
    options = {"metadata": {"CreationDate": None}} if suffix == ".pdf" else {"dpi": 192}
    with load("matplotlib").rc_context({"pdf.fonttype": 42}):
        figure.savefig(file, format=suffix[1:], bbox_inches="tight", pad_inches=0.15, **options)
    return file.getvalue()


def plot(
    scenes: Sequence[Scene],
    look: Look,
    style: str = "paper",
    axes: Axes | None = None,
    figure: Figure | None = None,
) -> Axes:
    """Draw scenes one over the other into ``axes``, or into new ones as large as they need.

    Raises:
        FpipeError: if there is no such style, or matplotlib is not installed.
    """
    if style not in STYLES:
        raise FpipeError(f"no style is called {style!r}; use {', '.join(STYLES)}")
    colours = palette(max(scene.shades for scene in scenes), style == "dark")
    if style == "paper":
        colours = {**colours, "ink": "#000000", "faint": "#333333"}
    curve = CURVE if look.memory and any(one.curve for s in scenes for one in s.lanes) else 0.0
    lane = page.lane_height(scenes)
    between = HEADING / lane
    rows = sum(len(scene.lanes) for scene in scenes) * (1 + curve + GAP)
    rows += between * (len(scenes) - 1)
    if axes is None:
        width = page.natural_width(scenes) if look.width is None else look.width - MARGIN
        width = min(width, PAPER_WIDTH) if style == "paper" else max(width, 60.0)
        figure = figure or load("matplotlib.pyplot").figure()
        axes = _axes(figure, width, rows * lane)
        figure.set_facecolor(colours["paper"])
    inches = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    end = max(scene.total for scene in scenes) or 1.0
    frame = _Frame(
        axes, look, colours, inches.width * 96 / end, inches.height * 96 / rows, curve, style
    )
    y, ticks = 0.0, {}
    for k, scene in enumerate(scenes):
        y += between if k else 0.0
        _heading(frame, scene, y)
        for rank, one in enumerate(scene.lanes):
            _lane(frame, scene, one, y)
            ticks[y + 0.5] = f"rank {rank}"
            y += 1 + curve + GAP
        _over(frame, scene, y - len(scene.lanes) * (1 + curve + GAP))
    _axis(frame, scenes, rows, ticks)
    _legend(frame, scenes, inches.width * 96, inches.height * 96)
    return axes


def _axes(figure: Figure, width: float, height: float) -> Axes:
    """Axes of so many pixels, with space around them."""
    wide, high = width + MARGIN, height + 2 * HEADING
    figure.set_size_inches(wide / 96, high / 96)
    return figure.add_axes((0.3 * MARGIN / wide, HEADING / high, width / wide, height / high))


def _axis(f: _Frame, scenes: Sequence[Scene], rows: float, ticks: dict[float, str]) -> None:
    axes, unit = f.axes, scenes[0].unit
    axes.set_facecolor(f.colours["paper"])
    axes.set_xlim(0, max(scene.total for scene in scenes) or 1.0)
    axes.set_ylim(rows, 0)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel(f"time in {unit}" if unit else "time", color=f.colours["faint"], fontsize=8)
    axes.tick_params(length=0, labelsize=8, colors=f.colours["faint"])
    axes.tick_params(axis="y", labelsize=9, labelcolor=f.colours["ink"])
    axes.grid(axis="x", color=f.colours["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _heading(f: _Frame, scene: Scene, y: float) -> None:
    """The title above the first lane, and in all styles but "paper" the figures below it."""
    across = round(f.axes.get_window_extent().width / f.axes.figure.dpi * 72 / 4.6)
    texts = [labels.figures(scene), labels.idle(scene)] if f.style != "paper" else []
    lines = [line for text in texts for line in textwrap.wrap(text, max(across, 30))]
    place = {"xy": (0, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    title = textwrap.fill(labels.title(scene), max(round(across * 0.75), 30))
    f.axes.annotate(
        title,
        xytext=(0, 6 + 11 * len(lines)),
        fontsize=11,
        fontweight="bold",
        color=f.colours["ink"],
        va="bottom",
        annotation_clip=False,
        **place,
    )
    f.axes.annotate(
        "\n".join(lines),
        xytext=(0, 5),
        fontsize=8,
        color=f.colours["faint"],
        va="bottom",
        annotation_clip=False,
        **place,
    )


def _lane(f: _Frame, scene: Scene, lane: Lane, y: float) -> None:
    """The idle times and the actions of a rank, what it holds, and what its link carries."""
    if f.style != "paper":
        f.axes.annotate(
            labels.figures_of(lane, scene),
            (1, y + 0.5),
            (6, 0),
            fontsize=8,
            va="center",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=f.colours["faint"],
            annotation_clip=False,
        )
    dense = page.is_dense(scene, f.scale)
    if dense:
        for key, points in bands(lane, scene, f.scale, f.lane):
            xs, ys = zip(*points, strict=True)
            f.axes.fill(
                [x / f.scale for x in xs], [y + up / f.lane for up in ys], f.colours[key], lw=0
            )
    else:
        _bars(f, scene, lane, y)
    if f.curve and lane.curve and lane.bars:
        most = max(one.peak for one in scene.lanes)
        held = envelope(lane.curve, 2 / f.scale) if dense else lane.curve
        foot, end = y + 1 + f.curve, lane.bars[-1].end
        times, amounts = zip(*held, (end, held[-1][1]), strict=True)
        tops = [foot - (f.curve - 0.06) * max(amount, 0.0) / (most or 1.0) for amount in amounts]
        colour = f.colours["curve"]
        f.axes.fill_between(times, tops, foot, step="post", color=colour, alpha=0.3, lw=0)
        f.axes.step(times, tops, where="post", color=colour, lw=0.6)
    strips = [(start, end - start) for start, end, _ in lane.carried]
    f.axes.broken_barh(strips, (y + 0.9, 0.1), color=f.colours["ink"], lw=0)


def _bars(f: _Frame, scene: Scene, lane: Lane, y: float) -> None:
    pieces: defaultdict[tuple[str, float, float], list[tuple[float, float]]] = defaultdict(list)
    for gap in lane.gaps:
        pieces[gap.cause, y, 1.0].append((gap.start, gap.end - gap.start))
    names: defaultdict[tuple[str, str, float], list[tuple[float, float]]] = defaultdict(list)
    detail, size = page.label_size([scene], scene.cell * f.scale / WIDER)
    for bar in lane.bars:
        height = 1 / len(bar.shades)
        for k, (part, shade) in enumerate(zip(bar.action.parts, bar.shades, strict=True)):
            key, top = scene.key(part.op, shade), y + k * height
            pieces[key, top, height].append((bar.start, bar.end - bar.start))
            label, high = name(part, detail), min(size, height * f.lane - 2)
            if WIDER * text_width(label, high) <= (bar.end - bar.start) * f.scale:
                colour = ink(f.colours[key])
                names[label, colour, high].append(((bar.start + bar.end) / 2, top + height / 2))
    edge = min(0.5, scene.cell * f.scale / 16)
    for (key, top, height), spans in pieces.items():
        f.axes.broken_barh(
            spans, (top, height), facecolor=f.colours[key], edgecolor=f.colours["paper"], lw=edge
        )
    for (label, colour, size), places in names.items():
        if label and size >= 6.5:
            _stamp(f.axes, label, size * POINT, colour, places)


def _stamp(
    axes: Axes, text: str, size: float, colour: str, places: Sequence[tuple[float, float]]
) -> None:
    """A short text at many places: outlines, since thousands of texts take half a minute."""
    transforms = load("matplotlib.transforms")
    outline = load("matplotlib.textpath").TextPath((0, 0), text, size=size)
    middle = outline.get_extents()
    centred = outline.transformed(
        transforms.Affine2D().translate(-middle.width / 2 - middle.x0, -0.36 * size)
    )
    stamps = load("matplotlib.collections").PathCollection(
        [centred], offsets=places, offset_transform=axes.transData, facecolors=colour, linewidths=0
    )
    points = transforms.Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    stamps.set_transform(points)
    axes.add_collection(stamps)


def _over(f: _Frame, scene: Scene, y: float) -> None:
    """Lines over the lanes: messages, and the critical path."""
    pitch, bars = 1 + f.curve + GAP, [lane.bars for lane in scene.lanes]
    xs: list[float] = []
    ys: list[float] = []
    sent = messages(scene.lanes) if f.look.messages and not page.is_dense(scene, f.scale) else ()
    for rank, k, other, at in sent:
        if bars[rank][k].end <= bars[other][at].start:
            xs += [bars[rank][k].end, bars[other][at].start, nan]
            ys += [y + rank * pitch + (rank < other), y + other * pitch + (rank > other), nan]
    f.axes.plot(xs, ys, color=f.colours["message-line"], lw=0.5, alpha=0.75)
    if f.look.critical:
        path = [(bars[rank][k], y + rank * pitch + 0.93) for rank, k in scene.critical]
        xs = [time for bar, _ in path for time in (bar.start, bar.end)]
        f.axes.plot(xs, [at for _, at in path for _ in "ab"], color=f.colours["mark"], lw=1.6)


def _legend(f: _Frame, scenes: Sequence[Scene], width: float, height: float) -> None:
    """The legend below the axis, in as many columns as fit."""
    patch, line = load("matplotlib.patches").Patch, load("matplotlib.lines").Line2D
    handles, texts = [], []
    for swatches, text in page.legend_items(scenes, f.look, f.scale):
        thin = swatches and swatches[0][1] < 0.3
        colours = [f.colours[key] for key, _, _ in swatches]
        handles.append(
            tuple(
                line([], [], color=colour, lw=1.6) if thin else patch(facecolor=colour)
                for colour in colours
            )
            or patch(alpha=0)
        )
        texts.append(text)
    columns = int(width // (40 + max(text_width(text, 8 / POINT) for text in [*texts, ""])))
    f.axes.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(0, -42 / height),
        borderaxespad=0,
        borderpad=0,
        ncols=max(columns, 1),
        frameon=False,
        fontsize=8,
        labelcolor=f.colours["ink"],
        handler_map={tuple: load("matplotlib.legend_handler").HandlerTuple(ndivide=None, pad=0)},
    )


def frontier(points: Iterable[tuple[str, float, float, bool]], suffix: str) -> bytes:
    """A ``.png`` or ``.pdf`` of bubble against memory.

    A point is a name, a memory, a bubble, and whether no other one has less of both.
    """
    names: defaultdict[tuple[float, float, bool], list[str]] = defaultdict(list)
    for name_, memory, bubble, best in points:
        names[memory, bubble, best].append(name_)
    figure = load("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes, colours = figure.subplots(), palette(1)
    for k, (memory, bubble, best) in enumerate(sorted(names, key=itemgetter(1, 0))):
        colour = colours["curve"] if best else colours["faint"]
        axes.plot(memory, bubble, "o", color=colour, markersize=5 if best else 3.5)
        axes.annotate(
            ", ".join(names[memory, bubble, best]),
            (memory, bubble),
            (4, -9 if k % 2 else 3),  # neighbours of one height are not over one another
            textcoords="offset points",
            fontsize=7,
            color=colours["ink"] if best else colours["faint"],
        )
    best_ones = sorted((memory, bubble) for memory, bubble, best in names if best)
    axes.plot(*zip(*best_ones, strict=True), color=colours["curve"], lw=1)
    axes.set_title("bubble against memory", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("memory that a rank holds")
    axes.set_ylabel("bubble")
    axes.yaxis.set_major_formatter(load("matplotlib.ticker").PercentFormatter(1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure_bytes(figure, suffix)
