# SPDX-License-Identifier: Apache-2.0
"""Cuts a straight-line program into segments that can be woven with another program's.

A program is cut where a collective starts, where one is waited for, where the user's marks change, and where a piece
would be long. Operations that only gradients of parameters or saved values depend on get separate segments, which
nothing waits for ("loose"). All segments of a stage share its value names. Knows graphs; no schedules, ranks or orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

    The weave, the plan and the pictures use the names, and a weave as data refers to them. The backward of what is
    inside has the same name.

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
    """A piece of a program, in the program's order; a loose piece may run at any later time.

    ``starts`` are the collectives that it starts last; ``waits`` the values of collectives it waits for first.
    ``program`` is what runs, over the names of the stage.
    """

    name: str
    program: Program
    loose: bool
    starts: tuple[Collective, ...]
    waits: tuple[str, ...]
    nanoseconds: int


#: The segments of each stage's programs, coarse and fine, as long as the programs exist.
_SEGMENTS: WeakKeyDictionary[Programs, dict[tuple[Program, bool], tuple[Segment, ...]]] = WeakKeyDictionary()
#: The collectives of each program, as long as the program exists.
_COLLECTIVES: WeakKeyDictionary[Program, tuple[Collective, ...]] = WeakKeyDictionary()


class _Key(NamedTuple):
    loose: bool
    phase: int  # how many waits it depends on, one after another
    start: int  # which of the phase's collectives it leads to; past the last: none


def segments_of(programs: Programs, program: Program, coarse: bool = False) -> tuple[Segment, ...]:
    """The segments of one of a stage's programs, in an order in which they can run.

    ``coarse`` segments are two at most: the values that others wait for, and the rest of a backward.
    """
    cached = _SEGMENTS.setdefault(programs, {})
    if (program, coarse) not in cached:
        cached[program, coarse] = tuple(_cut(programs, program, coarse))
    return cached[program, coarse]


def whole(program: Program) -> Segment:
    """A program as one segment."""
    return Segment(program.label or program.name, program, False, (), (), sum(map(nanoseconds, program.nodes)))


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """The collectives that a program, or a segment of one, starts, in order; numbered as in the whole program."""
    if program not in _COLLECTIVES:
        collectives = enumerate(c for c in map(started, program.nodes) if c is not None)
        _COLLECTIVES[program] = tuple(replace(c, number=program.numbers.get(c.value, k)) for k, c in collectives)
    return _COLLECTIVES[program]


def collective(program: Program) -> bool:
    """Whether a program, or a segment of one, starts a collective or waits for one."""
    return bool(collectives_of(program)) or any(map(waited, program.nodes))


def microseconds(program: Program) -> float:
    """How long a program is expected to take, each of its collectives waited for at once."""
    return (sum(map(nanoseconds, program.nodes)) + sum(c.nanoseconds for c in collectives_of(program))) / 1e3


def _cut(programs: Programs, program: Program, coarse: bool) -> Iterator[Segment]:
    if not program.nodes or programs.compiled or programs.eager or (coarse and program.name == "F"):
        yield whole(program)
        return
    keys, order = _keys(programs, program), _order(program)
    nodes = sorted(program.nodes, key=lambda node: (keys[node], order[node]))
    if coarse:
        pieces = [list(run) for _, run in groupby(nodes, lambda node: keys[node].loose)]
    else:
        grain = max(_GRAIN, sum(map(nanoseconds, nodes)) // _PIECES)
        pieces = _merged([piece for _, run in groupby(nodes, keys.__getitem__) for piece in _split(run, grain)], keys)
    yield from _programs(program, pieces, keys)


def _order(program: Program) -> dict[fx.Node, float]:
    """The program's order, except that waits and views come just before the first use of their result."""
    order = {node: float(index) for index, node in enumerate(program.nodes)}
    step = 1.0 / (1 + len(order))
    for node in reversed(program.nodes):
        if waited(node) or _view(node):
            order[node] = min((order[u] for u in node.users if u in order), default=float(len(order))) - step
    return order


# ---- which node goes where ------------------------------------------------------------------------------------------
def _keys(programs: Programs, program: Program) -> dict[fx.Node, _Key]:
    inside = set(program.nodes)
    main = _main(programs, program, inside)
    phases: dict[fx.Node, int] = {}
    for node in program.nodes:
        before = [phases[u] for u in node.all_input_nodes if u in inside]
        phases[node] = max(before, default=0) + (waited(node) and bool(before))
    leads, last = _leads(program, inside, phases), len(program.nodes)
    keys: dict[fx.Node, _Key] = {}
    for node in program.nodes:
        source = node.args[0] if _item(node) else None
        if isinstance(source, fx.Node) and source in keys:  # an item is in the segment of its tuple
            keys[node] = keys[source]
        else:
            keys[node] = _Key(node not in main, phases[node], leads.get(node, last))
    for node in reversed(program.nodes):  # a view is in the segment that first uses it
        users = [keys[user] for user in node.users if user in inside]
        if users and _view(node):
            keys[node] = min(users)
    return keys


def _main(programs: Programs, program: Program, inside: set[fx.Node]) -> set[fx.Node]:
    """The ancestors of outputs, input gradients and collectives: what others wait for."""
    wanted = {*programs.ys, *programs.dxs, programs.aux, *programs.new_state} - {None}
    if program.name == "W":
        wanted = set()
    return _ancestors([n for n in program.nodes if n.name in wanted or started(n)], inside)


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
    """Node -> the first collective of its phase that depends on it, by the order of the program."""
    leads: dict[fx.Node, int] = {}
    for number, node in enumerate(n for n in program.nodes if started(n)):
        for before in _ancestors([node], {n for n in inside if phases[n] == phases[node]}):
            leads.setdefault(before, number)
    return leads


def _view(node: fx.Node) -> bool:
    return not (nanoseconds(node) or started(node) or waited(node) or _item(node))


def _item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


# ---- pieces ---------------------------------------------------------------------------------------------------------
def _mark(node: fx.Node) -> str | None:
    mark = annotation(node, MARK)
    return mark if isinstance(mark, str) else None


def _works(node: fx.Node) -> bool:
    """Whether a node takes time or starts a collective."""
    return bool(nanoseconds(node) or started(node))


def _split(run: Iterable[fx.Node], grain: int) -> Iterator[list[fx.Node]]:
    """A run of nodes of one key, cut where the mark changes and where it gets long; items stay with their tuple."""
    piece: list[fx.Node] = []
    length, mark = 0, None
    for node in run:
        new = _mark(node) if _works(node) else None  # a wait goes with what uses its value
        turn = (mark and new and new != mark) or (waited(node) and length > 0)
        if piece and not _item(node) and (turn or (length >= grain and not started(node))):
            yield piece
            piece, length, mark = [], 0, None
        piece.append(node)
        length += nanoseconds(node)
        mark = mark or new
    if piece:
        yield piece


def _merged(pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]) -> list[list[fx.Node]]:
    """Pieces that cost nothing join the next one of their kind, or, if they wait for nothing, the one before."""
    out: list[list[fx.Node]] = []
    for _, run in groupby(pieces, lambda piece: keys[piece[0]].loose):
        alike: list[list[fx.Node]] = []
        for piece in run:
            if alike and not any(map(_works, alike[-1])):
                alike[-1] = alike[-1] + piece
            else:
                alike.append(piece)
        if len(alike) > 1 and not any(_works(n) or waited(n) for n in alike[-1]):
            alike[-2:] = [alike[-2] + alike[-1]]
        out += alike
    return out


def _programs(program: Program, pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]) -> Iterator[Segment]:
    names = list(_names(program.name, pieces, keys))
    later: list[set[str]] = [set(program.outputs)]  # what is read after each piece, from the last on
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
        part = Program.from_nodes(program.name, piece, inputs, outputs, constants, adds)
        several = index in drawing and len(drawing) > 1
        stream = (index != drawing[0], index != drawing[-1]) if several else None
        part = replace(part, label=names[index], numbers=numbers, stream=stream)
        waits = (n.all_input_nodes[0].name for n in piece if waited(n))
        yield Segment(
            names[index], part, keys[piece[0]].loose, collectives_of(part),
            tuple(name for name in waits if name not in computed), sum(map(nanoseconds, piece)),
        )  # fmt: skip


def _reads(program: Program, piece: list[fx.Node]) -> dict[str, None]:
    """The values that a piece needs, by name. What a collective sends must exist until it is waited for."""
    used = [u for n in piece for u in n.all_input_nodes]
    used += [u for n in piece if waited(n) for source in n.all_input_nodes[:1]
             if source in program.nodes and started(source) for u in source.all_input_nodes]  # fmt: skip
    return dict.fromkeys(u.name for u in used)


def _names(letter: str, pieces: list[list[fx.Node]], keys: dict[fx.Node, _Key]) -> Iterator[str]:
    """The user's marks; a piece without one is called by its program and number. A repeated name gets a number."""
    seen: Counter[str] = Counter()
    for index, piece in enumerate(pieces):
        marks = map(_mark, [n for n in piece if _works(n)] or piece)
        name = next(filter(None, marks), None)
        if name is None:
            name = f"{letter}{index}"
        elif keys[piece[0]].loose:
            name = f"{name}/weights" if letter in "BW" else f"{name}/saved"
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}.{seen[name]}"
