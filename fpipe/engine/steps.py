# SPDX-License-Identifier: Apache-2.0
"""The instructions of a plan as functions of the registers.

What runs for every message and every program is written as source for its numbers of slots: a loop
over two slots costs more than the slots. Instructions with equal numbers share the source. Nothing
here knows schedules or backends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from ..actions.action import Slice
from ..collectives.group import Group, Work
from ..devices import drawn
from ..lowering.plan import Instruction
from ..tree import sum_dtype
from .copies import together
from .registers import Registers

#: Returns None, or a work to wait for and the slots that its result is written to.
StepFn: TypeAlias = Callable[[Registers], Any]
RunFn: TypeAlias = Callable[[list[Any]], Sequence[Any]]
#: Adds each tensor of a list into that of another.
add_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage, reportAssignmentType]
#: Checks an instruction: its program's inputs and outputs, and the random state before it where it
#: draws.
Check: TypeAlias = Callable[[Instruction, Sequence[Any], Sequence[Any], torch.Tensor | None], None]


@dataclass(frozen=True)
class Options:
    """How instructions are bound: the accumulation dtype, and a check of each result."""

    wide: torch.dtype | None = None
    check: Check | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    first: int = 0  # the number of the first microbatch among those of all copies


def nothing(r: Registers) -> None:
    """The step of an instruction for which nothing is to be done."""


def step_of(ins: Instruction, rank: int, group: Group, options: Options) -> StepFn:
    """The function of an instruction."""
    if ins.program is not None:
        return _program(ins, options, rank, group)
    if ins.share is not None:
        return together(ins, ins.share, group.journal, rank)
    if ins.kind == "SEND":
        return _send(ins, rank, group)
    if ins.kind == "RECV":
        return _recv(ins, rank, group)
    if ins.kind == "WAIT":
        return _wait(ins, rank, group)
    if ins.kind == "SETTLE":
        return _settle(ins, group)
    if ins.kind == "ADD":
        return _add(ins, options.wide)
    if ins.kind == "EACH":
        return _each(ins, rank, group)
    if ins.kind == "LOSS":
        return _send_loss
    if ins.kind == "ZERO":
        return _zero(ins, group.device(rank))
    assert ins.kind == "SUM", ins.kind
    return _sum(ins)


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
    return bind(
        *names.values(), *ins.reads, *ins.frees, *[slot for slot in ins.writes if slot >= 0]
    )


@lru_cache(maxsize=4096)
def _binder(
    body: str, names: tuple[str, ...], reads: int, frees: int, wanted: tuple[bool, ...]
) -> Callable[..., StepFn]:
    """A function of the values of names and of slots (read, freed, written); it returns the
    step.
    """
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


def _program(ins: Instruction, options: Options, rank: int, group: Group) -> StepFn:
    program = ins.program
    assert program is not None and ins.action is not None
    run = program.run if options.check is None else _checked(program.run, options.check, ins)
    text = " ".join(filter(None, [str(ins.action), program.label]))
    if program.random:
        return _written(
            _DRAWING, ins, run=_drawing(run, ins, options), note=group.notes(rank), text=text
        )
    return _written(_PROGRAM, ins, run=run, note=group.notes(rank), text=text)


def _send(ins: Instruction, rank: int, group: Group) -> StepFn:
    return _written(_SEND, ins, send=group.sender(rank, ins.peer, ins.specs))


def _recv(ins: Instruction, rank: int, group: Group) -> StepFn:
    post, fetch = group.receiver(ins.peer, rank, ins.specs)
    if fetch is not None:
        return nothing  # the WAIT instruction requests the message
    key = (ins.peer, ins.number)

    def step(r: Registers) -> None:
        r.receives[key] = post()

    return step


def _wait(ins: Instruction, rank: int, group: Group) -> StepFn:
    writes, note = ins.writes, group.notes(rank)
    what = f"{ins.action}'s message" if ins.action is not None else "gradients"
    text = f"waiting for {what} from rank {ins.peer}"
    post, fetch = group.receiver(ins.peer, rank, ins.specs)
    if fetch is not None:
        return _written(_WAIT, ins, fetch=fetch, post=post, note=note, text=text, writes=writes)
    key = (ins.peer, ins.number)

    def step(r: Registers) -> tuple[Work, tuple[int, ...]]:
        note(text)
        return r.receives.pop(key), writes

    return step


# ---- random programs, checks ----
def _drawing(
    run: RunFn, ins: Instruction, options: Options
) -> Callable[[Registers, list[Any]], Sequence[Any]]:
    """Run a program that draws on the stream of its stage, microbatch and letter."""
    program, device = ins.program, options.device
    assert program is not None and ins.action is not None
    where = (ins.stage, numbered(ins.action.microbatch, options.first), program.name)
    resumes, leaves = program.stream or (
        False,
        False,
    )  # a segment goes on with the stream of the one before

    def draw(r: Registers, box: list[Any]) -> Sequence[Any]:
        if r.seed is None:
            return drawn(run, box, device, None)[0]
        out, state = drawn(
            run, box, device, r.streams.pop(where) if resumes else seed_of(r.seed, *where), leaves
        )
        if state is not None:
            r.streams[where] = state
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
    assert ins.program is not None
    random = ins.program.random

    def checked(box: list[Any]) -> Any:
        args, state = list(box), torch.get_rng_state() if random else None
        out = run(box)
        check(ins, args, out, state)
        return out

    return checked


# ---- other instructions ----
def _settle(ins: Instruction, group: Group) -> StepFn:
    settle, peer, count = group.settle, ins.peer, ins.number

    def step(r: Registers) -> None:
        settle(peer, count)

    return step


def _add(ins: Instruction, wide: torch.dtype | None) -> StepFn:
    pairs = tuple(zip(ins.writes, ins.reads, ins.how, strict=True))
    frees = ins.frees
    into = tuple(slot for slot, _, how in pairs if how == "add")
    values = tuple(value for _, value, how in pairs if how == "add")
    first = tuple((slot, value, how) for slot, value, how in pairs if how != "add")

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


def _each(ins: Instruction, rank: int, group: Group) -> StepFn:
    reads, frees, action, note = ins.reads, ins.frees, ins.action, group.notes(rank)
    assert action is not None
    mb, text = action.microbatch, f"each= after {action}"

    def step(r: Registers) -> None:
        tensors = [r.slots[i] for i in reads]
        for i in frees:
            r.slots[i] = None
        note(text)
        assert r.each is not None
        r.each(mb, tensors)

    return step


def _send_loss(r: Registers) -> None:
    assert r.send_loss is not None
    r.loss = r.send_loss()


def _copy(tensor: torch.Tensor, wide: torch.dtype | None) -> torch.Tensor:
    return tensor.to(
        sum_dtype(tensor.dtype, wide), copy=True, memory_format=torch.contiguous_format
    )


def _zero(ins: Instruction, device: torch.device) -> StepFn:
    (slot,), (spec,) = ins.writes, ins.specs

    def step(r: Registers) -> None:
        r.slots[slot] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)

    return step


def _sum(ins: Instruction) -> StepFn:
    reads, (write,), frees = ins.reads, ins.writes, ins.frees

    def step(r: Registers) -> None:
        slots = r.slots
        total = slots[reads[0]].clone()
        for i in reads[1:]:
            total.add_(slots[i])
        for i in frees:
            slots[i] = None
        slots[write] = total

    return step
