# SPDX-License-Identifier: Apache-2.0
"""Cuts a straight-line program into segments that can be woven with another program's.

A program is cut where a collective starts, where one is waited for, where the user's marks change, and where a piece
would be long. What only gradients of parameters or saved values hang on goes into segments of its own, which nothing
waits for ("loose"). All segments of a stage share its value names. Knows graphs; no schedules, ranks or orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import fx

from ...programs.graphs import annotation, draws
from ...programs.marks import MARK, marked
from ...programs.program import Program
from ...programs.stage_programs import Programs
from .estimates import Collective, nanoseconds, started, waited

_PIECES = 8  #: a program is cut in about so many pieces at least, if they are worth an instruction
_GRAIN = 40_000  #: nanoseconds; shorter pieces are not worth it


def segment(name: str) -> AbstractContextManager[None]:
    """Name what a stage computes inside a ``with``.

    The weave, the plan and the pictures use the names, and a weave of one's own speaks of them. The backward of what
    is inside has the same name.

    >>> import fpipe, torch
    >>> def stage(p, x):
    ...     with fpipe.segment("attention"):
    ...         x = torch.tanh(x @ p)
    ...     with fpipe.segment("mlp"):
    ...         return torch.relu(x @ p)
    >>> programs = fpipe.trace(stage, torch.eye(2), torch.ones(1, 2))
    >>> [s.name for s in segments_of(programs, programs.f)]
    ['attention', 'mlp']
    """
    return marked(name)


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of a program, in the program's order but for loose pieces, which may come as late as one likes.

    ``starts`` are the collectives that it starts last; ``waits`` the values of collectives it waits for first.
    ``program`` is what runs, over the names of the stage.
    """

    name: str
    program: Program
    loose: bool
    starts: tuple[Collective, ...]
    waits: tuple[str, ...]
    nanoseconds: int


#: The segments of each stage's programs, coarse and fine, as long as the programs live.
_SEGMENTS: WeakKeyDictionary[Programs, dict[tuple[Program, bool], tuple[Segment, ...]]] = WeakKeyDictionary()


class _Key(NamedTuple):
    loose: bool
    phase: int  # how many waits it hangs on, one after another
    start: int  # which of the phase's collectives it leads to; past the last: none


def segments_of(own: Programs, program: Program, coarse: bool = False) -> tuple[Segment, ...]:
    """The segments of one of a stage's programs, in an order in which they can run.

    ``coarse`` ones are two at most: what others wait for, and of a backward what nobody waits for.
    """
    cached = _SEGMENTS.setdefault(own, {})
    key = program, coarse
    if key not in cached:
        cached[key] = tuple(_cut(own, program, coarse))
    return cached[key]


def whole(program: Program) -> Segment:
    """A program as one segment."""
    cost = sum(map(nanoseconds, program.nodes))
    return Segment(program.label or program.name, program, False, (), (), cost)


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """What a program, or a segment of one, starts in its order; numbered as in the whole program."""
    found = [c for c in map(started, program.nodes) if c is not None]
    return tuple(replace(c, number=program.numbers.get(c.value, k)) for k, c in enumerate(found))


def _cut(own: Programs, program: Program, coarse: bool) -> Iterator[Segment]:
    if not program.nodes or own.compiled or own.eager or (coarse and program.name == "F"):
        yield whole(program)
        return
    keys = _keys(own, program)
    order = _order(program)
    nodes = sorted(program.nodes, key=lambda node: (keys[node], order[node]))
    if coarse:
        pieces = [list(run) for _, run in groupby(nodes, lambda node: keys[node].loose)]
        yield from _programs(own, program, pieces, keys)
        return
    grain = max(_GRAIN, sum(map(nanoseconds, nodes)) // _PIECES)
    pieces = [piece for _, run in groupby(nodes, keys.__getitem__) for piece in _split(list(run), grain)]
    pieces = _merged(pieces, keys)
    yield from _programs(own, program, pieces, keys)


def _order(program: Program) -> dict[fx.Node, float]:
    """The program's order, but that waits and views stand before the first use of what they bring."""
    order = {node: float(index) for index, node in enumerate(program.nodes)}
    step = 1.0 / (1 + len(order))
    for node in reversed(program.nodes):
        if waited(node) or _view(node):
            order[node] = min((order[u] for u in node.users if u in order), default=float(len(order))) - step
    return order


# ---- which node goes where ------------------------------------------------------------------------------------------
def _keys(own: Programs, program: Program) -> dict[fx.Node, _Key]:
    inside = set(program.nodes)
    main = _main(own, program, inside)
    phases: dict[fx.Node, int] = {}
    for node in program.nodes:
        before = max((phases[u] for u in node.all_input_nodes if u in inside), default=0)
        phases[node] = before + (waited(node) and any(u in inside for u in node.all_input_nodes))
    leads = _leads(program, inside, phases)
    last = len(program.nodes)
    keys: dict[fx.Node, _Key] = {}
    for node in program.nodes:
        source = node.args[0] if _item(node) else None
        if isinstance(source, fx.Node) and source in keys:  # a tuple is handed on by its items
            keys[node] = keys[source]
        else:
            keys[node] = _Key(node not in main, phases[node], leads.get(node, last))
    for node in reversed(program.nodes):  # a view is made where it is first looked at
        users = [keys[user] for user in node.users if user in inside]
        if users and _view(node):
            keys[node] = min(users)
    return keys


def _main(own: Programs, program: Program, inside: set[fx.Node]) -> set[fx.Node]:
    """What others wait for: all that outputs, input gradients and collectives hang on."""
    wanted = {*own.ys, *own.dxs, own.aux, *own.new_state} - {None}
    if program.name == "W" or not wanted & {n.name for n in inside}:
        ends = [n for n in program.nodes if started(n)]
    else:
        ends = [n for n in program.nodes if n.name in wanted or started(n)]
    return _ancestors(ends, inside)


def _ancestors(ends: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in seen and node in inside:
            seen.add(node)
            stack += node.all_input_nodes
            stack += [user for user in node.users if _item(user)]
    return seen


def _leads(program: Program, inside: set[fx.Node], phases: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Node -> the first collective of its own phase that hangs on it, by the order of the program."""
    found: dict[fx.Node, int] = {}
    for number, node in enumerate(n for n in program.nodes if started(n)):
        same = {n for n in inside if phases[n] == phases[node]}
        for before in _ancestors([node], same):
            found.setdefault(before, number)
    return found


def _view(node: fx.Node) -> bool:
    return not (nanoseconds(node) or started(node) or waited(node) or _item(node))


def _item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


# ---- pieces ---------------------------------------------------------------------------------------------------------
def _mark(node: fx.Node) -> str | None:
    mark = annotation(node, MARK)
    return mark if isinstance(mark, str) else None


def _split(run: list[fx.Node], grain: int) -> Iterator[list[fx.Node]]:
    """A run of nodes of one key, cut where the mark changes and where it gets long; items stay with their tuple."""
    piece: list[fx.Node] = []
    length, mark = 0, None
    for node in run:
        own = _mark(node) if nanoseconds(node) or started(node) else None  # a wait goes with what uses its value
        turn = own is not None and mark is not None and own != mark
        turn = turn or (waited(node) and length > 0)
        if piece and not _item(node) and (turn or (length >= grain and not started(node))):
            yield piece
            piece, length, mark = [], 0, None
        piece.append(node)
        length += nanoseconds(node)
        mark = mark or own
    if piece:
        yield piece


def _merged(pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]) -> list[list[fx.Node]]:
    """Pieces that cost nothing go with their neighbour: with the next one of their kind, or else the one before."""
    out: list[list[fx.Node]] = []
    carried: list[fx.Node] = []
    for piece in pieces:
        loose = keys[piece[0]].loose
        if carried and keys[carried[0]].loose != loose:
            same = out and keys[out[-1][0]].loose == keys[carried[0]].loose
            if same and not any(map(waited, carried)):
                out[-1] += carried
            else:
                out.append(carried)
            carried = []
        piece = carried + piece
        carried = []
        if any(nanoseconds(n) or started(n) for n in piece):  # what only waits may join what follows
            out.append(piece)
        else:
            carried = piece
    if carried and out and keys[out[-1][0]].loose == keys[carried[0]].loose and not any(map(waited, carried)):
        out[-1] += carried
    elif carried:
        out.append(carried)
    return out


def _programs(
    own: Programs, program: Program, pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]
) -> Iterator[Segment]:
    names = _names(program.name, pieces, keys)
    later: list[set[str]] = [set(program.outputs)]  # what is wanted after each piece, from the last on
    for piece in reversed(pieces[1:]):
        later.append(later[-1] | set(_reads(program, piece)))
    numbers = {c.value: c.number for c in collectives_of(program)}
    drawing = [i for i, piece in enumerate(pieces) if any(map(draws, piece))]
    for index, (piece, wanted) in enumerate(zip(pieces, reversed(later), strict=True)):
        made = {n.name for n in piece}
        waits = tuple(n.all_input_nodes[0].name for n in piece if waited(n))
        waits = tuple(name for name in waits if name not in made)
        used = _reads(program, piece)
        inside = {k: v for k, v in program.constants.items() if k in used}
        adds = {n: into for n, into in program.adds.items() if n in made}
        inputs = [n for n in used if n not in made and n not in inside]
        inputs += [into for many in adds.values() for into in many]
        outputs = [n.name for n in piece if n.name in wanted]
        part = Program.from_nodes(program.name, piece, inputs, outputs, inside, adds)
        several = index in drawing and len(drawing) > 1
        stream = (index != drawing[0], index != drawing[-1]) if several else None
        part = replace(part, label=names[index], numbers=numbers, stream=stream)
        starts = tuple(c for c in map(started, piece) if c is not None)
        yield Segment(names[index], part, keys[piece[0]].loose, starts, waits, sum(map(nanoseconds, piece)))


def _reads(program: Program, piece: list[fx.Node]) -> dict[str, None]:
    """What a piece needs, by name. What a collective sends must live until it is waited for."""
    used = [u for n in piece for u in n.all_input_nodes]
    sent = {n.name: n.all_input_nodes for n in program.nodes if started(n)}
    used += [u for n in piece if waited(n) for u in sent.get(n.all_input_nodes[0].name, ())]
    return dict.fromkeys(u.name for u in used)


def _names(letter: str, pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]) -> list[str]:
    """The user's marks; a piece without one is called by its program and number. A name said twice gets a number."""
    seen: dict[str, int] = {}
    names = []
    for index, piece in enumerate(pieces):
        marks = [_mark(n) for n in piece if started(n) or nanoseconds(n)] or [_mark(n) for n in piece]
        name = next((m for m in marks if m is not None), None)
        if name is None:
            name = f"{letter}{index}"
        elif keys[piece[0]].loose:
            name = f"{name}/weights" if letter in "BW" else f"{name}/saved"
        count = seen[name] = seen.get(name, 0) + 1
        names.append(name if count == 1 else f"{name}.{count}")
    return names


__all__ = ["Segment", "collectives_of", "segment", "segments_of", "whole"]
