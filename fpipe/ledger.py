"""How many bytes a rank holds at each step of its plan, by storage: two views of one tensor count once.

Parameters, the caller's batch and constants are not counted. Where ranks live in different processes, a receive counts
from when it is posted, and a sent value until it is known to have been received. This module follows steps; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Step
from .program import Program
from .route import Key
from .stage import Aval, Held, Programs


class Ledger:
    """Bytes held, by storage. ``wired``: messages cross processes, and so have buffers of their own."""

    def __init__(self, wired: bool = False) -> None:
        self.live = 0
        self.wired = wired
        self.leaving: dict[int, list[list[Key]]] = {}
        self.root_of: dict[Key, object] = {}
        self.users: dict[object, int] = {}
        self.bytes: dict[object, int] = {}

    def begin(self, key: Key, root: object, nbytes: int) -> None:
        """A value is there, on a storage that may be there already."""
        if key in self.root_of:
            return
        self.root_of[key] = root
        if self.users.get(root, 0) == 0:
            self.bytes[root] = nbytes
            self.live += nbytes
        self.users[root] = self.users.get(root, 0) + 1

    def end(self, key: Key) -> None:
        """A value is gone, and its storage with the last of its values."""
        root = self.root_of.pop(key, None)
        if root is None:
            return
        self.users[root] -= 1
        if not self.users[root]:
            del self.users[root]
            self.live -= self.bytes.pop(root)

    def run(self, step: Step, ends: Sequence[Key]) -> int:
        """Bytes while a program runs; afterwards its outputs are held."""
        own, program = step.owner, step.program
        assert own is not None and program is not None
        names = dict(zip(step.reads, program.inputs, strict=True))
        dying = self._dying(ends)
        inside = frozenset(names[key] for key in ends if self.root_of.get(key) in dying)
        sizes = {names[key]: self.bytes[self.root_of[key]] for key in ends if self.root_of.get(key) in dying}
        during = self.live + excess(own, program, inside, sizes)
        inputs = dict(zip(program.inputs, step.reads, strict=True))
        for name, key in zip(program.outputs, step.writes, strict=True):
            held = own.memory.get(name)
            if held is None or key is None:
                continue
            if held.given:
                source = self.root_of.get(inputs.get(held.root, key))
                if source is not None:
                    self.begin(key, source, self.bytes[source])
            else:
                self.begin(key, (key[0], key[1], held.root), held.nbytes)
        return during

    def _dying(self, ends: Sequence[Key]) -> set[object]:
        """Storages whose every user ends here."""
        count: dict[object, int] = {}
        for key in ends:
            root = self.root_of.get(key)
            if root is not None:
                count[root] = count.get(root, 0) + 1
        return {root for root, n in count.items() if n == self.users[root]}

    def other(self, step: Step) -> int:
        """Bytes of a step that runs no program."""
        if self.wired and step.kind == "RECV":
            self.begin(_buffer(step), _buffer(step), sum(spec.bytes for spec in step.avals))
        elif self.wired and step.kind == "SEND":
            sends = self.leaving.setdefault(step.peer, [])
            sent = [(*key[:2], f"{key[2]} to {step.peer}") for key in step.reads]
            sends.append(sent)
            for key, left in zip(step.reads, sent, strict=True):
                root = self.root_of.get(key)
                if root is not None:
                    self.begin(left, root, self.bytes[root])
        elif step.kind == "SETTLE":
            for sent in self.leaving[step.peer][: step.number]:
                for key in sent:
                    self.end(key)
            del self.leaving[step.peer][: step.number]
        elif step.kind == "WAIT" or step.kind == "ZERO":
            if self.wired and step.kind == "WAIT":
                self.end(_buffer(step))
            for key, made in zip(step.writes, step.avals, strict=True):
                if key is not None:
                    self.begin(key, key, made.nbytes if isinstance(made, Aval) else made.bytes)
        elif step.kind == "ADD":
            for key, value, how in zip(step.writes, step.reads, step.how, strict=True):
                root = self.root_of.get(value)
                if key is None or how == "add" or root is None:
                    continue
                self.begin(key, root if how == "take" else key, self.bytes[root])
        elif step.kind == "SUM":
            root = self.root_of.get(step.reads[0])
            for key in step.writes:
                if key is not None and root is not None:
                    self.begin(key, key, self.bytes[root])
        return self.live


def _buffer(step: Step) -> Key:
    """The memory into which a message comes."""
    return (-2, step.number, f"from {step.peer}")


_EXCESS: dict[tuple[int, frozenset[str]], tuple[Program, int]] = {}


def excess(own: Programs, program: Program, dropped: frozenset[str], sizes: dict[str, int]) -> int:
    """The most bytes that a program holds beyond what it found, where it may free the inputs ``dropped``."""
    memo = (id(program), dropped)
    found = _EXCESS.get(memo)
    if found is not None and found[0] is program:
        return found[1]
    last: dict[str, int] = {}
    root = {name: held.root for name, held in own.memory.items()}
    made = {n.name for n in program.nodes}
    for index, node in enumerate(program.nodes):
        for used in (node.name, *(u.name for u in node.all_input_nodes)):
            last[root.get(used, used)] = index
    kept = {root.get(name, name) for name in program.outputs}
    freed: dict[int, int] = {}
    for base in {root.get(name, name) for name in dropped} - kept:
        size = max(sizes[name] for name in dropped if root.get(name, name) == base)
        freed[last.get(base, -1)] = freed.get(last.get(base, -1), 0) + size
    now, peak, seen = -freed.get(-1, 0), 0, set()
    for index, node in enumerate(program.nodes):
        held: Held | None = own.memory.get(node.name)
        if held is not None and held.root in made and held.root not in seen:
            seen.add(held.root)
            now += held.nbytes
        peak = max(peak, now)
        now -= freed.get(index, 0)
        for base in [b for b in seen if last[b] == index and b not in kept]:
            seen.discard(base)
            now -= own.memory[base].nbytes
    _EXCESS[memo] = (program, peak)
    return peak
