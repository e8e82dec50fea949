# SPDX-License-Identifier: Apache-2.0
"""All schedules side by side: what each would cost at the same counts and the same price per rank.

The price is that of a rank's whole share of the model, so that a schedule that puts two stages on a
rank pays half for each, and memory is counted in whole shares too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from ... import Costs, Schedule, make_schedule, schedule_names
from ...actions import as_costs, number, uncollected
from ...errors import ScheduleError
from ...generators import orders_slices


class Entry(NamedTuple):
    """What one schedule would cost."""

    name: str
    stages: int
    bubble: float  # 1 - work / span
    total: float  # from the first start of all to the last end of all
    span: float  # the longest time from a rank's first start to its last end
    # the most that a rank holds, in activations of a whole share for one microbatch, or in bytes
    memory: float
    weights: float  # copies of a share that a rank holds: 2 if every stage is on two ranks
    messages: int  # between ranks, each one microbatch's activations or their gradient
    volume: float  # their bytes, where the costs know them


def per_share(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of a rank's whole share, per stage of ``schedule``.

    >>> from fpipe.generators import make_schedule
    >>> per_share(Costs(comm=0.5), make_schedule("ZBV", 2, 4))
    Costs(F=0.5, I=0.5, W=0.5, comm=0.5, saved=0.5)
    """
    return costs.scaled(schedule.ranks / schedule.stages)


def compare(
    ranks: int,
    microbatches: int,
    *,
    stages: int | None = None,
    costs: Costs | None = None,
    slices: int = 1,
    names: Sequence[str] | None = None,
    track: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> tuple[list[Entry], list[str]]:
    """An entry for every named schedule that these counts allow, the least bubble first; and why
    others are left out.

    ``names`` are all by default. ``track`` passes them on one by one, to show progress. ``slices``
    are those of the schedules that order slices of sequences; with one they are 1F1B and ZB-H1.

    >>> entries, _ = compare(4, 8)
    >>> entries[0].name, entries[0].bubble, entries[0].total
    ('ZBVZeroBubble', 0.0, 25.5)
    """
    entries, left_out, costs = [], [], as_costs(costs)
    with uncollected():
        for name in track(schedule_names() if names is None else names):
            cut = {"slices": slices} if slices > 1 and orders_slices(name) else {}
            try:
                schedule = make_schedule(name, ranks, microbatches, stages, **cut).check()
            except ScheduleError as error:
                left_out.append(f"{name}: {str(error).splitlines()[0]}")
            else:
                entries.append(entry_of(name, schedule, costs))
    return sorted(entries, key=by_bubble), left_out


def by_bubble(entry: Entry) -> tuple[float, float, float]:
    """The key of an entry in a table: the least bubble is first, of equal ones the least memory."""
    return round(entry.bubble, 9), entry.memory, entry.total


def entry_of(name: str, schedule: Schedule, costs: Costs) -> Entry:
    """What a schedule would cost, at these costs of a rank's whole share."""
    t = schedule.simulate(per_share(costs, schedule))
    held = max(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks))
    memory, weights = max(t.peak_bytes), held * schedule.ranks / schedule.stages
    return Entry(
        name,
        schedule.stages,
        max(t.bubble, 0.0),
        t.total,
        t.span,
        memory,
        weights,
        t.messages,
        t.volume,
    )


def take(entries: Sequence[Entry], limit: float = inf) -> Entry | None:
    """The schedule to take: of those that hold at most ``limit`` the one of the shortest span, then
    of the fewest weights, then of the least memory.
    """
    fitting = [entry for entry in entries if entry.memory <= limit * (1 + 1e-9)]
    return min(fitting, key=lambda e: (round(e.span, 9), e.weights, e.memory), default=None)


def points(entries: Sequence[Entry]) -> list[tuple[str, float, float, bool]]:
    """Bubble against memory: for each schedule its name, its memory, its bubble, and whether no
    other one has less of one and not more of the other.
    """
    places = [(round(entry.memory, 9), round(entry.bubble, 9)) for entry in entries]

    def is_best(place: tuple[float, float]) -> bool:
        memory, bubble = place
        return not any(m <= memory and b <= bubble for m, b in places if (m, b) != place)

    return [
        (entry.name, *place, is_best(place)) for entry, place in zip(entries, places, strict=True)
    ]


# ---- as text ----
def table(entries: Sequence[Entry], best: Callable[[str], str] = str) -> Iterator[str]:
    """Lines of text, the least of each column with a star where it is not the same in all; ``best``
    decorates it.

    >>> print(*table(compare(4, 8)[0][:3:2]), sep="\\n")
    schedule       stages  bubble   total   span   memory   weights   messages
    ZBVZeroBubble       8   0.00%    25.5*    24        4*       1x         96
    ZB2P                4   0.00%      27     24        8        1x         48*
    """
    columns = _columns(entries)
    wide = max((len(entry.name) for entry in entries), default=8)
    cells = [[show(getattr(entry, field)) for field, show in columns.items()] for entry in entries]
    widths = [
        max(len(field), *(len(row[k]) for row in cells), 0) for k, field in enumerate(columns)
    ]
    heads = [f"{field:>{size}} " for field, size in zip(columns, widths, strict=True)]
    yield "  ".join(["schedule".ljust(wide), "stages", *heads]).rstrip()
    for entry, row in zip(entries, cells, strict=True):
        shown = []
        for field, text, size in zip(columns, row, widths, strict=True):
            star = field != "weights" and _is_best(entry, entries, field)
            shown.append(best(f"{text:>{size}}*") if star else f"{text:>{size}} ")
        yield "  ".join([entry.name.ljust(wide), f"{entry.stages:>6}", *shown]).rstrip()


def _columns(entries: Sequence[Entry]) -> dict[str, Callable[[float], str]]:
    """Field -> how it is shown."""
    memory = _bytes if max((e.memory for e in entries), default=0) >= 4096 else number
    columns = {
        "bubble": lambda v: f"{100 * v:.2f}%",
        "total": number,
        "span": number,
        "memory": memory,
    }
    volume = {"volume": _bytes} if any(entry.volume for entry in entries) else {}
    return {**columns, "weights": lambda v: f"{v:g}x", "messages": str, **volume}


def _is_best(entry: Entry, entries: Sequence[Entry], field: str) -> bool:
    numbers = [round(getattr(e, field), 9) for e in entries]
    return round(getattr(entry, field), 9) == min(numbers) < max(numbers)


def _bytes(value: float) -> str:
    power, prefix = next(
        ((p, n) for p, n in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value >= 2**p), (0, "B")
    )
    return f"{value / 2**power:.4g} {prefix}"
