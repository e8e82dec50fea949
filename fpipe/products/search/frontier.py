# SPDX-License-Identifier: Apache-2.0
"""Bubble against memory: named schedules beside those of the solver under several limits, as text
and as a drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ... import Costs
from ...actions import number
from ...errors import ScheduleError
from ...generators import in_bytes
from .comparison import Entry, entry_of
from .solve import Kind, solve

SHARES = (
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
)  #: of the memory of 1F1B, for which the solver is asked where no limit is given


class Point(NamedTuple):
    """A schedule in the picture."""

    name: str
    memory: float
    bubble: float
    best: bool  #: no other one has less of both


def solved_entries(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | str | None,
    seconds: float,
    note: Callable[[Sequence[float]], Iterator[float]] = iter,
) -> list[Entry]:
    """The solver's schedules for a rank's whole share in one stage and in two, under the limit or
    under several.
    """
    kinds: tuple[tuple[Kind, int], ...] = (("one", 1), ("V", 2))
    share = costs.memory(1)["F"][0]
    limits = [share * ranks * part for part in SHARES] if memory is None else [in_bytes(memory)]
    entries = []
    for limit in note(limits):
        for placement, per_rank in kinds:
            try:
                found = solve(
                    costs.scaled(1 / per_rank),
                    ranks,
                    microbatches,
                    placement,
                    stages=per_rank * ranks,
                    memory=limit,
                    time_limit=seconds / len(limits) / 2,
                    progress=False,
                )
            except ScheduleError:  # a microbatch does not fit
                continue
            entries.append(entry_of(f"Solved {placement} {number(limit)}", found, costs))
    return entries


def points(entries: Sequence[Entry]) -> list[Point]:
    """Where schedules stand, the least memory first."""

    def least(entry: Entry) -> bool:
        return not any(
            other.memory <= entry.memory * (1 + 1e-9)
            and other.bubble <= entry.bubble + 1e-9
            and (other.memory < entry.memory * (1 - 1e-9) or other.bubble < entry.bubble - 1e-9)
            for other in entries
        )

    found = [Point(entry.name, entry.memory, entry.bubble, least(entry)) for entry in entries]
    return sorted(found, key=lambda point: (point.memory, point.bubble))


def text(entries: Sequence[Entry], width: int = 64, height: int = 12) -> str:
    """The picture as text: letters are schedules, capital ones those that none is better than in
    both.

    >>> from .comparison import compare
    >>> three = [entry for entry in compare(4, 8)[0] if entry.name in ("InterleavedZeroBubble",
    ...     "ZBH2", "ZB2P")]
    >>> print(text(three, width=30, height=4))
    bubble against memory
      5.88% |A
            |
            |
      0.00% |                      B      c
            +------------------------------
             4                            8
    A InterleavedZeroBubble  B ZBH2  c ZB2P
    """
    found = points(entries)
    low, high = min(p.memory for p in found), max(p.memory for p in found)
    top = max(max(p.bubble for p in found), 1e-9)
    grid = [[" "] * width for _ in range(height)]
    legend = []
    for at, point in enumerate(found):
        letter = "abcdefghijklmnopqrstuvwxyz0123456789"[at % 36]
        letter = letter.upper() if point.best else letter
        x = round((width - 1) * (point.memory - low) / (high - low)) if high > low else 0
        y = height - 1 - round((height - 1) * point.bubble / top)
        grid[y][x] = letter if grid[y][x] == " " or point.best else grid[y][x]
        legend.append(f"{letter} {point.name}")
    heads = {0: f"{100 * top:.2f}%", height - 1: "0.00%"}
    lines = [f"{heads.get(y, ''):>7} |{''.join(row)}".rstrip() for y, row in enumerate(grid)]
    ends = number(low), number(high)
    axis = [" " * 8 + "+" + "-" * width, " " * 9 + ends[0] + ends[1].rjust(width - len(ends[0]))]
    return "\n".join(["bubble against memory", *lines, *axis, "  ".join(legend)])


def svg(entries: Sequence[Entry]) -> str:
    """The picture as SVG, with a line through the schedules that none is better than in both."""
    found = points(entries)
    low, high = min(p.memory for p in found), max(p.memory for p in found)
    top = max(max(p.bubble for p in found), 1e-9)

    def place(p):
        return (
            60 + 560 * (p.memory - low) / ((high - low) or 1),
            340 - 300 * p.bubble / top,
        )

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, (p for p in found if p.best)))
    dots = []
    for point in found:
        x, y = place(point)
        label = f"{escape(point.name)}: bubble {point.bubble:.2%}, memory {number(point.memory)}"
        colour = "#0b6" if point.best else "#888"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" '
            f'fill="{colour}"><title>{label}</title></circle>'
        )
        dots.append(
            f'<text x="{x + 6:.1f}" y="{y - 4:.1f}" font-size="9" '
            f'fill="#333">{escape(point.name)}</text>'
        )
    axes = f"""<path d="M60 30 V340 H640" fill="none" stroke="#333"/>
<text x="8" y="24" font-size="11">bubble, up to {top:.2%}</text>
<text x="420" y="362" font-size="11">memory, {number(low)} to {number(high)}</text>"""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 380" font-family="sans-serif">'
    white = '<rect width="760" height="380" fill="#fff"/>'
    path = f'<polyline points="{line}" fill="none" stroke="#0b6"/>'
    return "\n".join([head, white, axes, path, *dots, "</svg>\n"])


def take(entries: Sequence[Entry], limit: float) -> Entry | None:
    """The schedule to take: of those that fit the one of the shortest span, then of the least
    memory.
    """
    fitting = [entry for entry in entries if entry.memory <= limit * (1 + 1e-9)]
    return min(
        fitting,
        key=lambda e: (round(e.span, 9), e.weights, e.memory, e.name.startswith("Solved")),
        default=None,
    )
