"""Register allocation: steps over keys become instructions over slots, with frees, and every byte is counted.

A slot is given back at the last use of its value; a program takes the values that end with it out of their slots, so
that they can be freed inside. Bytes are counted by storage: two views of one tensor count once. Knows no ranks but its
own and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Instruction, Job, Plan, Step, spec_of
from .program import Program
from .route import Key
from .stage import Aval, Held, Programs

_PROGRAMS = frozenset("FBIW")


def assign(job: Job, rank: int, steps: Sequence[Step], split: int, wanted: Sequence[Key]) -> Plan:
    """Give out slots and count bytes."""
    last = _last_uses(steps, wanted)
    feeds = _feeds(steps, wanted)
    table = _Slots(feeds)
    ledger = _Ledger()
    instructions, curve = [], []
    for index, step in enumerate(steps):
        reads = tuple(map(table.where.__getitem__, step.reads))
        # a gradient is made by its first ADD and read by the later ones
        ends = [key for key in dict.fromkeys(step.reads) if last[key] == index and key not in feeds]
        during = ledger.run(step, ends) if step.kind in _PROGRAMS else ledger.other(step)
        writes = tuple(table.put(key, last.get(key, -1) > index) for key in step.writes if key is not None)
        for key in step.writes:
            if key is not None and last.get(key, -1) <= index:
                ledger.end(key)
        for key in ends:
            ledger.end(key)
        frees = tuple(table.free(key) for key in ends)
        curve.append(max(during, ledger.live))
        if step.kind != "ZERO" or writes:
            instructions.append(_instruction(step, reads, writes, frees))
    results = {key: table.where[key] for key in wanted if key in table.where}
    return Plan(rank, tuple(instructions), table.size, feeds, results, split, max(curve, default=0), tuple(curve))


def _instruction(
    step: Step, reads: tuple[int, ...], writes: tuple[int, ...], frees: tuple[int, ...]
) -> Instruction:  # fmt: skip
    specs = tuple(spec_of(a) if isinstance(a, Aval) else a for a in step.avals)
    return Instruction(step.kind, step.action, reads, writes, frees, step.program, step.peer, step.number, specs,
                       step.how)  # fmt: skip


def _last_uses(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    last: dict[Key, int] = {}
    for index, step in enumerate(steps):
        for key in step.reads:
            last[key] = index
        if step.kind in ("ADD", "SUM"):
            for key in step.writes:
                if key is not None:
                    last[key] = index
    for key in wanted:
        last[key] = len(steps)
    return last


def _feeds(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller brings those."""
    made: set[Key] = set()
    feeds: dict[Key, int] = {}
    for step in steps:
        for key in step.reads:
            if key not in made and key not in feeds:
                feeds[key] = len(feeds)
        made.update(key for key in step.writes if key is not None)
    for key in wanted:
        if key not in made and key not in feeds:
            feeds[key] = len(feeds)
    return feeds


class _Slots:
    def __init__(self, feeds: dict[Key, int]):
        self.where: dict[Key, int] = dict(feeds)
        self.size = len(feeds)
        self.spare: list[int] = []

    def put(self, key: Key, needed: bool) -> int:
        if key in self.where:
            return self.where[key]
        if not needed:
            return -1
        if self.spare:
            slot = self.spare.pop()
        else:
            slot, self.size = self.size, self.size + 1
        self.where[key] = slot
        return slot

    def free(self, key: Key) -> int:
        slot = self.where.pop(key)
        self.spare.append(slot)
        return slot


class _Ledger:
    """Bytes held, by storage."""

    def __init__(self) -> None:
        self.live = 0
        self.root_of: dict[Key, object] = {}
        self.users: dict[object, int] = {}
        self.bytes: dict[object, int] = {}

    def begin(self, key: Key, root: object, nbytes: int) -> None:
        if key in self.root_of:
            return
        self.root_of[key] = root
        if self.users.get(root, 0) == 0:
            self.bytes[root] = nbytes
            self.live += nbytes
        self.users[root] = self.users.get(root, 0) + 1

    def end(self, key: Key) -> None:
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
        if step.kind == "WAIT" or step.kind == "ZERO":
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
