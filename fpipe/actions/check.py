# SPDX-License-Identifier: Apache-2.0
"""Checks whether a schedule is complete and can run; reports the first broken rule with rank,
position and remedy.

    rule         what it requires
    action       every cell is an action, or two or more fused ones
    range        stages and microbatches are counted from 0, as many as the schedule has
    placement    an action is on the rank of its stage and microbatch
    slices       all actions have slices or none, and those of a microbatch are on one rank
    count        each stage and microbatch, or slice, has F once, and B once or I and W once
    fused        the parts of a fused action do not need each other
    order        what an action needs from its own rank is before it; slices run forwards in order,
    backwards in reverse deadlock     no ranks wait for each other in a circle

The last rule suffices even where a send blocks until it is received: without a circle there is an
order of all actions in which each follows what it needs. Insert every message into that order, as
one event, behind the action that sends it, and give each rank its part of the order. Then all
participants of the first unfinished event have reached it, so some event can always complete.

A valid schedule passes a fast pass that counts. Only when that fails does a slow pass search for
the place. Nothing here knows time, memory or tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from operator import itemgetter
from typing import NamedTuple, cast

from ..errors import ScheduleError
from .action import Action, AnyAction, Fused, Row, Slice, unit
from .dependencies import RULE, Blocked, Fact, Walk, needs, needs_slice, provides, walk
from .placement import Placement
from .text import counted

_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}
#: op -> the ops of the same stage and microbatch that exclude it, as bits
_CLASH = {"F": 1, "B": 2 | 4 | 8, "I": 4 | 2, "W": 8 | 2}
#: op -> the op of the same stage and microbatch that it needs
_BEFORE = {"F": 0, "B": 1, "I": 1, "W": 4}
#: The bit of a stage and microbatch where an op came before the one that it needs.
_EARLY = 16
#: op -> by what a stage and microbatch has had: what it has after the op; a number that is no byte
#: if they clash
_AFTER = {
    op: [
        256 if had & _CLASH[op] else had | bit | (_BEFORE[op] & ~had and _EARLY)
        for had in range(2 * _EARLY)
    ]
    for op, bit in _BIT.items()
}
_OPS = bytes(had % _EARLY for had in range(256))  # without that bit
#: what a complete stage and microbatch has
_TRAINED, _FORWARD = (1 | 2, 1 | 4 | 8), (1,)
_FACTS = {"F": "the output", "I": "the input gradient", "W": "the weight gradient"}


class Inspection(NamedTuple):
    """Which ops occur, as the sum of 1 for F, 2 for B, 4 for I and 8 for W at
    ``stage * microbatches + mb``; and an order of the actions.
    """

    seen: bytearray
    walk: Walk


def check_rows(
    rows: Sequence[Row],
    placement: Placement,
    microbatches: int,
    *,
    training: bool = True,
    inspected: Inspection | None = None,
    slices: int = 1,
) -> None:
    """Raise ScheduleError at the first broken rule. ``training=False`` requires F alone.

    ``inspected`` is the result of :func:`inspect_rows` for these rows, if it is known.
    ``microbatches`` counts slices where each microbatch has several.

    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0))]
    >>> check_rows(rows, Placement.loop(2), 1)
    Traceback (most recent call last):
        ...
    fpipe.errors.ScheduleError: rank 1, position 0 (1B0): it needs the output of 1F0, which stands
    later on this rank, at position 1; move 1F0 before it
        rank 1 | 1B0 1F0
                 ^^^
    """
    seen, walked = inspected or inspect_rows(rows, placement, microbatches, slices)
    complete = _TRAINED if training else _FORWARD
    if sum(map(seen.count, complete)) != placement.stages * microbatches:
        raise _missing(rows, placement, (microbatches, slices), seen, complete)
    if walked.blocked:
        raise stuck(rows, placement.stages, walked)
    if slices > 1:
        _check_slices(rows)


def inspect_rows(
    rows: Sequence[Row], placement: Placement, microbatches: int, slices: int = 1
) -> Inspection:
    """Check the first three rules, and that no action occurs twice; walk the rows. Actions may be
    missing, or blocked.

    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1))]
    >>> list(inspect_rows(rows, Placement.loop(1), 2).seen)
    [3, 1]
    """
    if len(rows) != placement.ranks:
        what = f"the schedule has {len(rows)} rows, but its placement has {placement.ranks} ranks"
        raise ScheduleError(f"{what}; give one row of actions per rank", rule="placement")
    actions = sum(map(len, rows))
    if (
        placement.stages * microbatches > 100_000 + 100 * actions
    ):  # tables of all facts would be mostly empty
        units = f"{microbatches // slices} microbatches" + (
            f" of {slices} slices" if slices > 1 else ""
        )
        what = f"{actions} actions cannot fill {placement.stages} stages times {units}"
        remedy = "number both from 0 without gaps, and give each of them its actions"
        raise ScheduleError(f"{what}; {remedy}", rule="count")
    try:
        cut = slices > 1 or any(
            Slice in set(map(type, map(itemgetter(2), _flat(row)))) for row in rows
        )
        if cut and (fault := _slice_fault(rows, placement, slices)):
            raise fault
        seen, ordered = _tally(rows, placement, microbatches)
    except ScheduleError:
        raise
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
    ):  # the others: a cell that is not an action
        raise _invalid_cell(rows, placement, microbatches, slices) from None
    return Inspection(seen, walk(rows, placement.stages, microbatches, ordered=ordered))


def _tally(rows: Sequence[Row], placement: Placement, microbatches: int) -> tuple[bytearray, bool]:
    """Which ops occur, and whether the rows are ordered as ``walk`` asks; ValueError where a cell
    breaks a rule.
    """
    paths = [placement.path(microbatch) for microbatch in range(microbatches)]
    owners = {path: dict(enumerate(path)) for path in set(paths)}
    where = {
        microbatch: owners[path] for microbatch, path in enumerate(paths)
    }  # KeyError for any other number
    seen, fused = bytearray(placement.stages * microbatches), False
    for rank, row in enumerate(rows):
        cells = _flat(row)
        fused |= cells is not row
        for stage, op, microbatch in cells:
            if where[microbatch][stage] != rank:
                raise ValueError
            at = stage * microbatches + microbatch
            seen[at] = _AFTER[op][seen[at]]  # ValueError: no byte
    return seen.translate(_OPS), not fused and max(seen, default=0) < _EARLY


def _flat(row: Row) -> Sequence[Action]:
    kinds = set(map(type, row))
    if kinds <= {Action}:
        return cast(Sequence[Action], row)
    cells = [part for action in row for part in action.parts]
    if not kinds <= {Action, Fused} or set(map(type, cells)) != {Action}:
        raise TypeError
    if any(len(action) == 1 and len(action.parts) < 2 for action in row):
        raise ValueError
    return cells


def _slice_fault(rows: Sequence[Row], placement: Placement, slices: int) -> ScheduleError | None:
    """An action without a slice where others have some, or slices of a microbatch on several
    paths.
    """
    for rank, position, cell in _cells(rows):
        for part in cell.parts:
            at = part.microbatch
            if (at.of if isinstance(at, Slice) else 1) != slices:
                has = f"{part} has {f'{at.of} slices' if isinstance(at, Slice) else 'no slice'}"
                remedy = "give all actions slices of one number, as in 2F3.1, or none"
                return _fault(
                    rows, rank, position, f"{has}, where others have {slices}; {remedy}", "slices"
                )
            if placement.path_index(at) != placement.path_index(at - part.slice):
                what = (
                    f"the slices of microbatch {part.whole} are on several ranks; put them on "
                    "those of the first"
                )
                return _fault(rows, rank, position, what, "slices")
    return None


def _check_slices(rows: Sequence[Row]) -> None:
    """Raise where a slice runs before the one of the same stage and microbatch that it needs."""
    for rank, row in enumerate(rows):
        at = {
            fact: (position, part)
            for position, cell in enumerate(row)
            for part in cell.parts
            for fact in provides(part)
        }
        for position, cell in enumerate(row):
            for part in cell.parts:
                fact = needs_slice(part)
                if fact is None or fact not in at or at[fact][0] < position:
                    continue
                there, source = at[fact]
                if there == position:
                    what = (
                        f"{part} needs {source}, and parts of a fused action may not need each "
                        "other; run them apart"
                    )
                    raise _fault(rows, rank, position, what, "fused")
                way = (
                    "forwards run in the order of slices"
                    if part.op == "F"
                    else "backwards run from the last slice"
                )
                lack = (
                    f"{_FACTS[fact.kind]} of {source}, which stands later on this rank, at "
                    f"position {there}"
                )
                raise _fault(
                    rows,
                    rank,
                    position,
                    f"it needs {lack}; {way}: move {source} before it",
                    "order",
                    (rank, there),
                )


def _cells(rows: Sequence[Row]) -> Iterator[tuple[int, int, AnyAction]]:
    """(rank, position, cell) of every cell."""
    return (
        (rank, position, cell) for rank, row in enumerate(rows) for position, cell in enumerate(row)
    )


# ---- the slow pass: the place of the fault, and its remedy ----
def _invalid_cell(
    rows: Sequence[Row], placement: Placement, microbatches: int, slices: int
) -> ScheduleError:
    first: dict[tuple[int, int], list[tuple[Action, int, int]]] = defaultdict(list)
    for rank, position, cell in _cells(rows):
        fault = partial(_fault, rows, rank, position)
        if problem := _malformed(cell):
            return fault(problem, "action")
        for part in cell.parts:
            stage, op, mb = part
            for what, number, count in (
                ("stage", stage, placement.stages),
                ("microbatch", mb, microbatches),
            ):
                if not 0 <= number < count:
                    if what == "microbatch" and slices > 1:
                        number, count = number // slices, count // slices
                    has = f"the schedule has {counted(count, what)}, counted from 0"
                    return fault(f"there is no {what} {number}; {has}", "range")
            if (home := placement.rank_of(stage, mb)) != rank:
                return fault(
                    f"stage {stage} is on rank {home} for microbatch {mb}; move {part} there",
                    "placement",
                )
            for other, where, at in first[stage, mb]:
                if _BIT[other.op] & _CLASH[op]:
                    return fault(_clash(part, other, where, at), "count", (where, at))
            first[stage, mb].append((part, rank, position))
    raise AssertionError("the slow pass found no fault")


def _malformed(cell: object) -> str:
    if isinstance(cell, Fused):
        if not isinstance(cell.parts, tuple) or len(cell.parts) < 2:
            return "a fused action has two or more parts; give it more, or leave its part unfused"
        return next(
            (
                f"a part of it is wrong: {why}"
                for part in cell.parts
                if (why := _malformed_part(part))
            ),
            "",
        )
    return _malformed_part(cell)


def _malformed_part(cell: object) -> str:
    if type(cell) is not Action:
        return (
            f"{_clip(cell)} is not an action; give Action(stage, op, microbatch), or Fused of "
            "two or more of them"
        )
    if not isinstance(cell.op, str) or cell.op not in RULE:
        return f"{_clip(cell.op)} is not an op; the ops are F, B, I and W"
    if not isinstance(cell.stage, int) or not isinstance(cell.microbatch, int):
        return "stage and microbatch must be integers"
    return ""


def _clash(part: Action, other: Action, rank: int, position: int) -> str:
    there = f"stands already on rank {rank}, position {position}"
    if part.op == other.op:
        return f"{part} {there}; every action runs once, so leave one of them out"
    return f"{other} {there}; a backward is either B, or I and W, so leave one of the two out"


def _missing(
    rows: Sequence[Row],
    placement: Placement,
    counts: tuple[int, int],
    seen: bytearray,
    complete: tuple[int, ...],
) -> ScheduleError:
    """``counts`` are those of microbatches, or slices of all, and of slices of one."""
    index = next(index for index, bits in enumerate(seen) if bits not in complete)
    stage, number = divmod(index, counts[0])
    mb = unit(number, counts[1])
    rank = placement.rank_of(stage, mb)
    present = [
        (i, p.op) for i, cell in enumerate(rows[rank]) for p in cell.parts if p[::2] == (stage, mb)
    ]
    position = present[0][0] if present else None
    if complete == _FORWARD and seen[index] & ~1:
        extra, position = min((op, i) for i, op in present if op != "F")
        what = (
            f"a schedule of forwards alone has no {stage}{extra}{mb}; leave it out, or "
            "check(training=True)"
        )
        return _fault(rows, rank, position, what, "count")
    lack, remedy = {
        1: (f"{stage}B{mb} (or {stage}I{mb} and {stage}W{mb})", ""),
        1 | 4: (f"{stage}W{mb}", f" after {stage}I{mb}"),
        1 | 8: (f"{stage}I{mb}", f" before {stage}W{mb}"),
    }.get(seen[index], (f"{stage}F{mb}", ""))
    each = "slice" if counts[1] > 1 else "microbatch"
    what = (
        f"{lack} is missing, but every stage needs it for every {each}; put it on rank "
        f"{rank}{remedy}"
    )
    return _fault(rows, rank, position, what, "count")


def stuck(rows: Sequence[Row], stages: int, result: Walk) -> ScheduleError:
    """The error for a walk with blocked ranks: dependent parts of a fused action, a wrong order, or
    a circle.
    """
    for rank, position, cell in _cells(rows):
        for one, other in product(cell.parts, repeat=2):
            if set(needs(one, stages)) & set(provides(other)):
                what = (
                    f"{one} needs {other}, and parts of a fused action may not need each "
                    "other; run them apart"
                )
                return _fault(rows, rank, position, what, "fused")
    provided = (
        (f, (rank, at, part))
        for rank, at, cell in _cells(rows)
        for part in cell.parts
        for f in provides(part)
    )
    lacking = {blocked.lacks for blocked in result.blocked}
    sources = {fact: source for fact, source in provided if fact in lacking}
    for rank, position, fact in result.blocked:
        if fact not in sources:
            lack = f"{_FACTS[fact.kind]} of stage {fact.stage} for microbatch {fact.microbatch}"
            what = f"it needs {lack}, which no action provides; add that action, or remove this one"
            return _fault(rows, rank, position, what, "count")
        where, at, source = sources[fact]
        if where == rank:
            lack = (
                f"{_FACTS[fact.kind]} of {source}, which stands later on this rank, at "
                f"position {at}"
            )
            return _fault(
                rows, rank, position, f"it needs {lack}; move {source} before it", "order"
            )
    return _circle(rows, {blocked.rank: blocked for blocked in result.blocked}, sources)


def _circle(
    rows: Sequence[Row], blocked: dict[int, Blocked], sources: dict[Fact, tuple[int, int, Action]]
) -> ScheduleError:
    """Follow the ranks from each to the one that it waits for, until a rank repeats."""
    seen: dict[int, None] = {}
    rank = min(blocked)
    while rank not in seen:
        seen[rank] = None
        rank = sources[blocked[rank].lacks][0]
    circle = list(seen)[list(seen).index(rank) :]
    lines = []
    for rank in circle[:_SHOWN]:
        _, position, fact = blocked[rank]
        where, at, source = sources[fact]
        lack = f"{_FACTS[fact.kind]} of {source} (rank {where}, position {at})"
        lines.append(
            f"    rank {rank} stands at {rows[rank][position]} (position {position}) and waits "
            f"for {lack}"
        )
    if len(circle) > _SHOWN:
        lines.append(f"    and so on, through {len(circle) - _SHOWN} more ranks")
    names = ", ".join(map(str, circle[:_SHOWN])) + (", ..." if len(circle) > _SHOWN else "")
    what = (
        f"ranks {names} wait for each other in a circle; on one of them, move what is waited "
        "for before what waits"
    )
    first = blocked[circle[0]]
    marks = [(rank, blocked[rank].position) for rank in circle[1:_SHOWN]]
    return _fault(rows, first.rank, first.position, "\n".join([what, *lines]), "deadlock", *marks)


# ---- the message ----
_SHOWN, _AROUND = 6, 5


def _clip(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a Fused whose parts are not a tuple has no repr
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 40 else text[:37] + "..."


def _fault(
    rows: Sequence[Row],
    rank: int,
    position: int | None,
    what: str,
    rule: str,
    *more: tuple[int, int],
) -> ScheduleError:
    where = (
        f"rank {rank}"
        if position is None
        else f"rank {rank}, position {position} ({_clip(rows[rank][position])})"
    )
    place = (rank, len(rows[rank]) if position is None else position)
    window = "\n".join(_window(rows, [place, *more]))
    return ScheduleError(f"{where}: {what}\n{window}", rank=rank, position=position, rule=rule)


def _window(rows: Sequence[Row], places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The actions around each place: the first one underlined by ^, the others by ~.

    A place behind the last action of a rank marks a missing one.
    """
    width = max(len(str(rank)) for rank, _ in places)
    shown: set[tuple[int, int]] = set()
    for rank, place in places:
        if (rank, place) in shown:
            continue  # underlined already, in the line of another place
        row = rows[rank]
        first, stop = max(0, place - _AROUND), min(len(row), place + _AROUND + 1)
        line, marks = f"    rank {rank:{width}} | " + "... " * (first > 0), ""
        for position in range(first, max(stop, place + 1)):
            cell = _clip(row[position]) if position < len(row) else " "
            if (rank, position) in places:
                mark = "^" if (rank, position) == places[0] else "~"
                marks += " " * (len(line) - len(marks)) + mark * len(cell)
                shown.add((rank, position))
            line += cell + " "
        yield line.rstrip() + " ..." * (stop < len(row))
        yield marks
