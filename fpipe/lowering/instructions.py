# SPDX-License-Identifier: Apache-2.0
"""The table of instructions: one class for each kind, which alone says what the kind means.

A class states how its instruction is printed, which bytes it holds, and how it becomes a function
of the registers. Features add more classes, for example ``passes/copies/gathering.py``.

Steps of programs and messages are generated as source for their numbers of slots: a loop over two
slots costs more than the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from ..actions.product import load_pass
from ..collectives.group import Work
from ..programs.program import Program, Programs
from ..tree import Aval, Spec, sum_dtype
from .instruction import Instruction, Machine, Opcode, Registers, StepFn
from .memory import MemoryAccount

#: Adds each tensor of the second list into that of the first.
add_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]


def nothing(r: Registers) -> None:
    """The step of an instruction that does nothing."""


# ---- programs ----
@dataclass(frozen=True, slots=True)
class Run(Opcode):
    """F, B, I, W: run a program."""

    program: Program
    stage: int  # that of the action; for the loss one past it
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
        source = _PROGRAM
        if self.program.collective:
            run = load_pass("weaving.waits").bounded(self.program, self.owner)
        if machine.check is not None:
            run = load_pass("debugging").checked(run, machine.check, ins)
        if self.program.random:
            run = load_pass("drawing").drawing(self, run, ins, machine)
            source = _DRAWING
        note = machine.group.notes(machine.rank)
        text = " ".join(filter(None, [str(ins.action), self.program.label]))
        return step_of(source, ins, run=run, note=note, text=text)


# ---- messages ----
@dataclass(frozen=True, slots=True)
class Send(Opcode):
    """Send values to another rank."""

    peer: int
    specs: tuple[Spec, ...]
    stream: int = 0  # of the channel
    kind = "SEND"

    def __str__(self) -> str:
        return f"to {self.peer}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        if account.wired:
            account.send(self.peer, ins.reads)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        send = machine.group.sender(machine.rank, self.peer, self.specs, self.stream)
        return step_of(_SEND, ins, send=send)


@dataclass(frozen=True, slots=True)
class Recv(Opcode):
    """Post the receive of a message of another rank."""

    peer: int
    number: int
    specs: tuple[Spec, ...]
    kind = "RECV"

    def __str__(self) -> str:
        return f"from {self.peer} #{self.number}"

    @property
    def buffer(self) -> Hashable:
        """The key of the message, and of the memory into which it is received."""
        return ("received", self.peer, self.number)

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        if account.wired:
            account.begin(self.buffer, self.buffer, sum(spec.bytes for spec in self.specs))
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        post, fetch = machine.group.receiver(self.peer, machine.rank, self.specs)
        if fetch is not None:
            return nothing  # WAIT requests the message
        key = self.buffer

        def step(r: Registers) -> None:
            r.receives[key] = post()

        return step


@dataclass(frozen=True, slots=True)
class Wait(Recv):
    """Wait for a message of another rank."""

    stream: int = 0
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
        content = f"{ins.action}'s message" if ins.action is not None else "gradients"
        text = f"waiting for {content} from rank {self.peer}"
        post, fetch = machine.group.receiver(self.peer, machine.rank, self.specs, self.stream)
        if fetch is not None:
            return step_of(_WAIT, ins, fetch=fetch, post=post, note=note, text=text, writes=writes)
        key = self.buffer

        def step(r: Registers) -> tuple[Work, tuple[int, ...]]:
            note(text)
            return r.receives.pop(key), writes

        return step


# ---- gradients ----
@dataclass(frozen=True, slots=True)
class Add(Opcode):
    """Add values to gradients.

    ``how`` says of each value: "add" it into the gradient, or "take" or "copy" it as the first.
    """

    how: tuple[Literal["add", "take", "copy"], ...]
    sums: tuple[Aval, ...] = ()  # of the gradients; none if some are not known before the run
    kind = "ADD"
    updates = True

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        sums = self.sums or [None] * len(ins.writes)
        for key, value, how, aval in zip(ins.writes, ins.reads, self.how, sums, strict=True):
            if how == "take":
                account.share(key, account.storages.get(value))
            elif how == "copy":
                account.copy(key, value, None if aval is None else aval.nbytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        pairs = tuple(zip(ins.writes, ins.reads, self.how, strict=True))
        frees = ins.frees
        accumulate = machine.accumulate
        into = tuple(slot for slot, _, how in pairs if how == "add")
        values = tuple(value for _, value, how in pairs if how == "add")
        first = tuple(pair for pair in pairs if pair[2] != "add")

        def step(r: Registers) -> None:
            slots = r.slots
            for slot, value, how in first:
                tensor = slots[value]
                slots[slot] = tensor if how == "take" else _copy(tensor, accumulate)
            if into:
                add_each([slots[i] for i in into], [slots[i] for i in values])
            for i in frees:
                slots[i] = None

        return step


def _copy(tensor: torch.Tensor, accumulate: torch.dtype | None) -> torch.Tensor:
    dtype = sum_dtype(tensor.dtype, accumulate)
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


# ---- steps that are generated as source ----
#: ``s`` are the slots of the registers ``r``. ``{reads}``, ``{free}`` and ``{writes}`` become
#: slots; the other names are arguments of :func:`step_of`. With one slot each, a program becomes
#:     box = [s[read0],]
#:     s[free0] = None
#:     note(text)
#:     s[write0], = run(box)
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


def step_of(body: str, ins: Instruction, **names: object) -> StepFn:
    """The function of an instruction: ``body`` as code, with ``names`` bound to these values."""
    kept = tuple([slot >= 0 for slot in ins.writes])
    bind = _binder(body, tuple(names), len(ins.reads), len(ins.frees), kept)
    writes = [slot for slot in ins.writes if slot >= 0]
    return bind(*names.values(), *ins.reads, *ins.frees, *writes)


@lru_cache(maxsize=4096)
def _binder(
    body: str, names: tuple[str, ...], reads: int, frees: int, kept: tuple[bool, ...]
) -> Callable[..., StepFn]:
    """A function that returns a step, given the values of names and the slots that are read, freed
    and written. Of its results the step writes those that are ``kept``.
    """
    read = [f"read{n}" for n in range(reads)]
    free = [f"free{n}" for n in range(frees)]
    write = [f"write{n}" if keep else "" for n, keep in enumerate(kept)]
    text = body.strip().format(
        reads="".join(f"s[{name}]," for name in read),
        free=" = ".join([*(f"s[{name}]" for name in free), "None"]),
        writes="".join(f"s[{name}]," if name else "_," for name in write) or "_",
    )
    parameters = [*names, *read, *free, *filter(None, write)]
    lines = [
        # Defaults are one object for the garbage collector; values of a closure are one each.
        f"def bind({', '.join(parameters)}):",
        f"    def step(r, {', '.join(f'{name}={name}' for name in parameters)}):",
        "        s = r.slots",
        *(f"        {line}" for line in text.splitlines()),
        "    return step",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<fpipe step>", "exec"), scope)
    return scope["bind"]
