"""The interactive page of all schedules, ``fpipe.html``: sliders for ranks, microbatches, stages
and costs.

The orders of actions are computed here, by the generators of the package, for many counts; the page
simulates them with the costs that its reader chooses (``explorer.js``), and draws them as the page
of a timeline does. A test compares its times with those of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fpipe.actions import OPS, Action
from fpipe.errors import ScheduleError
from fpipe.generators import about_schedule, catalogue, make_schedule, orders_slices, schedule_names
from fpipe.products.pictures import html
from fpipe.schedule import Schedule

RANKS = (2, 3, 4, 5, 6, 7, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
PER_RANK = (1, 2, 3, 4)
SLICES = 2  #: of schedules that order slices of sequences
FOLDER = Path(__file__).parent


@cache
def page() -> str:
    """The page."""
    script, controls = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("explorer.js", "controls.html")
    )
    return html.join("Schedules of pipelines", contents(), script=script, controls=controls)


def contents() -> dict[str, Any]:
    """Orders of all schedules as lists of small numbers, and what the viewer needs to draw them."""
    names = [name for name in schedule_names() if name in {entry.name for entry in catalogue.TABLE}]
    return {
        "show": {"memory": True, "critical": False, "messages": False},
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "palettes": [
            html.colour_table([f"{op}{k}" for op in OPS for k in range(shades)], shades)
            for shades in (1, *PER_RANK)
        ],
        "schedules": {
            name: {"about": about_schedule(name).replace("``", ""), **dict(_orders(name))}
            for name in names
        },
    }


def built(name: str, ranks: int, microbatches: int, per_rank: int) -> Schedule:
    """The schedule for these counts; ScheduleError where it has none."""
    slices = SLICES if orders_slices(name) else 1
    return make_schedule(name, ranks, microbatches, per_rank * ranks, slices=slices)


def _orders(name: str) -> Iterator[tuple[str, Any]]:
    """(``ranks,microbatches,stages per rank``, the order) for all counts, or why there is none."""
    for per_rank in PER_RANK:
        for ranks in RANKS:
            for microbatches in MICROBATCHES:
                try:
                    order: Any = _order(built(name, ranks, microbatches, per_rank))
                except ScheduleError as error:
                    order = str(error).splitlines()[0]
                yield f"{ranks},{microbatches},{per_rank}", order


def _order(schedule: Schedule) -> list[Any]:
    """Paths, the path of each unit of work, slices, codes, and for each rank (codes, steps,
    parts).
    """
    placement = schedule.placement
    route = [placement.path_index(unit) for unit in range(schedule.microbatches)]
    codes: dict[tuple[int, str], int] = {}
    rows = []
    for row in schedule:
        at: dict[int, int] = {}
        parts: list[Action] = [part for action in row for part in action.parts]
        known = [codes.setdefault((part.stage, part.op), len(codes)) for part in parts]
        steps = []
        for code, part in zip(known, parts, strict=True):
            steps.append(int(part.microbatch) - at.get(code, -1) - 1)
            at[code] = int(part.microbatch)
        fused = [len(action.parts) for action in row]
        rows.append([known, steps, fused if max(fused, default=1) > 1 else 0])
    return [
        list(placement.paths),
        route if len(placement.paths) > 1 else 0,
        schedule.slices,
        list(codes),
        rows,
    ]
