# SPDX-License-Identifier: Apache-2.0
"""Cuts a straight-line program into segments that can be woven with another program's.

A program is cut where a collective starts and where one is waited for. Operations that only
gradients of parameters or saved values depend on get separate segments, which nothing waits for
("loose"). All segments of a stage share its value names. Knows graphs; no schedules, ranks or
orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...programs.internals import draws
from ...programs.operations import Operation, Ref
from ...programs.program import Program, Programs
from .estimates import Collective, nanoseconds, started, waited


class Segment(NamedTuple):
    """A piece of a program, over the names of the stage; a loose piece may run at any later time.

    It starts its collectives last; ``waits`` are the values of collectives it waits for first.
    """

    program: Program
    loose: bool = False
    waits: tuple[str, ...] = ()


#: The segments of each stage's programs, as long as the programs exist.
_SEGMENTS: WeakKeyDictionary[Programs, dict[Program, Sequence[Segment]]] = WeakKeyDictionary()
#: The collectives of each program, as long as the program exists.
_COLLECTIVES: WeakKeyDictionary[Program, tuple[Collective, ...]] = WeakKeyDictionary()


def segments_of(programs: Programs, program: Program) -> Sequence[Segment]:
    """The segments of one of a stage's programs, in an order in which they can run."""
    cached = _SEGMENTS.setdefault(programs, {})
    if program not in cached:
        cached[program] = _cut(programs, program)
    return cached[program]


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """The collectives that a program, or a segment of one, starts, in order; numbered as in the
    whole program.
    """
    if program not in _COLLECTIVES:
        operations = program.operations if program.collective else ()
        collectives = filter(None, map(started, operations))
        numbered = [
            replace(collective, number=program.numbers.get(collective.value, number))
            for number, collective in enumerate(collectives)
        ]
        _COLLECTIVES[program] = tuple(numbered)
    return _COLLECTIVES[program]


def busy(program: Program) -> int:
    """How many nanoseconds a program is expected to compute."""
    return sum(map(nanoseconds, program.operations))


def microseconds(program: Program) -> float:
    """How long a program is expected to take, each of its collectives waited for at once."""
    return (busy(program) + sum(c.nanoseconds for c in collectives_of(program))) / 1e3


def _cut(programs: Programs, program: Program) -> Sequence[Segment]:
    """A forward without collectives has nothing that others could wait for earlier."""
    whole = bool(programs.compiler) or programs.eager
    if whole or (program.name == "F" and not program.collective):
        return [Segment(program)]
    places = _places(programs, program)
    in_order = sorted(program.operations, key=lambda one: places[one.name])
    pieces = [
        (place, list(piece)) for place, piece in groupby(in_order, lambda one: places[one.name])
    ]
    if len(pieces) < 2:
        return [Segment(program)]
    return list(_segments(program, pieces))


# ---- which operation goes where ----
class _Place(NamedTuple):
    """The segments are in this order; those of two places are two."""

    loose: bool
    phase: int  # the last wait that it depends on
    start: int  # which of the phase's collectives it leads to; past the last: none


def _places(programs: Programs, program: Program) -> dict[str, _Place]:
    """The place of each operation."""
    needs: dict[str, list[str]] = {}  # what comes before: also, for a draw, the one before it
    phases: dict[str, int] = {}
    drawn: list[str] = []
    waits = 0
    for one in program.operations:
        needs[one.name] = [*one.inputs]
        if draws(one):
            needs[one.name] += drawn
            drawn = [one.name]
        waits += waited(one)
        before = max([0, *(phases.get(name, 0) for name in needs[one.name])])
        phases[one.name] = waits if waited(one) else before

    last = len(program.operations)
    starts = {c.value: c.number for c in collectives_of(program)}
    leads = dict(starts)
    awaited: set[str | None] = {*starts}  # what others wait for, and all that it depends on
    if program.name != "W":
        awaited.update(programs.ys, programs.dxs, [programs.aux], programs.new_state)
    places: dict[str, _Place] = {}
    uses = defaultdict[str, list[_Place]](list)
    for one in reversed(program.operations):
        name = one.name
        places[name] = _Place(name not in awaited, phases[name], leads.get(name, last))
        takes_time = nanoseconds(one) or started(one)
        if uses[name] and not takes_time:  # a view or a wait is in the segment that first uses it
            places[name] = min(uses[name])
        for before in needs[name]:
            uses[before].append(places[name])
            if name in awaited:
                awaited.add(before)
            if phases.get(before) == phases[name]:
                leads[before] = min(leads.get(before, last), leads.get(name, last))
    for one in program.operations:
        item = getattr(one.target, "__name__", "") == "getitem" and isinstance(one.args[0], Ref)
        if item:  # it is in the segment of its tuple
            places[one.name] = places.get(one.inputs[0], places[one.name])
    return places


# ---- pieces ----
def _segments(
    program: Program, pieces: Sequence[tuple[_Place, Sequence[Operation]]]
) -> Iterator[Segment]:
    reads = [dict.fromkeys(name for one in piece for name in one.inputs) for _, piece in pieces]
    numbers = {c.value: c.number for c in collectives_of(program)}
    drawing = [index for index, (_, piece) in enumerate(pieces) if any(map(draws, piece))]
    for index, ((place, piece), used) in enumerate(zip(pieces, reads, strict=True)):
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
        part = replace(part, label=f"{program.name}{index}", numbers=numbers, stream=stream)
        waits = [one.inputs[0] for one in piece if waited(one)]
        loose = place.loose and stream is None  # several that draw keep their order
        yield Segment(part, loose, tuple(value for value in waits if value not in computed))
