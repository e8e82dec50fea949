# SPDX-License-Identifier: Apache-2.0
"""The table of instructions: one class for each kind, and nothing else says what a kind means.

A class states how its instruction is printed, which bytes it holds, how it becomes a function of
the registers, and what it becomes for other sizes. Features add classes of their own, such as
``passes/copies/instructions.py``.

What runs for every message and every program is written as source for its number of slots: a loop
over two slots costs more than the slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from ..actions.action import Action, Slice
from ..actions.product import feature
from ..collectives.group import Group, Work
from ..devices import drawn
from ..programs.program import Program, Programs
from ..tree import Aval, Spec, sum_dtype
from .keys import Key
from .memory import MemoryAccount


@dataclass(slots=True, eq=False)
class Registers:
    """What changes while one rank runs its plan."""

    slots: list[Any]
    seed: int | None = None  # of random draws; None: draws come from the device's stream as it is
    #: by (sender, number), until awaited
    receives: dict[tuple[int, int], Work] = field(default_factory=dict)
    #: of all copies, by number, until awaited
    collectives: dict[int, Sequence[Work]] = field(default_factory=dict)
    #: random states between segments
    streams: dict[tuple[int, str, str], torch.Tensor] = field(default_factory=dict)
    each: Callable[[int, list[Any]], object] | None = None  # gets the outputs of a microbatch
    send_loss: Callable[[], torch.Tensor] | None = None  # called once the loss is computed
    loss: torch.Tensor | None = None  # what it returned

    def copy(self) -> Registers:
        """The same values; a run changes only the copy."""
        return replace(
            self,
            slots=list(self.slots),
            receives=dict(self.receives),
            collectives=dict(self.collectives),
            streams=dict(self.streams),
        )


#: Returns None, or a work to wait for and the slots that its result is written to.
StepFn: TypeAlias = Callable[[Registers], Any]
RunFn: TypeAlias = Callable[[list[Any]], Sequence[Any]]
#: Adds each tensor of a list into that of another.
add_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]
#: Checks a program's inputs and outputs, given the random state before it where it draws.
Check: TypeAlias = Callable[
    ["Instruction", Sequence[Any], Sequence[Any], torch.Tensor | None], None
]


class Instruction(NamedTuple):
    """An operation with what it reads, writes and frees: keys of values at first, slots in a plan.

    ``frees`` are the slots that are empty afterwards. A value that is written to slot -1 is not
    kept.
    """

    op: Op
    action: Action | None = None
    reads: tuple[Any, ...] = ()
    writes: tuple[Any, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the kind, such as "SEND"; that of a program is its letter."""
        return self.op.kind

    @property
    def program(self) -> Program | None:
        """The program that it runs, if it runs one."""
        return self.op.program if isinstance(self.op, Run) else None

    def __str__(self) -> str:
        short = self.action is not None and len(self.kind) == 1
        words = [str(self.action) if short else self.kind, str(self.op)]
        words += [f"{list(self.reads)}"] if self.reads else []
        words += [f"-> {list(self.writes)}"] if self.writes else []
        words += [f"free {list(self.frees)}"] if self.frees else []
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Machine:
    """Where the instructions of a plan run, and how."""

    rank: int
    group: Group
    device: torch.device
    wide: torch.dtype | None = None  # in which gradients are accumulated
    check: Check | None = None  # of each result
    first: int = 0  # the number of the first microbatch among those of all copies


class Sizes(Protocol):
    """Programs and specs for other sizes."""

    def program(
        self, action: Action | None, stage: int, program: Program
    ) -> tuple[Program, Programs] | None:
        """What runs in place of a program."""
        ...

    def specs(self, keys: Sequence[Key], specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """The specs of values."""
        ...


class Op:
    """What an instruction does. The methods here are those of a kind that holds no memory."""

    __slots__ = ()
    kind: ClassVar[str]
    #: Whether it reads the values of the keys that it writes.
    updates: ClassVar[bool] = False
    #: Whether its results take the place of earlier values of the same keys.
    renews: ClassVar[bool] = False

    def __str__(self) -> str:
        """What is printed after the kind."""
        return ""

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        """Enter what it holds into the account; returns the bytes while it runs.

        ``ins`` is over keys. ``ends`` are the places of the reads that end.
        """
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        """The instruction as a function of the registers."""
        raise NotImplementedError

    def resized(self, ins: Instruction, sizes: Sizes) -> Op | None:
        """The same for other sizes; None: there is none."""
        return self


def nothing(r: Registers) -> None:
    """The step of an instruction for which nothing is to be done."""


# ---- programs ----
@dataclass(frozen=True, slots=True)
class Run(Op):
    """F, B, I, W: run a program."""

    program: Program
    stage: int  # one past that of the action for the loss
    owner: Programs = field(compare=False, repr=False)

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The letter of the program."""
        return self.program.name

    def __str__(self) -> str:
        return self.program.label

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        return account.run(self.program, self.owner, ins.reads, ins.writes, ends)

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        run = self.program.run
        if self.program.collective:
            run = feature("weaving.waits").bounded(self.program, self.owner)
        if machine.check is not None:
            run = _checked(run, machine.check, ins)
        names = {
            "run": _drawing(self, run, ins, machine) if self.program.random else run,
            "note": machine.group.notes(machine.rank),
            "text": " ".join(filter(None, [str(ins.action), self.program.label])),
        }
        return _written(_DRAWING if self.program.random else _PROGRAM, ins, **names)

    def resized(self, ins: Instruction, sizes: Sizes) -> Op | None:
        found = sizes.program(ins.action, self.stage, self.program)
        return None if found is None else replace(self, program=found[0], owner=found[1])


def _drawing(
    op: Run, run: RunFn, ins: Instruction, machine: Machine
) -> Callable[[Registers, list[Any]], Sequence[Any]]:
    """Run a program that draws on the stream of its stage, microbatch and letter."""
    assert ins.action is not None
    device, number = machine.device, numbered(ins.action.microbatch, machine.first)
    place = (op.stage, number, op.program.name)
    # a segment goes on with the stream of the one before
    resumes, leaves = op.program.stream or (False, False)

    def draw(r: Registers, box: list[Any]) -> Sequence[Any]:
        if r.seed is None:
            return drawn(run, box, device, None)[0]
        start = r.streams.pop(place) if resumes else seed_of(r.seed, *place)
        out, state = drawn(run, box, device, start, leaves)
        if state is not None:
            r.streams[place] = state
        return out

    return draw


def numbered(mb: int, first: int = 0) -> str:
    """A microbatch, or a slice of one, among those of all copies of the pipeline; ``first`` is the
    first one here.

    >>> numbered(3, 8), numbered(Slice(3, 1, of=2), 8)
    ('11', '11.1')
    """
    return f"{first + mb.microbatch}.{mb.slice}" if isinstance(mb, Slice) else f"{first + mb}"


def seed_of(seed: int, stage: int, mb: str, letter: str) -> int:
    """The seed of one run of a program, as the documentation of ``seed=`` states it."""
    text = f"{seed}/{stage}/{mb}/{letter}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def _checked(run: RunFn, check: Check, ins: Instruction) -> RunFn:
    random = ins.program is not None and ins.program.random

    def checked(box: list[Any]) -> Sequence[Any]:
        args, state = list(box), torch.get_rng_state() if random else None
        out = run(box)
        check(ins, args, out, state)
        return out

    return checked


# ---- messages ----
@dataclass(frozen=True, slots=True)
class Send(Op):
    """Send values to another rank."""

    peer: int
    specs: tuple[Spec, ...]
    kind = "SEND"

    def __str__(self) -> str:
        return f"to {self.peer}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        if account.wired:
            account.leave(self.peer, ins.reads)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        return _written(_SEND, ins, send=machine.group.sender(machine.rank, self.peer, self.specs))

    def resized(self, ins: Instruction, sizes: Sizes) -> Op:
        return replace(self, specs=sizes.specs(ins.reads, self.specs))


@dataclass(frozen=True, slots=True)
class Recv(Op):
    """Post the receive of a message of another rank."""

    peer: int
    number: int
    specs: tuple[Spec, ...]
    keys: tuple[Key, ...] = field(compare=False, repr=False)
    kind = "RECV"

    def __str__(self) -> str:
        return f"from {self.peer} #{self.number}"

    @property
    def buffer(self) -> Hashable:
        """The key of the memory into which the message is received."""
        return ("received", self.peer, self.number)

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        if account.wired:
            account.begin(self.buffer, self.buffer, sum(spec.bytes for spec in self.specs))
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        post, fetch = machine.group.receiver(self.peer, machine.rank, self.specs)
        if fetch is not None:
            return nothing  # WAIT requests the message
        key = (self.peer, self.number)

        def step(r: Registers) -> None:
            r.receives[key] = post()

        return step

    def resized(self, ins: Instruction, sizes: Sizes) -> Op:
        return replace(self, specs=sizes.specs(self.keys, self.specs))


@dataclass(frozen=True, slots=True)
class Wait(Recv):
    """Wait for a message of another rank."""

    kind = "WAIT"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        if account.wired:
            account.end(self.buffer)
        for key, spec in zip(ins.writes, self.specs, strict=True):
            account.begin(key, key, spec.bytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        writes, note = ins.writes, machine.group.notes(machine.rank)
        what = f"{ins.action}'s message" if ins.action is not None else "gradients"
        text = f"waiting for {what} from rank {self.peer}"
        post, fetch = machine.group.receiver(self.peer, machine.rank, self.specs)
        if fetch is not None:
            return _written(_WAIT, ins, fetch=fetch, post=post, note=note, text=text, writes=writes)
        key = (self.peer, self.number)

        def step(r: Registers) -> tuple[Work, tuple[int, ...]]:
            note(text)
            return r.receives.pop(key), writes

        return step


@dataclass(frozen=True, slots=True)
class Settle(Op):
    """Release sends to a rank: a message of that rank shows that it has received them."""

    peer: int
    count: int
    kind = "SETTLE"

    def __str__(self) -> str:
        return f"{self.count} to {self.peer}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        account.settle(self.peer, self.count)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        settle, peer, count = machine.group.settle, self.peer, self.count

        def step(r: Registers) -> None:
            settle(peer, count)

        return step


# ---- gradients ----
@dataclass(frozen=True, slots=True)
class Add(Op):
    """Add values to gradients, each by how: "add" into one, "take" or "copy" the first."""

    how: tuple[str, ...]
    sums: tuple[Aval, ...] = ()  # what they are added up in, where that is known
    kind = "ADD"
    updates = True

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        sums = self.sums or [None] * len(ins.writes)
        for key, value, how, aval in zip(ins.writes, ins.reads, self.how, sums, strict=True):
            if how == "take":
                account.share(key, account.behind.get(value))
            elif how == "copy":
                account.copy(key, value, None if aval is None else aval.nbytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        pairs = tuple(zip(ins.writes, ins.reads, self.how, strict=True))
        frees, wide = ins.frees, machine.wide
        into = tuple(slot for slot, _, how in pairs if how == "add")
        values = tuple(value for _, value, how in pairs if how == "add")
        first = tuple(pair for pair in pairs if pair[2] != "add")

        def step(r: Registers) -> None:
            slots = r.slots
            for slot, value, how in first:
                tensor = slots[value]
                slots[slot] = tensor if how == "take" else _copy(tensor, wide)
            if into:
                add_each([slots[i] for i in into], [slots[i] for i in values])
            for i in frees:
                slots[i] = None

        return step


def _copy(tensor: torch.Tensor, wide: torch.dtype | None) -> torch.Tensor:
    dtype = sum_dtype(tensor.dtype, wide)
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


# ---- instructions with a source ----
#: ``s`` are the slots of the registers ``r``. Values that are read, the freeing of slots and the
#: places of results are inserted; the other names stand for what :func:`_written` is given.
_PROGRAM = """
box = [{reads}]
{free}
note(text)
{writes} = run(box)
"""
_DRAWING = _PROGRAM.replace("run(box)", "run(r, box)")
_SEND = """
send(({reads}))
{free}
"""
_WAIT = """
message = fetch()
if message is None:
    note(text)
    return post(), writes
{writes} = message
"""


def _written(body: str, ins: Instruction, **names: object) -> StepFn:
    """The step of an instruction with this body, in which names have these values."""
    wanted = tuple([slot >= 0 for slot in ins.writes])
    bind = _binder(body, tuple(names), len(ins.reads), len(ins.frees), wanted)
    kept = [slot for slot in ins.writes if slot >= 0]
    return bind(*names.values(), *ins.reads, *ins.frees, *kept)


@lru_cache(maxsize=4096)
def _binder(
    body: str, names: tuple[str, ...], reads: int, frees: int, wanted: tuple[bool, ...]
) -> Callable[..., StepFn]:
    """A function of the values of names and of slots (read, freed, written); it returns a step."""
    read, free = [f"read{n}" for n in range(reads)], [f"free{n}" for n in range(frees)]
    write = [f"write{n}" if want else "" for n, want in enumerate(wanted)]
    text = body.strip().format(
        reads="".join(f"s[{name}]," for name in read),
        free=" = ".join([*(f"s[{name}]" for name in free), "None"]),
        writes="".join(f"s[{name}]," if name else "_," for name in write) or "_",
    )
    given = [*names, *read, *free, *filter(None, write)]
    lines = [
        # Defaults are one object for the garbage collector; values of a closure are one each.
        f"def bind({', '.join(given)}):",
        f"    def step(r, {', '.join(f'{name}={name}' for name in given)}):",
        "        s = r.slots",
        *(f"        {line}" for line in text.splitlines()),
        "    return step",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<fpipe step>", "exec"), scope)
    return scope["bind"]
