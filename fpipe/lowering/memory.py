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
from ..programs.program import Program
from ..programs.stage_programs import Programs
from ..tree import Aval, Spec
from .keys import Key
from .step import Step, Use


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

    def run(self, step: Step, ends: Sequence[int]) -> int:
        """Bytes while a program runs; afterwards its outputs are held. ``ends``: the places of the
        reads that end.
        """
        own, program, reads, writes = step.owner, step.program, step.reads, step.writes
        assert own is not None and program is not None
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

    def other(self, step: Step) -> int:
        """Bytes of a step that runs no program."""
        if step.share is not None:
            self._of_copies(step)
        elif self.wired and step.kind == "RECV":
            self.begin(_buffer(step), _buffer(step), sum(map(_bytes, step.avals)))
        elif self.wired and step.kind == "SEND":
            self.leaving.setdefault(step.peer, []).append([(key, step.peer) for key in step.reads])
            for key in step.reads:
                self.share((key, step.peer), self.behind.get(key))
        elif step.kind == "SETTLE":
            for sent in self.leaving[step.peer][: step.number]:
                for key in sent:
                    self.end(key)
            del self.leaving[step.peer][: step.number]
        elif step.kind == "WAIT" or step.kind == "ZERO":
            if self.wired and step.kind == "WAIT":
                self.end(_buffer(step))
            for key, aval in zip(step.writes, step.avals, strict=True):
                self.begin(key, key, _bytes(aval))
        elif step.kind == "ADD":
            sums = step.avals or [None] * len(step.writes)
            for key, value, how, aval in zip(step.writes, step.reads, step.how, sums, strict=True):
                storage = self.behind.get(value)
                if how == "take":
                    self.share(key, storage)
                elif how == "copy" and storage is not None:
                    self.begin(key, key, storage.nbytes if aval is None else _bytes(aval))
        elif step.kind == "SUM":
            storage = self.behind.get(step.reads[0])
            for key in step.writes:
                if storage is not None:
                    self.begin(key, key, storage.nbytes)
        return self.live

    def _of_copies(self, step: Step) -> None:
        """Collectives of the copies: their memory while they are under way, then that of their
        results.
        """
        assert step.share is not None
        memory = ("of all copies", step.number)
        if step.kind != "WAIT":
            if step.kind != "RESHARD":
                self.begin(memory, memory, step.share.bytes)
            return
        for key, nbytes in zip(step.writes, step.share.landed(), strict=True):
            if key is not None and nbytes is None:
                self.share(key, self.behind[memory])
            elif key is not None and nbytes is not None:
                self.begin(key, key, nbytes)
        self.end(memory)


def curve(steps: Sequence[Step], uses: Sequence[Use], wired: bool) -> tuple[int, ...]:
    """The most bytes held during each step."""
    account, held = MemoryAccount(wired), []
    for step, (ends, needed) in zip(steps, uses, strict=True):
        during = account.run(step, ends) if step.program is not None else account.other(step)
        for key, later in zip(step.writes, needed, strict=True):
            if not later:
                account.end(key)
        for place in ends:
            account.end(step.reads[place])
        held.append(max(during, account.live))
    return tuple(held)


def _bytes(aval: Aval | Spec) -> int:
    return aval.nbytes if isinstance(aval, Aval) else aval.bytes


def _buffer(step: Step) -> Hashable:
    """The key of the memory into which a message is received."""
    return ("received", step.peer, step.number)


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
