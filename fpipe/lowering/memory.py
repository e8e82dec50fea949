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
from collections.abc import Hashable, Mapping, Sequence

from ..programs.operations import Operation, users
from ..programs.program import Held, Program, Programs
from ..tree import Aval
from .keys import Key


class MemoryAccount:
    """Bytes held, by storage. ``wired``: messages cross processes, so receives have buffers and
    sends hold memory.
    """

    def __init__(self, wired: bool = False) -> None:
        self.live = 0
        self.wired = wired
        self.behind: dict[Hashable, Hashable] = {}  # by value: its storage
        self._sizes: dict[Hashable, int] = {}  # of storages
        self._users: dict[Hashable, int] = {}  # of storages: how many values are in them
        self._leaving: dict[int, list[list[Hashable]]] = {}
        self._excess: dict[tuple[Program, tuple[int, ...]], int] = {}
        self._outputs: dict[Program, list[tuple[int, Held]]] = {}  # those in memory, by place

    def begin(self, key: Hashable, root: Hashable, nbytes: int) -> None:
        """Hold a value, in memory of its own or in some that is held already."""
        if key not in self.behind:
            if root not in self._sizes:
                self._sizes[root] = nbytes
                self.live += nbytes
            self.share(key, root)

    def share(self, key: Hashable, root: Hashable | None) -> None:
        """Hold a value in the memory of another; None: in memory that is not counted."""
        if root is not None and key not in self.behind:
            self._users[root] = self._users.get(root, 0) + 1
            self.behind[key] = root

    def end(self, key: Hashable) -> None:
        """Release a value."""
        root = self.behind.pop(key, None)
        if root is None:
            return
        self._users[root] -= 1
        if not self._users[root]:
            self.live -= self._sizes.pop(root)

    def copy(self, key: Hashable, value: Hashable, nbytes: int | None = None) -> None:
        """Hold a copy of a value, of another size if that is given."""
        root = self.behind.get(value)
        if root is not None:
            self.begin(key, key, self._sizes[root] if nbytes is None else nbytes)

    def leave(self, peer: int, keys: Sequence[Hashable]) -> None:
        """Hold what is sent until it is settled."""
        self._leaving.setdefault(peer, []).append([(key, peer) for key in keys])
        for key in keys:
            self.share((key, peer), self.behind.get(key))

    def settle(self, peer: int, count: int) -> None:
        """Release the oldest messages to a rank."""
        for sent in self._leaving[peer][:count]:
            for key in sent:
                self.end(key)
        del self._leaving[peer][:count]

    def run(
        self,
        program: Program,
        programs: Programs,
        reads: Sequence[Key],
        writes: Sequence[Key],
        ends: Sequence[int],
    ) -> int:
        """Bytes while a program runs; afterwards its outputs are held. ``ends``: the places of the
        reads that end.
        """
        freed = self._freed(reads, ends)
        excess = self._excess.get((program, freed))
        if excess is None:
            sizes = {
                program.inputs[place]: self._sizes[self.behind[reads[place]]] for place in freed
            }
            excess = self._excess[program, freed] = _excess(programs, program, sizes)
        during = self.live + excess
        if program not in self._outputs:
            found = [programs.memory.get(name) for name in program.outputs]
            self._outputs[program] = [(n, held) for n, held in enumerate(found) if held is not None]
        for place, held in self._outputs[program]:
            key = writes[place]
            if not held.given:
                self.begin(key, (key[0][0], key[1], held.root), held.nbytes)
            elif held.root in program.inputs:
                source = program.inputs.index(held.root)
                self.share(key, self.behind.get(reads[source]))
        return during

    def _freed(self, reads: Sequence[Key], ends: Sequence[int]) -> tuple[int, ...]:
        """The places of reads whose memory nothing else uses."""
        freed = []
        roots = [self.behind.get(reads[place]) for place in ends]
        for place, root in zip(ends, roots, strict=True):
            users = self._users.get(root)
            if users == 1 or users == roots.count(root):
                freed.append(place)
        return tuple(freed)


def _unused(one: Operation, readers: Sequence[Operation]) -> tuple[list[str], list[int]]:
    """The results of an operation that returns several, and the places of those that nothing
    uses.
    """
    if not isinstance(one.value, tuple) or isinstance(one.value, Aval):
        return [], []
    items = {reader.args[1]: reader.name for reader in readers if reader.target is operator.getitem}
    unused = [i for i, item in enumerate(one.value) if isinstance(item, Aval) and i not in items]
    return list(items.values()), unused


def _excess(programs: Programs, program: Program, freed: Mapping[str, int]) -> int:
    """The most bytes that a program holds beyond those held before it; it may free the inputs
    ``freed``, by size.
    """
    if programs.eager:
        return programs.during.get(program.name[:1], 0)
    memory = programs.memory
    readers = users(program.traced)
    roots = {name: held.root for name, held in memory.items()}
    last: dict[str, int] = {}
    for index, one in enumerate(program.traced):
        for name in (one.name, *one.inputs):
            last[roots.get(name, name)] = index
    kept = {roots.get(name, name) for name in program.outputs}
    storages: dict[str, int] = {}
    for name, nbytes in freed.items():
        root = roots.get(name, name)
        storages[root] = max(nbytes, storages.get(root, 0))
    ends = Counter[int]()  # bytes that end after each operation; -1: before the first
    for root in storages.keys() - kept:
        ends[last.get(root, -1)] += storages[root]

    to_begin = {one.name for one in program.traced}
    now = -ends[-1]
    peak = 0
    for index, one in enumerate(program.traced):
        items, unused = _unused(one, readers.get(one.name, ()))
        for name in (one.name, *items):
            root = roots.get(name)
            if root in to_begin:
                to_begin.remove(root)
                now += memory[root].nbytes
                if root not in kept:
                    ends[last[root]] += memory[root].nbytes
        if unused:
            value = (program.resized(one) if program.resized else one).value
            assert isinstance(value, tuple)
            nbytes = sum(item.nbytes for i in unused if isinstance(item := value[i], Aval))
            now += nbytes
            ends[last[one.name]] += nbytes
        peak = max(peak, now)
        now -= ends[index]
    return peak
