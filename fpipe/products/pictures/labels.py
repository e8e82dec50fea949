# SPDX-License-Identifier: Apache-2.0
"""Numbers and short phrases: all pictures write them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...actions.text import counted, number
from .colours import NAMES
from .difference import ABSENT, SAME
from .idle import CAUSES
from .lanes import Lane
from .scene import Scene


def percent(share: float) -> str:
    """A share as a percentage with one decimal where it has one.

    >>> percent(0.0), percent(3 / 11)
    ('0%', '27.3%')
    """
    text = f"{100 * share:.1f}"
    return (text[:-2] if text.endswith(".0") else text).replace("-0", "0") + "%"


def held(amount: float, unit: str) -> str:
    """What a rank holds: bytes with a prefix, anything else as a number.

    >>> held(3 * 2**20, "bytes"), held(4.5, "A")
    ('3.0 MiB', '4.5')
    """
    if unit != "bytes":
        return number(amount)
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or prefix == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if prefix == "B" else f"{amount:.1f} {prefix}"


def title(scene: Scene) -> str:
    """``ZBV: 4 ranks, 8 microbatches``."""
    name = (scene.name or "schedule") + (
        f" against {scene.against.name or 'schedule'}" if scene.against else ""
    )
    slices = f" of {counted(scene.slices, 'slice')}" if scene.slices > 1 else ""
    return (
        f"{name}: {counted(len(scene.lanes), 'rank')}, "
        f"{counted(scene.microbatches, 'microbatch')}{slices}"
    )


def time(value: float, scene: Scene) -> str:
    """A number with the unit of time, if the scene has one."""
    return f"{number(value)} {scene.unit}" if scene.unit else number(value)


def facts(scene: Scene) -> list[tuple[str, str]]:
    """The figures of a scene by name."""
    times = [("total", time(scene.total, scene)), ("span", time(scene.span, scene))]
    peak = max((lane.peak for lane in scene.lanes), default=0.0)
    found = [*times, ("bubble", percent(scene.bubble)), ("peak", held(peak, scene.memory_unit))]
    if not scene.against:
        return found
    was = scene.against

    def change(now, before):
        return f" ({(now / before - 1) * 100:+.1f}%)" if before and now != before else ""

    peaks = max((lane.peak for lane in was.lanes), default=0.0)
    bubble = f" ({100 * (scene.bubble - was.bubble):+.1f} points)"
    changes = [
        change(scene.total, was.total),
        change(scene.span, was.span),
        bubble,
        change(peak, peaks),
    ]
    return [(word, value + more) for (word, value), more in zip(found, changes, strict=True)]


def figures(scene: Scene) -> str:
    """``total 51, span 48, bubble 0%, peak 8``: one line under a picture."""
    text = ", ".join(map(" ".join, facts(scene)))
    peaks = [held(lane.peak, scene.memory_unit) for lane in scene.lanes]
    each = f" (by rank {' '.join(peaks)})" if len(set(peaks)) > 1 and len(peaks) <= 16 else ""
    return (
        text + each + (f" (1 of its units drawn as {time(scene.one, scene)})" if scene.one else "")
    )


def shift(amount: float | None, scene: Scene) -> str:
    """How much earlier or later an action ends than in the timeline that a scene is compared
    with.
    """
    other = scene.against.name if scene.against else ""
    if amount is None:
        return f"not in {other}"
    word = "as" if not amount else "later than" if amount > 0 else "earlier than"
    return f"{time(abs(amount), scene) + ' ' if amount else ''}{word} in {other}"


def tints(scene: Scene) -> list[tuple[tuple[int, ...], str]]:
    """(tints, what they mean) of a scene that is compared with another one."""
    if not scene.against:
        return []
    bars = [bar for lane in scene.lanes for bar in lane.bars]
    used, shifts = (
        {bar.shades[0] for bar in bars},
        [bar.shift for bar in bars if bar.shift is not None],
    )
    other = scene.against.name or "the other"
    words = {
        (
            0,
            1,
            2,
            3,
        ): f"ends earlier than in {other}, by up to {time(-min(shifts, default=0.0), scene)}",
        (SAME,): f"as in {other}",
        (5, 6, 7, 8): f"later, by up to {time(max(shifts, default=0.0), scene)}",
        (ABSENT,): f"not in {other}",
    }
    return [(tints, word) for tints, word in words.items() if used & set(tints)]


def figures_of(lane: Lane, scene: Scene) -> str:
    """``bubble 12.5%, peak 4`` for one rank."""
    return f"bubble {percent(lane.bubble)}, peak {held(lane.peak, scene.memory_unit)}"


def note(scene: Scene) -> str:
    """What the numbers are: the units of time and memory, or what a stage takes of those of the
    cost model.
    """
    lengths = ", ".join(f"{op} {_range(*pair)}" for op, pair in scene.lengths.items())
    time_unit = f"Times in {scene.unit}" if scene.unit else "Times in units of the costs"
    stages = "the stage" if scene.stages == 1 else f"each of the {scene.stages} stages"
    takes = f": {stages} of a rank takes {lengths}" if lengths else ""
    low, high = scene.holds
    if scene.memory_unit == "bytes":
        memory = "Memory in bytes"
    else:
        whole = (
            number(low * scene.stages) == number(high * scene.stages) == "1"
        )  # all stages of a rank together
        memory = (
            f"Memory in {'microbatches' if whole else 'units of the costs'}: F adds "
            f"{_range(low, high)}"
        )
        memory = memory if high else ""
    return f"{time_unit}{takes}." + (f" {memory}." if memory else "")


def _range(low: float, high: float) -> str:
    return number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"


def idle(scene: Scene) -> str:
    """``Idle 13.6%: warm-up 9%, tail 4.6%``: shares of the time of all ranks."""
    parts = [f"{CAUSES[cause]} {percent(share)}" for cause, share in scene.idle.items()]
    return (
        f"Idle {percent(sum(scene.idle.values()))} of all ranks' time: {', '.join(parts)}."
        if parts
        else ""
    )


def legend(scenes: Sequence[Scene]) -> Iterator[tuple[str, str, int]]:
    """(op, its meaning, how many shades) for the ops that occur."""
    shades = max(scene.shades for scene in scenes)
    for op in dict.fromkeys(op for scene in scenes for op in scene.ops):
        yield op, NAMES[op], shades


def step_of(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, ...) that is at least ``least``.

    >>> step_of(3), step_of(0.04), step_of(51)
    (5.0, 0.05, 100.0)
    """
    power = 1.0
    while power > least > 0:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * k for k in (1, 2, 5, 10) if power * k >= least * (1 - 1e-9))
