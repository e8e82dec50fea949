# SPDX-License-Identifier: Apache-2.0
"""Timelines as figures of matplotlib, which authors can edit; ``.png`` and ``.pdf`` are written
from them.

The x axis is time, in the unit of the timeline. On the y axis a lane is 1 high. A length in pixels
is for a screen with 96 of them to the inch. matplotlib is an extra, imported when it is needed.
"""

from __future__ import annotations

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
from .dense import bands, envelope, is_dense
from .idle import critical, messages
from .labels import Look
from .scene import Lane, Scene, name
from .text_width import text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("paper", "light", "dark")
PAPER_WIDTH = 560.0  #: of the axes in the style "paper": a page of a paper is about 7 inches wide
HEADING, MARGIN = 90.0, 230.0  #: pixels above a scene, and beside the lanes
WIDER = 1.12  #: how much wider than ``text_width`` the letters of matplotlib are
CURVE, GAP = 0.45, 0.16  #: the height of a memory curve, and of the space below a lane


class _Frame(NamedTuple):
    """What all parts of a plot share."""

    axes: Axes
    look: Look
    colours: dict[str, str]
    scale: float  # pixels per unit of time
    lane: float  # pixels of a lane
    pitch: float  # from one lane to the next
    notes: bool  # figures above and beside the lanes

    def write(
        self, content: str, x: float, y: float, offset: tuple[float, float], **letters: Any
    ) -> None:
        """Write a text so many points from a place: a share of the width, and a lane."""
        options = {"fontsize": 8, "color": self.colours["faint"], "va": "bottom", **letters}
        self.axes.annotate(
            content,
            (x, y),
            offset,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            annotation_clip=False,
            **options,
        )


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
    """The scenes as a ``.png`` or ``.pdf``."""
    figure = load("matplotlib.figure").Figure()
    plot(scenes, look, "dark" if look.dark else "light", figure=figure)
    return figure_bytes(figure, suffix)


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """A figure as a file, the same bytes each time; a PDF contains its fonts."""
    file = BytesIO()
    options: Any = {"metadata": {"CreationDate": None}} if suffix == ".pdf" else {"dpi": 192}
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
    lane = page.lane_height(scenes)
    between = HEADING / lane
    pitch = 1 + GAP + (CURVE if page.has_curves(scenes, look) else 0)
    high = sum(len(scene.lanes) for scene in scenes) * pitch + between * (len(scenes) - 1)
    if axes is None:
        width = page.natural_width(scenes) if look.width is None else look.width - MARGIN
        width = min(width, PAPER_WIDTH) if style == "paper" else max(width, 60.0)
        axes = _new_axes(figure or load("matplotlib.pyplot").figure(), width, high * lane, colours)
    box = axes.get_window_extent()
    width, height = (96 * side / axes.figure.dpi for side in (box.width, box.height))
    end = max(scene.total for scene in scenes) or 1.0
    frame = _Frame(axes, look, colours, width / end, height / high, pitch, style != "paper")
    y, ticks = 0.0, {}
    for scene in scenes:
        _heading(frame, scene, y, width)
        _lines(frame, scene, y)
        for rank, lane_ in enumerate(scene.lanes):
            _lane(frame, scene, lane_, y)
            ticks[y + 0.5] = f"rank {rank}"
            y += pitch
        y += between
    axes.set_xlim(0, end)
    axes.set_ylim(high, 0)
    axes.set_yticks(list(ticks), list(ticks.values()))
    _axis(frame, scenes[0].unit)
    _legend(frame, scenes, width, height)
    return axes


def _new_axes(figure: Figure, width: float, height: float, colours: dict[str, str]) -> Axes:
    """Axes of so many pixels, with space around them."""
    wide, high = width + MARGIN, height + 2 * HEADING
    figure.set_size_inches(wide / 96, high / 96)
    figure.set_facecolor(colours["paper"])
    return figure.add_axes((0.3 * MARGIN / wide, HEADING / high, width / wide, height / high))


def _axis(f: _Frame, unit: str) -> None:
    f.axes.set_facecolor(f.colours["paper"])
    f.axes.set_xlabel(f"time in {unit}" if unit else "time", color=f.colours["faint"], fontsize=8)
    f.axes.tick_params(length=0, labelsize=8, colors=f.colours["faint"])
    f.axes.tick_params(axis="y", labelsize=9, labelcolor=f.colours["ink"])
    f.axes.grid(axis="x", color=f.colours["line"], linewidth=0.6)
    f.axes.set_axisbelow(True)
    f.axes.spines[:].set_visible(False)


def _heading(f: _Frame, scene: Scene, y: float, width: float) -> None:
    """The title above the first lane, and the figures below it."""
    notes = [labels.figures(scene), labels.idle(scene)] if f.notes else []
    lines = [line for note in notes for line in page.wrapped(note, 12, width)]
    title = "\n".join(page.wrapped(labels.title(scene), 18, width))
    above = 6 + 11 * len(lines)
    f.write(title, 0, y, (0, above), fontsize=11, fontweight="bold", color=f.colours["ink"])
    f.write("\n".join(lines), 0, y, (0, 5))


# ---- lanes ----
def _lane(f: _Frame, scene: Scene, lane: Lane, y: float) -> None:
    """The idle times and the actions of a rank, what it holds, and what its link carries."""
    if f.notes:
        f.write(labels.figures_of(lane, scene), 1, y + 0.5, (6, 0), va="center")
    dense = is_dense(scene, f.scale)
    if dense:
        edges, found = bands(lane, scene, f.scale)
        for colour, heights in found:
            tops = [y + 1 - height for height in [*heights, *heights[-1:]]]
            f.axes.fill_between(edges, tops, y + 1, step="post", color=f.colours[colour], lw=0)
    else:
        _bars(f, scene, lane, y)
    if f.pitch > 1 + GAP and lane.curve and lane.bars:
        curve = envelope(lane.curve, 2 / f.scale) if dense else lane.curve
        times, amounts = zip(*curve, (lane.bars[-1].end, curve[-1][1]), strict=True)
        foot, most = y + 1 + CURVE, scene.peak or 1.0
        tops = [foot - (CURVE - 0.06) * max(amount, 0.0) / most for amount in amounts]
        colour = f.colours["curve"]
        f.axes.fill_between(times, tops, foot, step="post", color=colour, alpha=0.3, lw=0)
        f.axes.step(times, tops, where="post", color=colour, lw=0.6)
    strips = [(start, end - start) for start, end, _ in lane.carried]
    f.axes.broken_barh(strips, (y + 0.9, 0.1), color=f.colours["ink"], lw=0)


def _bars(f: _Frame, scene: Scene, lane: Lane, y: float) -> None:
    """Rectangles of one colour and height are one collection, and so are equal names."""
    rectangles: defaultdict[tuple[str, float, float], list[tuple[float, float]]]
    names: defaultdict[tuple[str, float, str], list[tuple[float, float]]]
    rectangles, names = defaultdict(list), defaultdict(list)
    for gap in lane.gaps:
        rectangles[gap.cause, y, 1.0].append((gap.start, gap.end - gap.start))
    detail, fitting = page.label_size([scene], f.scale / WIDER)
    for bar in lane.bars:
        height, long = 1 / len(bar.colours), bar.end - bar.start
        for k, (part, colour) in enumerate(zip(bar.action.parts, bar.painted, strict=True)):
            top = y + k * height
            rectangles[colour, top, height].append((bar.start, long))
            label, size = name(part, detail), min(fitting, height * f.lane - 2)
            if label and size >= 6.5 and WIDER * text_width(label, size) <= long * f.scale:
                place = bar.start + long / 2, top + height / 2
                names[label, 0.75 * size, ink(f.colours[colour])].append(place)
    edge = {"edgecolor": f.colours["paper"], "lw": min(0.5, scene.cell * f.scale / 16)}
    for (colour, top, height), spans in rectangles.items():
        f.axes.broken_barh(spans, (top, height), facecolor=f.colours[colour], **edge)
    for (label, size, colour), places in names.items():
        _stamp(f.axes, label, size, colour, places)


def _stamp(
    axes: Axes, content: str, size: float, colour: str, places: Sequence[tuple[float, float]]
) -> None:
    """Write a short text at many places, by its outline: thousands of texts take half a minute."""
    affine = load("matplotlib.transforms").Affine2D
    outline = load("matplotlib.textpath").TextPath((0, 0), content, size=size)
    box = outline.get_extents()
    centred = outline.transformed(affine().translate(-box.x0 - box.width / 2, -0.36 * size))
    stamps = load("matplotlib.collections").PathCollection(
        [centred], offsets=places, offset_transform=axes.transData, facecolor=colour, lw=0
    )
    stamps.set_transform(affine().scale(1 / 72) + axes.figure.dpi_scale_trans)
    axes.add_collection(stamps)


def _lines(f: _Frame, scene: Scene, y: float) -> None:
    """Messages and the critical path."""
    xs: list[float] = []
    ys: list[float] = []
    if f.look.messages and not is_dense(scene, f.scale):
        for first, rank, then, other in messages(scene.lanes):
            if first.end <= then.start:
                below, above = (y + max(rank, other) * f.pitch, y + min(rank, other) * f.pitch + 1)
                xs += [first.end, then.start, nan]
                ys += [*((above, below) if rank < other else (below, above)), nan]
    f.axes.plot(xs, ys, color=f.colours["message-line"], lw=0.5, alpha=0.75)
    chain = critical(scene.lanes) if f.look.critical else []
    bars = [(scene.lanes[rank].bars[k], y + rank * f.pitch + 0.93) for rank, k in chain]
    points = [(time, at) for bar, at in bars for time in (bar.start, bar.end)]
    f.axes.plot(*zip(*points, strict=True), color=f.colours["mark"], lw=1.6)


def _legend(f: _Frame, scenes: Sequence[Scene], width: float, height: float) -> None:
    """The legend below the axis, in as many columns as fit."""
    patch, line = load("matplotlib.patches").Patch, load("matplotlib.lines").Line2D
    dense = all(is_dense(scene, f.scale) for scene in scenes)
    entries = [*labels.legend(scenes, f.look, dense)]
    handles = []
    for colours, _, high in entries:
        swatches = [
            patch(color=f.colours[colour]) if high > 0.2 else line([], [], color=f.colours[colour])
            for colour in colours
        ]
        handles.append(tuple(swatches) or patch(alpha=0))
    texts = [entry.text for entry in entries]
    widest = max(text_width(text, 11) for text in [*texts, ""])
    f.axes.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(0, -42 / height),
        borderaxespad=0,
        borderpad=0,
        ncols=max(int(width // (40 + widest)), 1),
        frameon=False,
        fontsize=8,
        labelcolor=f.colours["ink"],
        handler_map={tuple: load("matplotlib.legend_handler").HandlerTuple(None, pad=0)},
    )


# ---- bubble against memory ----
def frontier(points: Iterable[tuple[str, float, float, bool]], suffix: str) -> bytes:
    """A ``.png`` or ``.pdf`` of bubble against memory.

    A point is a name, a memory, a bubble, and whether no other one has less of both.
    """
    names: defaultdict[tuple[float, float, bool], list[str]] = defaultdict(list)
    for label, *place in points:
        names[tuple(place)].append(label)
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
