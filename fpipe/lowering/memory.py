# SPDX-License-Identifier: Apache-2.0
"""How many bytes a rank holds at each instruction of its plan.

Bytes are counted by storage: two views of one tensor count once. Parameters, the caller's batch and
constants are not counted. Between processes a receive counts from when it is posted, and a sent
value until its send is settled. This module reads instructions and changes none.
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
    """The bytes that are held: ``live`` in all, and by storage.

    ``storages`` maps values to their storages. ``wired``: messages hold memory.
    """

    def __init__(self, wired: bool) -> None:
        self.live = 0
        self.wired = wired
        self.storages: dict[Hashable, Hashable] = {}
        self._sizes: dict[Hashable, int] = {}  # of storages
        self._users: dict[Hashable, int] = {}  # of storages: how many values are in them
        self._sent: dict[int, list[list[Hashable]]] = {}  # by peer: values of unsettled messages
        self._excess: dict[tuple[Program, tuple[int, ...]], int] = {}
        self._outputs: dict[Program, list[tuple[int, Held]]] = {}  # those in memory, by index

    def begin(self, key: Hashable, storage: Hashable, nbytes: int) -> None:
        """Hold a value in a storage, which may be held already."""
        if key not in self.storages:
            if storage not in self._sizes:
                self._sizes[storage] = nbytes
                self.live += nbytes
            self.share(key, storage)

    def share(self, key: Hashable, storage: Hashable | None) -> None:
        """Hold a value in a storage that is held already; None: it is not counted."""
        if storage is not None and key not in self.storages:
            self._users[storage] = self._users.get(storage, 0) + 1
            self.storages[key] = storage

    def end(self, key: Hashable) -> None:
        """Release a value, and its storage after the last value in it."""
        storage = self.storages.pop(key, None)
        if storage is None:
            return
        self._users[storage] -= 1
        if not self._users[storage]:
            self.live -= self._sizes.pop(storage)

    def copy(self, key: Hashable, value: Hashable, nbytes: int | None = None) -> None:
        """Hold a copy of a value, of ``nbytes`` if these are given."""
        storage = self.storages.get(value)
        if nbytes is None and storage is not None:
            nbytes = self._sizes[storage]
        if nbytes is not None:
            self.begin(key, key, nbytes)

    def send(self, peer: int, keys: Sequence[Hashable]) -> None:
        """Hold what is sent until it is settled."""
        self._sent.setdefault(peer, []).append([(key, peer) for key in keys])
        for key in keys:
            self.share((key, peer), self.storages.get(key))

    def settle(self, peer: int, count: int) -> None:
        """Release the oldest messages to a rank."""
        sent = self._sent.get(peer, [])
        for keys in sent[:count]:
            for key in keys:
                self.end(key)
        del sent[:count]

    def run(
        self,
        program: Program,
        programs: Programs,
        reads: Sequence[Key],
        writes: Sequence[Key],
        ends: Sequence[int],
    ) -> int:
        """Run a program: returns the bytes held meanwhile, and holds its outputs afterwards.

        ``ends`` are the indices of the reads that end.
        """
        freed = self._freed(reads, ends)
        excess = self._excess.get((program, freed))
        if excess is None:
            sizes = {
                program.inputs[index]: self._sizes[self.storages[reads[index]]] for index in freed
            }
            excess = self._excess[program, freed] = _excess(programs, program, sizes)
        during = self.live + excess
        if program not in self._outputs:
            memory = [programs.memory.get(name) for name in program.outputs]
            self._outputs[program] = [(n, held) for n, held in enumerate(memory) if held]
        for index, held in self._outputs[program]:
            key = writes[index]
            if not held.given:
                source, mb = key
                self.begin(key, (source[0], mb, held.root), held.nbytes)
            elif held.root in program.inputs:
                read = reads[program.inputs.index(held.root)]
                self.share(key, self.storages.get(read))
        return during

    def _freed(self, reads: Sequence[Key], ends: Sequence[int]) -> tuple[int, ...]:
        """The indices of the reads whose storage ends: all values in it do."""
        freed = []
        storages = [self.storages.get(reads[index]) for index in ends]
        for index, storage in zip(ends, storages, strict=True):
            users = self._users.get(storage)
            if users == 1 or users == storages.count(storage):
                freed.append(index)
        return tuple(freed)


def _excess(programs: Programs, program: Program, freed: Mapping[str, int]) -> int:
    """The most bytes that a program holds beyond those held before it.

    It frees the inputs ``freed`` at their last use; these are given with their sizes.
    """
    if programs.eager:
        return programs.during.get(program.name[:1], 0)
    memory = programs.memory
    readers = users(program.traced_operations)
    roots = {name: held.root for name, held in memory.items()}
    last: dict[str, int] = {}  # by storage: the last operation that uses it
    for index, one in enumerate(program.traced_operations):
        for name in (one.name, *one.inputs):
            last[roots.get(name, name)] = index
    kept = {roots.get(name, name) for name in program.outputs}
    inputs: dict[str, int] = {}  # the freed storages
    for name, nbytes in freed.items():
        root = roots.get(name, name)
        inputs[root] = max(nbytes, inputs.get(root, 0))
    ends = Counter[int]()  # bytes that end after each operation; -1: before the first
    for root in inputs.keys() - kept:
        ends[last.get(root, -1)] += inputs[root]

    to_begin = {one.name for one in program.traced_operations}
    now = -ends[-1]
    peak = 0
    for index, one in enumerate(program.traced_operations):
        items, unused = _items(one, readers.get(one.name, ()))
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


def _items(one: Operation, readers: Sequence[Operation]) -> tuple[list[str], list[int]]:
    """Of an operation that returns a tuple: the names of its items, and the indices of unused
    ones.
    """
    if not isinstance(one.value, tuple) or isinstance(one.value, Aval):
        return [], []
    items = {reader.args[1]: reader.name for reader in readers if reader.target is operator.getitem}
    unused = [i for i, item in enumerate(one.value) if isinstance(item, Aval) and i not in items]
    return list(items.values()), unused
