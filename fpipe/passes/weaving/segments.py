# SPDX-License-Identifier: Apache-2.0
"""Cuts a straight-line program into segments that can be woven with another program's.

A program is cut where a collective starts, where one is waited for, and where a piece would be
long. Operations that only gradients of parameters or saved values depend on get separate segments,
which nothing waits for ("loose"). All segments of a stage share its value names. Knows graphs; no
schedules, ranks or orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple
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
    loose: bool
    starts: tuple[Collective, ...]
    waits: tuple[str, ...]
    nanoseconds: int


#: The segments of each stage's programs, coarse and fine, as long as the programs exist.
_SEGMENTS: WeakKeyDictionary[Programs, dict[tuple[Program, bool], tuple[Segment, ...]]] = (
    WeakKeyDictionary()
)
#: The collectives of each program, as long as the program exists.
_COLLECTIVES: WeakKeyDictionary[Program, tuple[Collective, ...]] = WeakKeyDictionary()


class _Key(NamedTuple):
    loose: bool
    phase: int  # how many waits it depends on, one after another
    start: int  # which of the phase's collectives it leads to; past the last: none


def segments_of(programs: Programs, program: Program, coarse: bool = False) -> tuple[Segment, ...]:
    """The segments of one of a stage's programs, in an order in which they can run.

    ``coarse`` segments are two at most: the values that others wait for, and the rest of a
    backward.
    """
    cached = _SEGMENTS.setdefault(programs, {})
    if (program, coarse) not in cached:
        cached[program, coarse] = tuple(_cut(programs, program, coarse))
    return cached[program, coarse]


def whole(program: Program) -> Segment:
    """A program as one segment."""
    return Segment(
        program.label or program.name,
        program,
        False,
        (),
        (),
        sum(map(nanoseconds, program.operations)),
    )


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """The collectives that a program, or a segment of one, starts, in order; numbered as in the
    whole program.
    """
    if program not in _COLLECTIVES:
        operations = program.operations if program.collective else ()
        collectives = enumerate(c for c in map(started, operations) if c is not None)
        _COLLECTIVES[program] = tuple(
            replace(c, number=program.numbers.get(c.value, k)) for k, c in collectives
        )
    return _COLLECTIVES[program]


def microseconds(program: Program) -> float:
    """How long a program is expected to take, each of its collectives waited for at once."""
    return (
        sum(map(nanoseconds, program.operations))
        + sum(c.nanoseconds for c in collectives_of(program))
    ) / 1e3


def _cut(programs: Programs, program: Program, coarse: bool) -> Iterator[Segment]:
    if (
        not program.operations
        or programs.compiled
        or programs.eager
        or (coarse and program.name == "F")
    ):
        yield whole(program)
        return
    keys, order = _keys(programs, program), _order(program)
    nodes = sorted(program.operations, key=lambda node: (keys[node], order[node]))
    if coarse:
        pieces = [list(run) for _, run in groupby(nodes, lambda node: keys[node].loose)]
    else:
        grain = max(_GRAIN, sum(map(nanoseconds, nodes)) // _PIECES)
        pieces = _merged(
            [piece for _, run in groupby(nodes, keys.__getitem__) for piece in _split(run, grain)],
            keys,
        )
    yield from _programs(program, pieces, keys)


def _order(program: Program) -> dict[Operation, float]:
    """The program's order, except that waits and views come just before the first use of their
    result.
    """
    order = {node: float(index) for index, node in enumerate(program.operations)}
    step, readers = 1.0 / (1 + len(order)), users(program.operations)
    for node in reversed(program.operations):
        if waited(node) or _view(node):
            order[node] = (
                min((order[u] for u in readers.get(node.name, ())), default=float(len(order)))
                - step
            )
    return order


# ---- which node goes where ----
def _keys(programs: Programs, program: Program) -> dict[Operation, _Key]:
    uses = _Uses.of(program)
    main = _main(programs, program, uses)
    phases: dict[str, int] = {}
    for one in program.operations:
        before = [phases[name] for name in one.inputs if name in phases]
        phases[one.name] = max(before, default=0) + (waited(one) and bool(before))
    leads, last = _leads(program, uses, phases), len(program.operations)
    keys: dict[str, _Key] = {}
    for one in program.operations:
        source = one.inputs[0] if _item(one) else ""  # an item is in the segment of its tuple
        keys[one.name] = keys.get(source) or _Key(
            one not in main, phases[one.name], leads.get(one, last)
        )
    for one in reversed(program.operations):  # a view is in the segment that first uses it
        readers = [keys[reader.name] for reader in uses.readers.get(one.name, ())]
        if readers and _view(one):
            keys[one.name] = min(readers)
    return {one: keys[one.name] for one in program.operations}


class _Uses(NamedTuple):
    """The operations of a program by the value they compute, and those that read each value."""

    computed: dict[str, Operation]
    readers: dict[str, list[Operation]]

    @classmethod
    def of(cls, program: Program) -> _Uses:
        return cls({one.name: one for one in program.operations}, users(program.operations))

    def ancestors(
        self, ends: Iterable[Operation], inside: Callable[[Operation], bool]
    ) -> set[Operation]:
        """The operations inside that some depend on, with the items of their tuples."""
        seen: set[Operation] = set()
        stack = list(ends)
        while stack:
            one = stack.pop()
            if one not in seen and inside(one):
                seen.add(one)
                stack += [self.computed[name] for name in one.inputs if name in self.computed]
                stack += filter(_item, self.readers.get(one.name, ()))
        return seen


def _main(programs: Programs, program: Program, uses: _Uses) -> set[Operation]:
    """The ancestors of outputs, input gradients and collectives: what others wait for."""
    wanted = {*programs.ys, *programs.dxs, programs.aux, *programs.new_state} - {None}
    if program.name == "W":
        wanted = set()
    return uses.ancestors(
        [one for one in program.operations if one.name in wanted or started(one)], lambda one: True
    )


def _leads(program: Program, uses: _Uses, phases: Mapping[str, int]) -> dict[Operation, int]:
    """Operation -> the first collective of its phase that depends on it, by the order of the
    program.
    """
    leads: dict[Operation, int] = {}
    for number, one in enumerate(filter(started, program.operations)):
        for before in uses.ancestors(
            [one], lambda other, phase=phases[one.name]: phases[other.name] == phase
        ):
            leads.setdefault(before, number)
    return leads


def _view(one: Operation) -> bool:
    return not (nanoseconds(one) or started(one) or waited(one) or _item(one))


def _item(one: Operation) -> bool:
    return getattr(one.target, "__name__", "") == "getitem" and isinstance(one.args[0], Ref)


# ---- pieces ----
def _works(node: Operation) -> bool:
    """Whether a node takes time or starts a collective."""
    return bool(nanoseconds(node) or started(node))


def _split(run: Iterable[Operation], grain: int) -> Iterator[list[Operation]]:
    """A run of nodes of one key, cut before a wait and where it gets long; items stay with their
    tuple.
    """
    piece: list[Operation] = []
    length = 0
    for node in run:
        long = length >= grain and not started(node)
        if piece and not _item(node) and (long or (waited(node) and length > 0)):
            yield piece
            piece = []
            length = 0
        piece.append(node)
        length += nanoseconds(node)
    if piece:
        yield piece


def _merged(pieces: list[list[Operation]], keys: dict[Operation, _Key]) -> list[list[Operation]]:
    """Pieces that cost nothing join the next one of their kind, or, if they wait for nothing, the
    one before.
    """
    out: list[list[Operation]] = []
    for _, run in groupby(pieces, lambda piece: keys[piece[0]].loose):
        alike: list[list[Operation]] = []
        for piece in run:
            if alike and not any(map(_works, alike[-1])):
                alike[-1] = alike[-1] + piece
            else:
                alike.append(piece)
        if len(alike) > 1 and not any(_works(n) or waited(n) for n in alike[-1]):
            alike[-2:] = [alike[-2] + alike[-1]]
        out += alike
    return out


def _programs(
    program: Program, pieces: list[list[Operation]], keys: dict[Operation, _Key]
) -> Iterator[Segment]:
    later: list[set[str]] = [
        set(program.outputs)
    ]  # what is read after each piece, from the last on
    for piece in reversed(pieces[1:]):
        later.append(later[-1] | set(_reads(program, piece)))
    numbers = {c.value: c.number for c in collectives_of(program)}
    drawing = [i for i, piece in enumerate(pieces) if any(map(draws, piece))]
    for index, (piece, wanted) in enumerate(zip(pieces, reversed(later), strict=True)):
        computed, used = {n.name for n in piece}, _reads(program, piece)
        constants = {k: v for k, v in program.constants.items() if k in used}
        adds = {n: into for n, into in program.adds.items() if n in computed}
        inputs = [n for n in used if n not in computed and n not in constants]
        inputs += [into for many in adds.values() for into in many]
        outputs = [n.name for n in piece if n.name in wanted]
        part = Program.of(program.name, piece, inputs, outputs, constants, adds)
        several = index in drawing and len(drawing) > 1
        stream = (index != drawing[0], index != drawing[-1]) if several else None
        name = f"{program.name}{index}"
        part = replace(part, label=name, numbers=numbers, stream=stream)
        waits = (n.inputs[0] for n in piece if waited(n))
        yield Segment(
            name,
            part,
            keys[piece[0]].loose,
            collectives_of(part),
            tuple(name for name in waits if name not in computed),
            sum(map(nanoseconds, piece)),
        )


def _reads(program: Program, piece: list[Operation]) -> dict[str, None]:
    """The values that a piece needs, by name. What a collective sends must exist until it is waited
    for.
    """
    sent = {one.name: one.inputs for one in program.operations if started(one)}
    used = [name for one in piece for name in one.inputs]
    used += [name for one in piece if waited(one) for name in sent.get(one.inputs[0], ())]
    return dict.fromkeys(used)
