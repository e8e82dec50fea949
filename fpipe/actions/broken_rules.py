# SPDX-License-Identifier: Apache-2.0
"""The slow part of ``check``: it finds the first place where a rule is broken.

The error names the place, the rule and the remedy, and shows the actions around the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import permutations

from ..errors import ScheduleError
from .action import Action, AnyAction, Fused, Row, Rows
from .action_kinds import FACTS, KINDS
from .rule import Blocked, Fact, Walk, needs, needs_slice, provides
from .text import counted
from .unit import unit

_SHOWN_RANKS = 6  # of a circle
_SHOWN_ACTIONS = 5  # on each side of a place


def wrong_size(schedule: Rows) -> ScheduleError:
    """The error for rows whose number is not that of ranks, or that have too few actions."""
    rows, placement, units, slices = schedule
    if len(rows) != placement.ranks:
        what = f"the schedule has {len(rows)} rows, but its placement has {placement.ranks} ranks"
        return ScheduleError(f"{what}; give one row of actions per rank", rule="placement")
    of_slices = f" of {slices} slices" if slices > 1 else ""
    return ScheduleError(
        f"{sum(map(len, rows))} actions cannot fill {placement.stages} stages times "
        f"{units // slices} microbatches{of_slices}; number both from 0 without gaps, and "
        "give each of them its actions",
        rule="count",
    )


def no_action(rows: Sequence[Row]) -> ScheduleError:
    """The error for a schedule without rows, or with a cell that is no action."""
    if not rows:
        return ScheduleError(
            "a schedule needs at least one rank; give one row of actions per rank", rule="ranks"
        )
    cell = next(cell for row in rows for cell in row if type(cell) not in (Action, Fused))
    remedy = "give Action(stage, op, microbatch), or text to Schedule.parse"
    return ScheduleError(f"{str(cell)[:40]!r} is not an action; {remedy}", rule="action")


def no_integers() -> ScheduleError:
    """The error for actions whose fields have wrong types."""
    return ScheduleError(
        "the stages and microbatches of actions must be integers, and the parts of a Fused be "
        "actions",
        rule="action",
    )


def no_slicing(present: int, slices: object) -> ScheduleError:
    """The error for a schedule that cannot be cut into so many slices."""
    has = f"the schedule has {present} slices already" if present > 1 else f"slices={slices!r}"
    return ScheduleError(
        f"{has}; give a number of slices, 1 or more, to a schedule without", rule="slices"
    )


def wrong_cell(schedule: Rows) -> ScheduleError:
    """The error for a cell that is no action, out of range, on a wrong rank, or there twice."""
    rows, placement, units, slices = schedule
    done: dict[tuple[int, int], list[tuple[Action, int, int]]] = defaultdict(list)
    for rank, position, cell in _cells(rows):
        fault = partial(_error, rows, rank, position)
        if problem := _malformed(cell):
            return fault(problem, "action")
        for part in cell.parts:
            stage, op, mb = part
            if not 0 <= stage < placement.stages:
                has = f"the schedule has {counted(placement.stages, 'stage')}, counted from 0"
                return fault(f"there is no stage {stage}; {has}", "range")
            if not 0 <= mb < units:
                has = counted(units // slices, "microbatch")
                what = f"there is no microbatch {mb // slices}"
                return fault(f"{what}; the schedule has {has}, counted from 0", "range")
            if (home := placement.rank_of(stage, mb)) != rank:
                what = f"stage {stage} is on rank {home} for microbatch {mb}; move {part} there"
                return fault(what, "placement")
            for other, where, at in done[stage, mb]:
                if set(KINDS[op].provides) & set(KINDS[other.op].provides):
                    remedy = (
                        "every action runs once, so leave one of them out"
                        if other.op == op
                        else "a backward is either B, or I and W, so leave one of the two out"
                    )
                    named = part if other.op == op else other
                    what = f"{named} stands already on rank {where}, position {at}; {remedy}"
                    return fault(what, "count", (where, at))
            done[stage, mb].append((part, rank, position))
    raise AssertionError("the slow pass found no fault")


def _malformed(cell: object) -> str:
    """What is wrong with the types of a cell; "" if nothing is."""
    if isinstance(cell, Fused):
        if not isinstance(cell.parts, tuple) or len(cell.parts) < 2:
            return "a fused action has two or more parts; give it more, or leave its part unfused"
        why = next(filter(None, map(_malformed_part, cell.parts)), "")
        return why and f"a part of it is wrong: {why}"
    return _malformed_part(cell)


def _malformed_part(part: object) -> str:
    if type(part) is not Action:
        remedy = "give Action(stage, op, microbatch), or Fused of two or more of them"
        return f"{_clip(part)} is not an action; {remedy}"
    if not isinstance(part.op, str) or part.op not in KINDS:
        return f"{_clip(part.op)} is not an op; the ops are F, B, I and W"
    if not isinstance(part.stage, int) or not isinstance(part.microbatch, int):
        return "stage and microbatch must be integers"
    return ""


def wrong_slices(schedule: Rows) -> ScheduleError | None:
    """The error for an action without a slice if others have slices, or for slices of a microbatch
    on several paths; None if there is no such action.
    """
    rows, placement, _, slices = schedule
    for rank, position, part in _parts(rows):
        if part.slices != slices:
            has = f"{part} has {f'{part.slices} slices' if part.slices > 1 else 'no slice'}"
            remedy = "give all actions slices of one number, as in 2F3.1, or none"
            what = f"{has}, where others have {slices}; {remedy}"
            return _error(rows, rank, position, what, "slices")
        at = part.microbatch
        if placement.path_index(at) != placement.path_index(at - part.slice):
            what = (
                f"the slices of microbatch {part.whole} are on several ranks; put them on those of "
                "the first"
            )
            return _error(rows, rank, position, what, "slices")
    return None


def missing(
    schedule: Rows, stage: int, number: int, ops: Collection[str], *, training: bool
) -> ScheduleError:
    """The error for a stage and a microbatch, or slice, that has these ops and needs others."""
    rows, placement, _, slices = schedule
    mb = unit(number, slices)
    rank = placement.rank_of(stage, mb)
    present = [
        (part.op, position)
        for position, cell in enumerate(rows[rank])
        for part in cell.parts
        if (part.stage, part.microbatch) == (stage, mb)
    ]
    if not training and set(ops) - {"F"}:
        extra, position = min((op, at) for op, at in present if op != "F")
        what = (
            f"a schedule of forwards alone has no {stage}{extra}{mb}; leave it out, or "
            "check(training=True)"
        )
        return _error(rows, rank, position, what, "count")
    lack, remedy = {
        ("F",): (f"{stage}B{mb} (or {stage}I{mb} and {stage}W{mb})", ""),
        ("F", "I"): (f"{stage}W{mb}", f" after {stage}I{mb}"),
        ("F", "W"): (f"{stage}I{mb}", f" before {stage}W{mb}"),
    }.get(tuple(sorted(ops)), (f"{stage}F{mb}", ""))
    what = (
        f"{lack} is missing, but every stage needs it for every "
        f"{'slice' if slices > 1 else 'microbatch'}; put it on rank {rank}{remedy}"
    )
    return _error(rows, rank, present[0][1] if present else None, what, "count")


def stuck(rows: Sequence[Row], stages: int, walked: Walk) -> ScheduleError:
    """The error for a walk with blocked ranks.

    Parts of a fused action need each other, an order is wrong, or ranks wait in a circle.
    """
    for rank, position, cell in _cells(rows):
        for one, other in permutations(cell.parts, 2):
            if set(needs(one, stages)) & set(provides(other)):
                return _dependent_parts(rows, rank, position, one, other)
    lacking = {blocked.lacks for blocked in walked.blocked}
    sources = {
        fact: (rank, position, part)
        for rank, position, part in _parts(rows)
        for fact in provides(part)
        if fact in lacking
    }
    for rank, position, fact in walked.blocked:
        if fact not in sources:
            what = (
                f"it needs {FACTS[fact.kind]} of stage {fact.stage} for microbatch "
                f"{fact.microbatch}, which no action provides; add that action, or remove this one"
            )
            return _error(rows, rank, position, what, "count")
        where, at, source = sources[fact]
        if where == rank:
            what = f"{_needs_later(fact, source, at)}; move {source} before it"
            return _error(rows, rank, position, what, "order")
    return _circle(rows, {blocked.rank: blocked for blocked in walked.blocked}, sources)


def wrong_slice_order(rows: Sequence[Row]) -> ScheduleError | None:
    """The error for a slice that runs before the slice that it needs; None if there is none."""
    for rank, row in enumerate(rows):
        sources = {fact: (at, part) for _, at, part in _parts([row]) for fact in provides(part)}
        for _, position, part in _parts([row]):
            fact = needs_slice(part)
            if fact is None or fact not in sources or sources[fact][0] < position:
                continue
            at, source = sources[fact]
            if at == position:
                return _dependent_parts(rows, rank, position, part, source)
            way = (
                "forwards run in the order of slices"
                if part.op == "F"
                else "backwards run from the last slice"
            )
            what = f"{_needs_later(fact, source, at)}; {way}: move {source} before it"
            return _error(rows, rank, position, what, "order", (rank, at))
    return None


def _dependent_parts(
    rows: Sequence[Row], rank: int, position: int, one: Action, other: Action
) -> ScheduleError:
    what = (
        f"{one} needs {other}, and parts of a fused action may not need each other; run them apart"
    )
    return _error(rows, rank, position, what, "fused")


def _needs_later(fact: Fact, source: Action, position: int) -> str:
    return (
        f"it needs {FACTS[fact.kind]} of {source}, which stands later on this rank, at position "
        f"{position}"
    )


def _circle(
    rows: Sequence[Row], blocked: dict[int, Blocked], sources: dict[Fact, tuple[int, int, Action]]
) -> ScheduleError:
    """The error for ranks that wait in a circle: go from each rank to the one that it waits for,
    until a rank repeats.
    """
    path: list[int] = []
    rank = min(blocked)
    while rank not in path:
        path.append(rank)
        rank = sources[blocked[rank].lacks][0]
    circle = path[path.index(rank) :]
    shown = circle[:_SHOWN_RANKS]
    more = len(circle) - _SHOWN_RANKS
    lines = [
        f"ranks {', '.join(map(str, shown))}{', ...' * (more > 0)} wait for each other in a "
        "circle; on one of them, move what is waited for before what waits"
    ]
    for rank in shown:
        _, position, fact = blocked[rank]
        where, at, source = sources[fact]
        lines.append(
            f"    rank {rank} stands at {rows[rank][position]} (position {position}) and waits for "
            f"{FACTS[fact.kind]} of {source} (rank {where}, position {at})"
        )
    if more > 0:
        lines.append(f"    and so on, through {more} more ranks")
    (rank, position), *others = ((rank, blocked[rank].position) for rank in shown)
    return _error(rows, rank, position, "\n".join(lines), "deadlock", *others)


# ---- the message ----
def _error(
    rows: Sequence[Row],
    rank: int,
    position: int | None,
    what: str,
    rule: str,
    *more: tuple[int, int],
) -> ScheduleError:
    """The error at a position, or at the end of a row (None). It shows the actions around this
    place and ``more`` places.
    """
    where = f"rank {rank}"
    place = (rank, len(rows[rank]))
    if position is not None:
        where = f"{where}, position {position} ({_clip(rows[rank][position])})"
        place = (rank, position)
    window = "\n".join(_window(rows, [place, *more]))
    return ScheduleError(f"{where}: {what}\n{window}", rank=rank, position=position, rule=rule)


def _window(rows: Sequence[Row], places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The actions around each place: the first one underlined by ^, the others by ~.

    A place behind the last action of a rank marks a missing one.
    """
    width = max(len(str(rank)) for rank, _ in places)
    marked = set[tuple[int, int]]()
    for rank, place in places:
        if (rank, place) in marked:  # in the line of another place
            continue
        row = rows[rank]
        first = max(0, place - _SHOWN_ACTIONS)
        stop = min(len(row), place + _SHOWN_ACTIONS + 1)
        line = f"    rank {rank:{width}} | " + "... " * (first > 0)
        marks = ""
        for position in range(first, max(stop, place + 1)):
            cell = _clip(row[position]) if position < len(row) else " "
            if (rank, position) in places:
                mark = "^" if (rank, position) == places[0] else "~"
                marks = marks.ljust(len(line)) + mark * len(cell)
                marked.add((rank, position))
            line += cell + " "
        yield line.rstrip() + " ..." * (stop < len(row))
        yield marks


def _clip(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a Fused whose parts are not a tuple has no repr
        text = f"a {type(value).__name__} that cannot be printed"
    if len(text) <= 40:
        return text
    return text[:37] + "..."


def _cells(rows: Sequence[Row]) -> Iterator[tuple[int, int, AnyAction]]:
    """(rank, position, cell) of every cell."""
    for rank, row in enumerate(rows):
        for position, cell in enumerate(row):
            yield rank, position, cell


def _parts(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action]]:
    """(rank, position, part) of every action, and of every part of a fused one."""
    for rank, position, cell in _cells(rows):
        for part in cell.parts:
            yield rank, position, part
