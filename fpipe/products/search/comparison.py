# SPDX-License-Identifier: Apache-2.0
"""All schedules side by side: what each would cost at the same counts and the same costs.

Costs are those of a rank's whole share of the model, so that each stage of a schedule that puts two
on a rank has half of them, and memory is counted in whole shares too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from math import inf
from typing import NamedTuple

from ... import Costs, Schedule, Timeline, make_schedule, schedule_names
from ...actions import Per, Track, as_costs, number, uncollected
from ...errors import ScheduleError
from ...generators import orders_slices
from ..pictures.labels import percent, size_text
from ..pictures.output import Cell
from ..pictures.scene import BYTES, TimeAndMemory
from .problem import ALMOST


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


def compare(
    ranks: int,
    microbatches: int,
    *,
    stages: int | None = None,
    costs: Costs | None = None,
    per: Per = "rank",
    slices: int = 1,
    names: Sequence[str] | None = None,
    track: Track = iter,
) -> tuple[list[Entry], list[str]]:
    """An entry for every named schedule that these counts allow, the least total first, of equal
    ones the least bubble; and which others are left out, with what they take or why.

    Costs are those of a rank's whole share of the model, or with ``per="stage"`` of each stage; one
    number per stage is always that of the stage, and leaves schedules of that many stages.
    ``names`` are all by default. ``track`` passes them on one by one, to show progress. ``slices``
    are those of the schedules that order slices of sequences; with one they are 1F1B and ZB-H1.

    >>> entries, _ = compare(4, 8)
    >>> entries[0].name, entries[0].bubble, entries[0].total
    ('ZBVZeroBubble', 0.0, 25.5)
    """
    entries = []
    left_out: dict[str, list[str]] = {}
    costs = as_costs(costs)
    stages = stages or next(iter(costs.counts), None)
    with uncollected():
        for name in track(schedule_names() if names is None else names):
            cut = slices if orders_slices(name) else 1
            try:
                schedule = make_schedule(name, ranks, microbatches, stages, slices=cut).check()
                t = schedule.simulate(in_microbatches(costs, per, ranks / schedule.stages), per=per)
            except ScheduleError as error:
                first = str(error).splitlines()[0]
                reason = re.sub(f"{name} takes (.*?);.*", r"\1", first)  # without advice in Python
                left_out.setdefault(reason, []).append(name)
                continue
            entries.append(entry_of(name, schedule, t))
    entries.sort(key=lambda e: (round(e.total, 9), round(e.bubble, 9), e.memory))
    return entries, [f"{', '.join(names)} ({reason})" for reason, names in left_out.items()]


def entry_of(name: str, schedule: Schedule, t: Timeline) -> Entry:
    """What a schedule costs in a timeline of it."""
    ranks = schedule.ranks
    most = max(len(schedule.placement.stages_of(rank)) for rank in range(ranks))
    return Entry(
        name,
        schedule.stages,
        bubble=max(t.bubble, 0.0),
        total=t.total,
        span=t.span,
        memory=max(t.peak_bytes),
        weights=most * ranks / schedule.stages,
        messages=t.messages,
        volume=t.volume,
    )


def named_alike(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """The named schedules for the counts of this one, without those that hold parameters twice,
    which costs do not count.

    >>> [name for name, _ in named_alike(make_schedule("1F1B", 2, 2))][:3]
    ['GPipe', '1F1B', 'Interleaved1F1B']
    """
    for name in schedule_names():
        with suppress(ScheduleError):  # it needs other counts, or has no backwards
            other = make_schedule(name, schedule.ranks, schedule.microbatches, schedule.stages)
            if not other.check().placement.replicated:
                yield name, other


def in_microbatches(costs: Costs, per: Per, share: float) -> Costs:
    """The same costs where memory is in bytes. Where each stage saves 1, the memory of 1 is one
    microbatch's activations of a rank's whole share, of which a stage has this ``share``.

    >>> in_microbatches(Costs(), "stage", 0.5).saved, in_microbatches(Costs(), "rank", 0.5).saved
    (0.5, 1.0)
    """
    if costs.saved != 1 or not (per == "stage" or costs.counts):
        return costs
    kept = share * costs.kept if isinstance(costs.kept, float) else costs.kept
    return replace(costs, saved=share, kept=kept)


def take(
    entries: Sequence[Entry], limit: float = inf, time: str = "total", copies: float = inf
) -> Entry | None:
    """The schedule to take: of those that hold at most ``limit``, and at most so many ``copies`` of
    weights, the one of the least ``time`` ("span" or "total"), then of the least total, the fewest
    weights and the least memory.
    """
    fitting = [e for e in entries if e.memory <= limit * ALMOST and e.weights <= copies]
    return min(
        fitting,
        key=lambda e: (round(getattr(e, time), 9), round(e.total, 9), e.weights, e.memory),
        default=None,
    )


def points(entries: Sequence[Entry]) -> Iterator[TimeAndMemory]:
    """Time against memory: for each schedule its name, with its weights where it holds them more
    than once, its memory, its total, and whether no other one has less of one and not more of the
    other.
    """
    places = [(round(entry.memory, 9), round(entry.total, 9)) for entry in entries]
    for entry, place in zip(entries, places, strict=True):
        name = entry.name + f"\xa0({entry.weights:g}x\xa0weights)" * (entry.weights > 1)
        yield name, *place, not any(p < place and p[1] <= place[1] for p in places)


# ---- as text ----
def held(memory: float) -> str:
    """A memory: bytes with a prefix, or a number of microbatches.

    >>> held(1.5), held(1 << 20)
    ('1.5', '1.0 MiB')
    """
    return size_text(memory) if memory >= BYTES else number(memory)


def table(entries: Sequence[Entry], limit: float = inf) -> list[list[object]]:
    """The rows of a table below its head, with an exclamation mark at a memory over ``limit``. The
    least of each column among the others has a star, where it is not the same in all.

    >>> from fpipe.products.pictures.labels import aligned
    >>> rows = table(compare(4, 8, names=["ZB2P", "VMin", "ZBV"])[0], limit=6)
    >>> print(*aligned(rows, " "), sep="\\n")
    schedule total  memory  bubble  stages  weights  messages
    ZBV       25.5*      4      0%*      8       1x        96
    ZB2P        27       8!     0%       4       1x        48
    VMin      29.5       2*  18.6%       8       1x        96
    """
    columns = {
        "total": number,
        "memory": held,
        "bubble": percent,
        "stages": str,
        "weights": lambda copies: f"{copies:g}x",
        "messages": str,
    }
    if any(entry.volume for entry in entries):
        columns["volume"] = size_text
    values = {field: [round(getattr(e, field), 9) for e in entries] for field in columns}
    fits = [memory <= limit * ALMOST for memory in values["memory"]]
    best = {}
    for field in values.keys() - {"stages", "weights"}:
        within = {*compress(values[field], fits)}
        if len(within) > 1:
            best[field] = min(within)
    rows: list[list[object]] = [["schedule", *(f"{field} " for field in columns)]]
    for place, entry in enumerate(entries):
        cells: list[object] = [entry.name]
        for field, show in columns.items():
            value = values[field][place]
            mark = "*" if fits[place] and value == best.get(field) else " "
            if field == "memory" and not fits[place]:
                mark = "!"
            text = show(value) + mark
            cells.append(Cell(text, text.replace(" ", "&nbsp;")))
        rows.append(cells)
    return rows
