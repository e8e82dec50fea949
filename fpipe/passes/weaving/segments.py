# SPDX-License-Identifier: Apache-2.0
"""Cuts a straight-line program into segments that can be woven with another program's.

A program is cut where a collective starts, where one is waited for, and where a piece would be
long. Operations that only gradients of parameters or saved values depend on get separate segments,
which nothing waits for ("loose"). All segments of a stage share its value names. Knows graphs; no
schedules, ranks or orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from ...programs.internals import draws
from ...programs.operations import Operation, Ref, users
from ...programs.program import Program, Programs
from .estimates import Collective, nanoseconds, started, waited

_PIECES = 8  #: a program is cut in about so many pieces at least, if they are worth an instruction
_GRAIN = 40_000  #: nanoseconds; shorter pieces are not worth it


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of a program, in the program's order; a loose piece may run at any later time.

    ``starts`` are the collectives that it starts last; ``waits`` the values of collectives it waits
    for first. ``program`` is what runs, over the names of the stage.
    """

    name: str
    program: Program
    nanoseconds: int
    loose: bool = False
    starts: tuple[Collective, ...] = ()
    waits: tuple[str, ...] = ()


_Readers: TypeAlias = Mapping[str, Sequence[Operation]]

#: The segments of each stage's programs, coarse and fine, as long as the programs exist.
_SEGMENTS: WeakKeyDictionary[Programs, dict[tuple[Program, bool], Sequence[Segment]]] = (
    WeakKeyDictionary()
)
#: The collectives of each program, as long as the program exists.
_COLLECTIVES: WeakKeyDictionary[Program, tuple[Collective, ...]] = WeakKeyDictionary()


def segments_of(programs: Programs, program: Program, coarse: bool = False) -> Sequence[Segment]:
    """The segments of one of a stage's programs, in an order in which they can run.

    ``coarse`` segments are two at most: the values that others wait for, and the rest of a
    backward.
    """
    cached = _SEGMENTS.setdefault(programs, {})
    if (program, coarse) not in cached:
        cached[program, coarse] = _cut(programs, program, coarse)
    return cached[program, coarse]


def whole(program: Program) -> Segment:
    """A program as one segment."""
    return Segment(program.label or program.name, program, _total(program.operations))


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """The collectives that a program, or a segment of one, starts, in order; numbered as in the
    whole program.
    """
    if program not in _COLLECTIVES:
        if program.collective:
            operations = program.operations
        else:
            operations = ()
        collectives = filter(None, map(started, operations))
        numbered = [
            replace(collective, number=program.numbers.get(collective.value, number))
            for number, collective in enumerate(collectives)
        ]
        _COLLECTIVES[program] = tuple(numbered)
    return _COLLECTIVES[program]


def microseconds(program: Program) -> float:
    """How long a program is expected to take, each of its collectives waited for at once."""
    transfers = sum(c.nanoseconds for c in collectives_of(program))
    return (_total(program.operations) + transfers) / 1e3


def _total(operations: Iterable[Operation]) -> int:
    return sum(map(nanoseconds, operations))


def _cut(programs: Programs, program: Program, coarse: bool) -> Sequence[Segment]:
    runs_whole = not program.operations or programs.compiled or programs.eager
    if runs_whole or (coarse and program.name == "F"):
        return [whole(program)]
    places = _places(programs, program)
    order = _order(program)
    operations = sorted(program.operations, key=lambda one: (places[one], order[one]))
    if coarse:
        grain = math.inf
    else:
        grain = max(_GRAIN, _total(operations) // _PIECES)
    pieces = list(_pieces(operations, places, grain))
    return list(_segments(program, pieces, places))


def _order(program: Program) -> dict[Operation, float]:
    """The program's order, except that waits and views come just before the first use of their
    result.
    """
    order = {one: float(index) for index, one in enumerate(program.operations)}
    readers = users(program.operations)
    end = float(len(order))
    step = 1.0 / (1 + end)
    for one in reversed(program.operations):
        if waited(one) or _view(one):
            uses = [order[reader] for reader in readers.get(one.name, ())]
            order[one] = min(uses, default=end) - step
    return order


# ---- which operation goes where ----
class _Place(NamedTuple):
    """The segments are in this order; those of two places are two."""

    loose: bool
    phase: int  # how many waits it depends on, one after another
    start: int  # which of the phase's collectives it leads to; past the last: none


def _places(programs: Programs, program: Program) -> dict[Operation, _Place]:
    readers = users(program.operations)
    phases: dict[str, int] = {}
    for one in program.operations:
        before = [phases[name] for name in one.inputs if name in phases]
        phases[one.name] = max(before, default=0) + (waited(one) and bool(before))
    awaited = _awaited(programs, program, readers)
    leads = _leads(program, readers, phases)
    last = len(program.operations)
    places: dict[str, _Place] = {}
    for one in program.operations:
        name = one.name
        place = _Place(name not in awaited, phases[name], leads.get(name, last))
        if _item(one):  # it is in the segment of its tuple
            place = places.get(one.inputs[0], place)
        places[name] = place
    for one in reversed(program.operations):  # a view is in the segment that first uses it
        uses = [places[reader.name] for reader in readers.get(one.name, ())]
        if uses and _view(one):
            places[one.name] = min(uses)
    return {one: places[one.name] for one in program.operations}


def _awaited(programs: Programs, program: Program, readers: _Readers) -> set[str]:
    """What others wait for, and all that it depends on: outputs, input gradients, collectives."""
    ends = {one.name for one in program.operations if started(one)}
    if program.name != "W":
        results = *programs.ys, *programs.dxs, programs.aux, *programs.new_state
        ends.update(filter(None, results))
    return _ancestors(program.operations, ends, readers)


def _leads(program: Program, readers: _Readers, phases: Mapping[str, int]) -> dict[str, int]:
    """The first collective of its phase that depends on a value, by the order of the program."""
    leads: dict[str, int] = {}
    for number, one in enumerate(filter(started, program.operations)):
        phase = [other for other in program.operations if phases[other.name] == phases[one.name]]
        for before in _ancestors(phase, {one.name}, readers):
            leads.setdefault(before, number)
    return leads


def _ancestors(operations: Sequence[Operation], ends: Iterable[str], readers: _Readers) -> set[str]:
    """Those of some operations that the ends depend on, with the items of their tuples."""
    computed = {one.name: one for one in operations}
    seen: set[str] = set()
    stack = list(ends)
    while stack:
        name = stack.pop()
        if name in seen or name not in computed:
            continue
        seen.add(name)
        stack += computed[name].inputs
        stack += [reader.name for reader in readers.get(name, ()) if _item(reader)]
    return seen


def _view(one: Operation) -> bool:
    return not (_works(one) or waited(one) or _item(one))


def _works(one: Operation) -> bool:
    """Whether an operation takes time or starts a collective."""
    return bool(nanoseconds(one) or started(one))


def _item(one: Operation) -> bool:
    return getattr(one.target, "__name__", "") == "getitem" and isinstance(one.args[0], Ref)


# ---- pieces ----
def _pieces(
    operations: Iterable[Operation], places: Mapping[Operation, _Place], grain: float
) -> Iterator[list[Operation]]:
    """Operations cut where their place changes, before a wait, and where a piece gets long.

    What takes no time joins the next piece of its kind, or, if it waits for nothing, the one
    before. Items stay with their tuple.
    """
    for _, alike in groupby(operations, lambda one: places[one].loose):
        pieces: list[list[Operation]] = [[]]
        length = 0
        for one in alike:
            piece = pieces[-1]
            if any(map(_works, piece)) and not _item(one):
                moved = places[one] != places[piece[-1]]
                long = length >= grain and not started(one)
                if moved or long or (waited(one) and length):
                    pieces.append([])
                    length = 0
            pieces[-1].append(one)
            length += nanoseconds(one)
        if len(pieces) > 1 and not any(_works(one) or waited(one) for one in pieces[-1]):
            pieces[-2:] = [pieces[-2] + pieces[-1]]
        yield from pieces


def _segments(
    program: Program, pieces: Sequence[list[Operation]], places: Mapping[Operation, _Place]
) -> Iterator[Segment]:
    reads = [_reads(program, piece) for piece in pieces]
    numbers = {c.value: c.number for c in collectives_of(program)}
    drawing = [index for index, piece in enumerate(pieces) if any(map(draws, piece))]
    for index, (piece, used) in enumerate(zip(pieces, reads, strict=True)):
        later = {*program.outputs}.union(*reads[index + 1 :])
        computed = {one.name for one in piece}
        constants = {name: value for name, value in program.constants.items() if name in used}
        adds = {name: into for name, into in program.adds.items() if name in computed}
        inputs = [name for name in used if name not in computed and name not in constants]
        inputs += [into for targets in adds.values() for into in targets]
        outputs = [one.name for one in piece if one.name in later]
        part = Program.of(program.name, piece, inputs, outputs, constants, adds)
        stream = None
        if index in drawing and len(drawing) > 1:
            stream = (index != drawing[0], index != drawing[-1])
        name = f"{program.name}{index}"
        part = replace(part, label=name, numbers=numbers, stream=stream)
        waits = [one.inputs[0] for one in piece if waited(one)]
        yield Segment(
            name,
            part,
            _total(piece),
            places[piece[0]].loose,
            collectives_of(part),
            tuple(value for value in waits if value not in computed),
        )


def _reads(program: Program, piece: list[Operation]) -> dict[str, None]:
    """The values that a piece needs, by name. What a collective sends must exist until it is waited
    for.
    """
    sent = {one.name: one.inputs for one in program.operations if started(one)}
    used = [name for one in piece for name in one.inputs]
    used += [name for one in piece if waited(one) for name in sent.get(one.inputs[0], ())]
    return dict.fromkeys(used)
