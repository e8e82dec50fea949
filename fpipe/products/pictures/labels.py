# SPDX-License-Identifier: Apache-2.0
"""Numbers, short phrases and the entries of legends: all pictures have the same ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from itertools import compress, groupby
from typing import TypeAlias

from ...actions import KINDS, Action, counted, number
from .scene import (
    ABSENT,
    CAUSES,
    SAME,
    Bar,
    Look,
    Scene,
    Scenes,
    has_curves,
    has_fused,
    tint,
)


def percent(share: float) -> str:
    """A share as a percentage with one decimal where it has one.

    >>> percent(0.0), percent(3 / 11)
    ('0%', '27.3%')
    """
    return f"{round(100 * share, 1) or 0:g}%"


def held(amount: float, scene: Scene) -> str:
    """What a rank holds: bytes with a prefix, anything else as a number."""
    return size_text(amount) if scene.unit == "bytes" else number(amount)


def size_text(nbytes: float) -> str:
    """Bytes for people.

    >>> size_text(10), size_text(3 << 19)
    ('10 B', '1.5 MiB')
    """
    unit, *larger = "B", "KiB", "MiB", "GiB"
    while larger and abs(nbytes) >= 1024:
        nbytes /= 1024
        unit = larger.pop(0)
    return f"{nbytes:.{int(unit != 'B')}f} {unit}"


def aligned(rows: Iterable[Iterable[object]], gap: str = "  ") -> list[str]:
    """The lines of a table below its head, each column as wide as its widest cell; those of numbers
    end at the right.

    >>> aligned([["name", "double"], ["a", 40]])
    ['name  double', 'a         40']
    """
    columns = []
    for column in zip(*rows, strict=True):
        cells = list(map(str, column))
        pad = str.rjust if is_numbers(cells[1:]) else str.ljust
        wide = max(map(len, cells))
        columns.append([pad(cell, wide) for cell in cells])
    return [gap.join(row).rstrip() for row in zip(*columns, strict=True)]


def is_numbers(cells: Iterable[str]) -> bool:
    """Whether all cells are numbers, shares or sizes, or empty.

    >>> is_numbers(["3%", "1.5 MiB", ""]), is_numbers(["1F1B"])
    (True, False)
    """
    return all(re.fullmatch(r"[-+\d.,]*([%x]| [KMG]?i?B)?[*! ]?", cell) for cell in cells)


def time(value: float, scene: Scene) -> str:
    """A number with the unit of time, if the scene has one."""
    return f"{number(value)} {scene.timeline.unit}".rstrip()


def title(scene: Scene) -> str:
    """``ZBV: 4 ranks, 8 microbatches``."""
    other = f" against {scene.against.name}" if scene.against else ""
    count = scene.timeline.slices
    slices = f" of {counted(count, 'slice')}" if count > 1 else ""
    sizes = f"{counted(len(scene.lanes), 'rank')}, {counted(scene.microbatches, 'microbatch')}"
    return f"{scene.name}{other}: {sizes}{slices}"


def facts(scene: Scene) -> list[tuple[str, str]]:
    """The figures of a scene by name, each with its change from the scene it is compared with."""
    texts = {
        "total": time(scene.total, scene),
        "bubble": percent(scene.timeline.bubble),
        "peak": held(scene.peak, scene),
    }
    if scene.unit != "bytes":
        texts["peak"] = re.sub("^(1 microbatch)es$", r"\1", f"{texts['peak']} {scene.unit}")
    if was := scene.against:
        for name in ("total", "peak"):
            now = getattr(scene, name)
            before = getattr(was, name)
            if before not in (0, now):
                texts[name] += f" ({(now / before - 1) * 100:+.1f}%)"
        change = scene.timeline.bubble - was.timeline.bubble
        texts["bubble"] += f" ({100 * change:+.1f} points)"
    return list(texts.items())


def figures_of(scene: Scene) -> list[str]:
    """``bubble 12.5%, peak 4`` by rank, without what is the same for all, which the header has."""
    rows = [
        (f"bubble {percent(lane.bubble)}", f"peak {held(lane.peak, scene)}") for lane in scene.lanes
    ]
    differ = [len({*column}) > 1 for column in zip(*rows, strict=True)]
    return [", ".join(compress(row, differ)) for row in rows]


def notes(scene: Scene) -> Iterator[str]:
    """The lines about a scene: what has changed, what the bubble is, by cause, and what the units
    are.
    """
    t = scene.timeline
    if scene.against:
        steps = [tint(bar.shift, scene.reach) for bar in scene.bars]
        earlier = sum(step < SAME for step in steps)
        later = sum(SAME < step < ABSENT for step in steps)
        changes = f"{earlier} of {counted(len(steps), 'action')} end earlier, {later} later"
        yield f"{changes}{_ends(scene, scene.against)}."
    yield from t.note.splitlines()
    parts = [
        f"{CAUSES[cause]} {percent(share)}" for cause, share in scene.idle.items() if share > 5e-4
    ]
    if parts:
        yield f"{BUBBLE}: {', '.join(parts)}."
    elif t.total > t.span and not scene.against:
        yield NO_BUBBLE
    yield units(scene)


def _ends(*pair: Scene) -> str:
    """How much earlier or later each rank ends in the first scene than in the other one."""
    ends = [[max(row, default=0.0) for row in scene.timeline.ends] for scene in pair]
    if not len(ends[0]) == len(ends[1]) <= 16:
        return ""
    shifts = [round(now - was, 9) for now, was in zip(*ends, strict=True)]
    runs = groupby(shifts, lambda shift: "later" if shift > 0 else "earlier")
    texts = [", ".join(time(abs(by), pair[0]) for by in run) + f" {way}" for way, run in runs]
    return f"; ranks end {', '.join(texts)}" if any(shifts) else ""


def summary(scene: Scene, mark: str = "gap", most: int = 0) -> Iterator[str]:
    """The lines above a picture: its figures, such as ``total 25.5, bubble 0%, peak 4
    microbatches``, and what is not drawn, at ``mark``. The peaks of up to ``most`` ranks are
    listed, for pictures that have none beside the lanes.
    """
    text = ", ".join(map(" ".join, facts(scene)))
    peaks = [held(lane.peak, scene) for lane in scene.lanes]
    if len(set(peaks)) > 1 and len(peaks) <= most:
        text += f", by rank: {', '.join(peaks)}"
    yield text
    if fold := scene.fold:
        yield (
            f"Not drawn ({mark}): {counted(fold.microbatches, 'microbatch')} of the steady state, "
            f"from {number(fold.start)} to {time(fold.end, scene)}; "
            "--full, or full=True, draws all."
        )


def units(scene: Scene) -> str:
    """What the times are: their unit, and what a stage takes, if all stages take the same."""
    t = scene.timeline
    count = max(len(t.placement.stages_of(rank)) for rank in range(t.ranks))
    stages = "A rank's stage" if count == 1 else f"Each of a rank's {count} stages"
    times: defaultdict[str, set[str]] = defaultdict(set)
    for bar in scene.bars:
        if isinstance(bar.action, Action):
            times[bar.action.op].add(number(bar.end - bar.start))
    lengths = ", ".join(f"{op} {min(times[op])}" for op in scene.ops if op in times)
    whole = {number(busy / t.microbatches) for busy in t.busy if count > 1}
    if not lengths or any(len(taken) > 1 for taken in (whole, *times.values())):
        return f"Times are in {t.unit or 'the unit of the costs'}."
    if whole:
        lengths += f": {min(whole)} in all for a microbatch"
    return f"{stages} takes {lengths}{t.unit and ', in '}{t.unit}."


def hint(bar: Bar, scene: Scene) -> str:
    """What is known of a bar: its times, what it waited for, and how much earlier or later it ends
    than in the timeline that the scene is compared with.
    """
    text = f"{bar.action}: {number(bar.start)} to {time(bar.end, scene)}"
    if bar.wait and bar.wait.time > 0:
        rank, position, length = bar.wait
        before = scene.timeline.rows[rank][position]
        text += f", waited {number(length)} for {before} of rank {rank}"
    if not scene.against:
        return text
    if bar.shift is None:
        than = "not"
    elif not bar.shift:
        than = "as"
    else:
        than = f"{time(abs(bar.shift), scene)} {'later' if bar.shift > 0 else 'earlier'} than"
    return f"{text}; {than} in {scene.against.name}"


def with_code(line: str) -> str:
    """The HTML of a line.

    >>> with_code("fpipe.balance([3, 4], 2).cuts proposes <cuts>.")
    '<code>fpipe.balance([3, 4], 2).cuts</code> proposes &lt;cuts&gt;.'
    """
    return re.sub(
        r'schedule=".*?"|(?:\w+ ?= ?)?fpipe\.\w+\((?:[^()]|\([^()]*\))*\)(?:\.\w+)?',
        r"<code>\g<0></code>",
        escape(line, False),
    )


# ---- legends ----
BUBBLE = "Bubble by cause"
NO_BUBBLE = "No bubble: ranks are idle only before their first and after their last action."
PALER = "paler: other stages"
#: what a name in a bar is, by the detail of names
NAMES = ("0: microbatch", "F0: F of microbatch 0", "1F0: F of microbatch 0 on stage 1")
SMALL = "small letters: a rank's other stage"
Entry: TypeAlias = tuple[tuple[str, ...], str]  #: colours side by side, and their meaning


def kinds(scenes: Scenes, merged: bool) -> Iterator[Entry]:
    """The kinds of work that occur, and the next paler shade of each, unless ``merged``."""
    used = {key[0] + "0" if merged else key for scene in scenes for key in scene.colours}
    paler: list[str] = []
    for op, kind in KINDS.items():
        first, *others = sorted(key for key in used if key[0] == op) or [""]
        if first:
            yield (first,), kind.name
        paler += others[:1]
    if paler:
        yield tuple(paler), paler_stages(scenes)


def paler_stages(scenes: Scenes) -> str:
    """Which stages are paler, by number where they are those after the first one of each rank."""
    texts: set[str] = set()
    for scene in scenes:
        path, *others = scene.timeline.placement.paths
        ranks = len(scene.lanes)
        if scene.shades > 1:
            is_range = not others and len({*path[:ranks]}) == ranks < len(path) - 1
            texts.add(f"paler: stages {ranks}-{len(path) - 1}" if is_range else PALER)
    return texts.pop() if len(texts) == 1 else PALER


def tints(scenes: Scenes, below: str = "") -> Iterator[Entry]:
    """The colours of scenes that are compared with another one, and what all of them are. Below
    the rows of plain text, which have a name such as ``earlier``, the least of earlier is first.
    """
    last = scenes[-1]
    if not last.against:
        return
    ends = below or "earlier or later"
    others = " (I and W as B)" * (last.ops != last.against.ops)
    yield (), f"{ends} than in {last.against.name}{others}:"
    found = {int(key[1:]) for scene in scenes if scene.against for key in scene.colours}
    for key in sorted(found, key=lambda key: -key if below and key < SAME else key):
        step = abs(key - SAME)
        low = last.reach * (step - 1) / 4
        span = f"{number(low)} to {time(low + last.reach / 4, last)}"
        if step == 4:
            span = f"{time(low, last)} or more"
        way = "later" if key > SAME else "earlier"
        meaning = f"{span} {way}".removesuffix(f" {below}")
        yield (f"t{key}",), {SAME: "at the same time", ABSENT: "not there"}.get(key, meaning)


def legend(scenes: Scenes, look: Look, dense: bool, detail: int = 0) -> Iterator[Entry]:
    """The legend of a picture; in a ``dense`` one shares of time are drawn instead of
    actions. ``detail`` is that of the names in bars, 0 if there are none.
    """
    if scenes[-1].against:
        yield (), f"{scenes[0].name}:"
    yield from kinds(scenes, dense)
    if not dense and has_fused(scenes):
        yield ("F0", "B0"), "fused"
    yield from tints(scenes)
    for cause, text in CAUSES.items():
        if any(cause in scene.idle for scene in scenes):
            yield (cause,), f"idle: {text}"
    if has_curves(scenes, look):
        yield ("curve",), "memory held"
    if dense:
        yield (), "height: share of the time"
    elif detail > 1 and scenes[-1].against:  # tints say when actions end, letters what they are
        texts = ["letters:", naming(scenes, detail), *uncoloured(scenes)]
        texts += [SMALL] * any(scene.against and scene.shades == 2 for scene in scenes)
        yield from (((), text) for text in texts)
    elif detail:
        yield (), naming(scenes, detail)


def uncoloured(scenes: Scenes) -> list[str]:
    """The kinds of work whose actions all have the colours of a comparison."""
    coloured = {key[0] for scene in scenes for key in scene.colours}
    return [f"{op} {KINDS[op].name}" for op in scenes[-1].ops if op not in coloured]


# ---- names of actions ----
def naming(scenes: Scenes, detail: int) -> str:
    """What a name in a bar is, as an example."""
    sliced = scenes[0].timeline.slices > 1
    return "0.1: slice 1 of microbatch 0" if sliced else NAMES[detail - 1]


def name(part: Action, detail: int) -> str:
    """An action's name: 3 in full (``3F2``), 2 without its stage (``F2``), 1 what follows its
    letter, 0 nothing.

    >>> [name(Action(3, "F", 2), detail) for detail in (3, 2, 1, 0)]
    ['3F2', 'F2', '2', '']
    """
    text = str(part)
    short = text.lstrip("0123456789")
    return (text, short, short[1:], "")[3 - detail]


def short_names(scenes: Scenes, detail: int) -> set[str]:
    """The names of the bars that are about as short as the ``cell`` of a scene; at least one."""
    return {
        name(part, detail)
        for scene in scenes
        for bar in scene.bars
        if bar.end - bar.start < 1.5 * scene.cell
        for part in bar.action.parts
    } or {""}


def widest_name(scenes: Scenes, detail: int) -> float:
    """The width of the widest of :func:`short_names` and of the space beside it, in units of the
    size of its letters. Full names have more space: numbers alone are the other choice.
    """
    return MARGIN[detail] + max(text_width(text, 1.0) for text in short_names(scenes, detail))


# ---- letters ----
MARGIN = (0.3, 0.3, 0.3, 0.7)  #: beside a name, by detail, in units of the size of its letters
_CAPITAL = 7.0  #: height of capitals
_SPACING = 1.5  #: between letters
_OTHER = 3.6  #: width of a character that is not listed
#: by line a width, and the characters that have it
_WIDTHS = """
0.6 '!
0.8 il.,:;
1.2 j
1.4 ()[]
2.3 r
2.4 Ift-
2.8 /*
3.0 J
3.3 s
3.4 c?<>
3.5 kz
3.6 hnux
3.8 Labdegpqvy+=_
3.9 F
4.0 Eo
4.2 0123456789
4.3 PS
4.4 B
4.5 KRZ
4.6 HNUXY#
4.8 ACDTV
5.0 G&
5.4 Mw
5.6 OQ%
5.8 m
6.6 W
"""
_LINES = [line.split() for line in _WIDTHS.strip().splitlines()]
_WIDTH = {char: float(width) for width, chars in _LINES for char in chars} | {" ": 1.6}


def text_width(text: str, size: float) -> float:
    """The width of ``text`` in letters of ``size``, whose capitals are 0.72 of that high.

    >>> text_width("11", 10) == 2 * text_width("1", 10)
    True
    """
    scale = 0.72 * size / _CAPITAL
    return sum(_WIDTH.get(char, _OTHER) + _SPACING for char in text) * scale


def wrapped(text: str, size: float, space: float) -> Iterator[str]:
    """The lines of a text that fit the space."""
    line = ""
    for word in text.split(" "):
        if line and text_width(f"{line} {word}", size) > space:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line
