# SPDX-License-Identifier: Apache-2.0
"""The table of instructions: one class for each kind, and nothing else says what a kind means.

A class states how its instruction is printed, which bytes it holds, how it becomes a function of
the registers, and what it becomes for other sizes. Features add classes of their own, such as
``passes/copies/instructions.py``.

What runs for every message and every program is written as source for its number of slots: a loop
over two slots costs more than the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ..actions.product import feature
from ..collectives.group import Work
from ..programs.program import Program, Programs
from ..tree import Aval, Spec, sum_dtype
from .instruction import Instruction, Machine, Op, Registers, Sizes, StepFn
from .keys import Key
from .memory import MemoryAccount

#: Adds each tensor of a list into that of another.
add_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]


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
            run = feature("debugging").checked(run, machine.check, ins)
        names = {
            "run": feature("drawing").drawing(self, run, ins, machine)
            if self.program.random
            else run,
            "note": machine.group.notes(machine.rank),
            "text": " ".join(filter(None, [str(ins.action), self.program.label])),
        }
        return _written(_DRAWING if self.program.random else _PROGRAM, ins, **names)

    def resized(self, ins: Instruction, sizes: Sizes) -> Op | None:
        found = sizes.program(ins.action, self.stage, self.program)
        return None if found is None else replace(self, program=found[0], owner=found[1])


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
        writes = ins.writes
        note = machine.group.notes(machine.rank)
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
        frees = ins.frees
        wide = machine.wide
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
    read = [f"read{n}" for n in range(reads)]
    free = [f"free{n}" for n in range(frees)]
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
