# SPDX-License-Identifier: Apache-2.0
"""How many bytes a rank holds at each step of its plan, by storage: two views of one tensor count
once.

Parameters, the caller's batch and constants are not counted. Where ranks live in different
processes, a receive counts from when it is posted, and a sent value until it is known to have been
received. This module follows steps and changes none.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..programs.operations import Operation, users
from ..programs.program import Program, Programs
from ..tree import Aval
from .keys import Key


@dataclass(slots=True)
class _Storage:
    """Memory that is held: its name, its size, and the number of values in it."""

    root: Hashable
    nbytes: int
    users: int = 0


class _Output(NamedTuple):
    """An output of a program that is in memory."""

    place: int
    source: (
        int | None
        # the place of the input whose memory it is in; -1: of one that the program does not read
        # itself
    )
    root: str  # the value whose memory it is in
    nbytes: int


class MemoryAccount:
    """Bytes held, by storage. ``wired``: messages cross processes, so receives have buffers and
    sends hold memory.
    """

    def __init__(self, wired: bool = False) -> None:
        self.live = 0
        self.wired = wired
        self.leaving: dict[int, list[list[Hashable]]] = {}
        self.behind: dict[Hashable, _Storage] = {}
        self.held: dict[Hashable, _Storage] = {}
        self._known: dict[int, tuple[tuple[_Output, ...], dict[tuple[int, ...], int]]] = {}

    def begin(self, key: Hashable, root: Hashable, nbytes: int) -> None:
        """Hold a value, in memory of its own or in some that is held already."""
        if key not in self.behind:
            if root not in self.held:
                self.held[root] = _Storage(root, nbytes)
                self.live += nbytes
            self.share(key, self.held[root])

    def share(self, key: Hashable, storage: _Storage | None) -> None:
        """Hold a value in the memory of another; None: in memory that is not counted."""
        if storage is not None and key not in self.behind:
            storage.users += 1
            self.behind[key] = storage

    def end(self, key: Hashable) -> None:
        """Release a value."""
        storage = self.behind.pop(key, None)
        if storage is None:
            return
        storage.users -= 1
        if not storage.users:
            del self.held[storage.root]
            self.live -= storage.nbytes

    def copy(self, key: Hashable, value: Hashable, nbytes: int | None = None) -> None:
        """Hold a copy of a value, of another size if that is given."""
        storage = self.behind.get(value)
        if storage is not None:
            self.begin(key, key, storage.nbytes if nbytes is None else nbytes)

    def leave(self, peer: int, keys: Sequence[Hashable]) -> None:
        """Hold what is sent until it is settled."""
        self.leaving.setdefault(peer, []).append([(key, peer) for key in keys])
        for key in keys:
            self.share((key, peer), self.behind.get(key))

    def settle(self, peer: int, count: int) -> None:
        """Release the oldest messages to a rank."""
        for sent in self.leaving[peer][:count]:
            for key in sent:
                self.end(key)
        del self.leaving[peer][:count]

    def run(
        self,
        program: Program,
        own: Programs,
        reads: Sequence[Key],
        writes: Sequence[Key],
        ends: Sequence[int],
    ) -> int:
        """Bytes while a program runs; afterwards its outputs are held. ``ends``: the places of the
        reads that end.
        """
        dying = self._dying(reads, ends)
        known = self._known.get(id(program))
        if known is None:
            known = self._known[id(program)] = (
                _outputs(own, program),
                _EXCESS.setdefault(program, {}),
            )
        outputs, excess = known
        if dying not in excess:
            sizes = {program.inputs[place]: self.behind[reads[place]].nbytes for place in dying}
            excess[dying] = _excess(own, program, sizes)
        during = self.live + excess[dying]
        for place, source, root, nbytes in outputs:
            key = writes[place]
            if source is None:
                self.begin(key, (key[0][0], key[1], root), nbytes)
            else:
                self.share(key, self.behind.get(key if source < 0 else reads[source]))
        return during

    def _dying(self, reads: Sequence[Key], ends: Sequence[int]) -> tuple[int, ...]:
        """The places of reads whose memory nothing else uses."""
        ending = [
            (place, storage)
            for place in ends
            if (storage := self.behind.get(reads[place])) is not None
        ]
        if all(storage.users == 1 for _, storage in ending):
            return tuple([place for place, _ in ending])
        count = Counter(storage.root for _, storage in ending)
        return tuple([place for place, storage in ending if count[storage.root] == storage.users])


def _outputs(own: Programs, program: Program) -> tuple[_Output, ...]:
    """The outputs of a program that are in memory."""
    places = {name: place for place, name in enumerate(program.inputs)}
    return tuple(
        _Output(place, places.get(held.root, -1) if held.given else None, held.root, held.nbytes)
        for place, name in enumerate(program.outputs)
        if (held := own.memory.get(name)) is not None
    )


#: What ``_excess`` returned for each program, by the places of the inputs that it may free.
_EXCESS: WeakKeyDictionary[Program, dict[tuple[int, ...], int]] = WeakKeyDictionary()


class _Moment(NamedTuple):
    """What one operation of a program changes: storages that begin, and those that end after it.

    ``several`` are operations with results that nothing uses, which begin here; ``used`` those
    whose results end. ``dropped`` are inputs that end, by storage.
    """

    begins: tuple[str, ...]
    several: tuple[tuple[Operation, tuple[int, ...]], ...]
    ends: tuple[str, ...]
    used: tuple[tuple[Operation, tuple[int, ...]], ...]
    dropped: tuple[tuple[str, ...], ...]


#: The moments of a program by its operations at the sizes of the trace, and by the inputs that it
#: may free.
_MOMENTS: WeakKeyDictionary[Programs, dict[Hashable, tuple[_Moment, ...]]] = WeakKeyDictionary()


def _items(one: Operation, readers: Sequence[Operation]) -> tuple[list[str], tuple[int, ...]]:
    """The results of an operation that returns several, and the places of those that nothing
    uses.
    """
    if not isinstance(one.value, tuple) or isinstance(one.value, Aval):
        return [], ()
    asked = {reader.args[1]: reader.name for reader in readers if reader.target is operator.getitem}
    idle = tuple(i for i, each in enumerate(one.value) if isinstance(each, Aval) and i not in asked)
    return list(asked.values()), idle


def _moments(own: Programs, program: Program, dropped: Sequence[str]) -> tuple[_Moment, ...]:
    """What each operation changes; first of all, what ends before them. Sizes do not matter."""
    last: dict[str, int] = {}
    root = {name: held.root for name, held in own.memory.items()}
    computed = {one.name for one in program.traced}
    readers = users(program.traced)
    for index, one in enumerate(program.traced):
        for used in (one.name, *one.inputs):
            last[root.get(used, used)] = index
    kept = {root.get(name, name) for name in program.outputs}
    freed: dict[int, list[tuple[str, ...]]] = {}
    for base in dict.fromkeys(root.get(name, name) for name in dropped):
        if base not in kept:
            freed.setdefault(last.get(base, -1), []).append(
                tuple(n for n in dropped if root.get(n, n) == base)
            )
    begins, several = _begins(own, program, computed, readers)
    ends: dict[int, list[str]] = {}
    for base in (base for bases in begins for base in bases if base not in kept):
        ends.setdefault(last[base], []).append(base)
    last_uses: dict[int, list[tuple[Operation, tuple[int, ...]]]] = {}
    for each in filter(None, several):
        last_uses.setdefault(last[each[0].name], []).append(each)
    first = _Moment((), (), (), (), tuple(freed.get(-1, ())))
    return (
        first,
        *(
            _Moment(
                bases,
                () if idle is None else (idle,),
                tuple(ends.get(n, ())),
                tuple(last_uses.get(n, ())),
                tuple(freed.get(n, ())),
            )
            for n, (bases, idle) in enumerate(zip(begins, several, strict=True))
        ),
    )


def _begins(
    own: Programs, program: Program, computed: Set[str], readers: Mapping[str, Sequence[Operation]]
) -> tuple[list[tuple[str, ...]], list[tuple[Operation, tuple[int, ...]] | None]]:
    """By operation: the storages that it begins, and itself with its results that nothing uses, if
    it has such.
    """
    begins: list[tuple[str, ...]] = []
    several: list[tuple[Operation, tuple[int, ...]] | None] = []
    seen: set[str] = set()
    for one in program.traced:
        items, idle = _items(one, readers.get(one.name, ()))
        held = (own.memory.get(name) for name in (one.name, *items))
        roots = dict.fromkeys(
            h.root for h in held if h is not None and h.root in computed and h.root not in seen
        )
        seen.update(roots)
        begins.append(tuple(roots))
        several.append((one, idle) if idle else None)
    return begins, several


def _excess(own: Programs, program: Program, dropped: Mapping[str, int]) -> int:
    """The most bytes that a program holds beyond those held before it; it may free the inputs
    ``dropped``, by size.
    """
    if own.eager:
        return own.during.get(program.name[:1], 0)
    traced = own if own.origin is None else own.origin[0]
    known = _MOMENTS.setdefault(traced, {})
    key = (program.traced, program.outputs, tuple(dropped))
    if key not in known:
        known[key] = _moments(own, program, tuple(dropped))

    def nbytes(names):
        return sum([own.memory[name].nbytes for name in names])

    def unused(several: Sequence[tuple[Operation, tuple[int, ...]]]) -> int:
        values = ((program.resized(one) if program.resized else one, idle) for one, idle in several)
        found = (one.value[i] for one, idle in values if isinstance(one.value, tuple) for i in idle)
        return sum(each.nbytes for each in found if isinstance(each, Aval))

    now = peak = 0
    for moment in known[key]:
        now += nbytes(moment.begins) + (unused(moment.several) if moment.several else 0)
        peak = max(peak, now)
        now -= nbytes(moment.ends) + (unused(moment.used) if moment.used else 0)
        now -= sum([max(dropped[name] for name in names) for names in moment.dropped])
    return peak
