# SPDX-License-Identifier: Apache-2.0
"""The interpreter: one short loop over a plan, a generator that yields only where it must wait.

``bind`` turns each instruction into a small function of the registers, once; ``execute`` runs them. ``drive`` runs one
rank per process, or all ranks of a local group in turn, by the same code. Nothing here knows schedules or backends.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from ..collectives.faults import watched
from ..collectives.group import Group, Work
from ..devices import drawn
from ..errors import ActionError, DeadlockError, FpipeError, StageError
from ..plans.plan import Instruction, Plan
from ..plans.weaving.segments import collective, collectives_of
from ..programs.explain import where
from ..tree import sum_dtype
from .copies import together
from .registers import Registers

StepFn: TypeAlias = Callable[[Registers], Any]
RunFn: TypeAlias = Callable[[list[Any]], Sequence[Any]]
#: Checks an instruction: its program's inputs and outputs, and the random state before it where it draws.
Check: TypeAlias = Callable[[Instruction, Sequence[Any], Sequence[Any], torch.Tensor | None], None]


@dataclass(frozen=True)
class Executable:
    """A plan whose instructions are ready to be called, on one rank of one group."""

    plan: Plan
    steps: tuple[StepFn, ...]
    group: Group


@dataclass(frozen=True)
class Options:
    """How instructions are bound: the accumulation dtype, and a check of each result."""

    wide: torch.dtype | None = None
    check: Check | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    first: int = 0  # the number of the first microbatch among those of all copies


#: Part of autograd's message, which concerns stages with engine="eager".
_CHANGED = "modified by an inplace operation"
#: A profiler: from a bound plan, steps of it and the first one's number to steps that record when they ran.
WATCH: ContextVar[Callable[[Executable, Sequence[StepFn], int], Sequence[StepFn]] | None] = ContextVar(
    "WATCH", default=None
)


def bind(plan: Plan, group: Group, options: Options) -> Executable:
    """Make every instruction callable."""
    groups = _communicators(plan)
    steps = tuple(_bind(_bounded(ins, groups), plan.rank, group, options) for ins in plan.instructions)
    return Executable(plan, steps, group)


def _communicators(plan: Plan) -> dict[int, str]:
    """By stage, the process group of the collectives in its programs."""
    programs = [(ins.stage, ins.program) for ins in plan.instructions if ins.program is not None]
    return {stage: found.members for stage, program in programs for found in collectives_of(program)}


def _bounded(ins: Instruction, groups: Mapping[int, str]) -> Instruction:
    """With a program whose waits for collectives end in time: those of a backend may not."""
    program = ins.program
    if program is None or ins.stage not in groups or not collective(program):
        return ins
    run, name = program.run, groups[ins.stage]

    def bounded(box: list[Any]) -> tuple[Any, ...]:
        with watched(name):
            return run(box)

    return replace(ins, program=replace(program, run=bounded))


def execute(bound: Executable, r: Registers, start: int = 0, stop: int | None = None) -> Generator[Work, None, None]:
    """Run the steps; yields a receive that is not done yet."""
    index, slots = start, r.slots
    steps: Sequence[StepFn] = bound.steps if start == 0 and stop is None else bound.steps[start:stop]
    watch = WATCH.get()
    if watch is not None:
        steps = watch(bound, steps, start)
    try:
        for step in steps:
            pending = step(r)
            if pending is not None:
                work, writes = pending
                if not work.done():
                    yield work
                for slot, tensor in zip(writes, work.wait(), strict=True):
                    slots[slot] = tensor
                tensor = work = pending = None  # they refer to received tensors
            index += 1
    except Exception as error:
        if isinstance(error, FpipeError) and (isinstance(error, ActionError) or not isinstance(error, StageError)):
            raise
        raise _explain(error, bound.plan.instructions[index], bound.plan.rank) from error


def drive(runs: Mapping[int, Generator[Work, None, None]], describe: Callable[[int], str]) -> None:
    """Run the ranks of this process, in turn, until all are done."""
    if len(runs) == 1:
        deque(next(iter(runs.values())), maxlen=0)  # the step that follows waits; yielded receives are not kept
        return
    waiting: dict[int, Work | None] = dict.fromkeys(runs)
    while waiting:
        moved = False
        for rank in list(waiting):
            work = waiting[rank]
            if work is not None and not work.done():
                continue
            moved = True
            try:
                waiting[rank] = next(runs[rank])
            except StopIteration:
                del waiting[rank]
        if not moved:
            ranks = "\n".join(f"  rank {rank}: {describe(rank)}" for rank in waiting)
            raise DeadlockError(
                f"every rank waits for another:\n{ranks}\nschedule.check() finds such a schedule before it runs"
            )


# ---- instructions as functions --------------------------------------------------------------------------------------


def _bind(ins: Instruction, rank: int, group: Group, options: Options) -> StepFn:
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
        return partial(_settle, group.settle, ins.peer, ins.number)
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


def _program(ins: Instruction, options: Options, rank: int, group: Group) -> StepFn:
    program, reads, frees = ins.program, ins.reads, ins.frees
    assert program is not None and ins.action is not None
    run = program.run if options.check is None else _checked(program.run, options.check, ins)
    draw = _drawing(run, ins, options) if program.random else None
    writes, targets = tuple((i, slot) for i, slot in enumerate(ins.writes) if slot >= 0), ins.writes
    every = len(writes) == len(targets)
    journal, note = group.journal, " ".join(filter(None, [str(ins.action), program.label]))

    def step(r: Registers) -> None:
        slots = r.slots
        box = [slots[i] for i in reads]
        for i in frees:
            slots[i] = None
        journal(rank, note)
        out = run(box) if draw is None else draw(r, box)
        if every:
            for slot, value in zip(targets, out):  # noqa: B905  (lengths agree by construction)
                slots[slot] = value
        else:
            for i, slot in writes:
                slots[slot] = out[i]

    return step


def _drawing(run: RunFn, ins: Instruction, options: Options) -> Callable[[Registers, list[Any]], Sequence[Any]]:
    """Run a program that draws on the stream of its stage, microbatch and letter."""
    program, device = ins.program, options.device
    assert program is not None and ins.action is not None
    where = (ins.stage, options.first + ins.action.microbatch, program.name)
    resumes, leaves = program.stream or (False, False)  # a segment goes on with the stream of the one before

    def draw(r: Registers, box: list[Any]) -> Sequence[Any]:
        if r.seed is None:
            return drawn(run, box, device, None)[0]
        out, state = drawn(run, box, device, r.streams.pop(where) if resumes else seed_of(r.seed, *where), leaves)
        if state is not None:
            r.streams[where] = state
        return out

    return draw


def seed_of(seed: int, stage: int, mb: int, letter: str) -> int:
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


def _send(ins: Instruction, rank: int, group: Group) -> StepFn:
    reads, frees = ins.reads, ins.frees
    send = group.sender(rank, ins.peer, ins.specs)

    def step(r: Registers) -> None:
        slots = r.slots
        tensors = tuple([slots[i] for i in reads])
        for i in frees:
            slots[i] = None
        send(tensors)

    return step


def _recv(ins: Instruction, rank: int, group: Group) -> StepFn:
    post, fetch = group.receiver(ins.peer, rank, ins.specs)
    if fetch is not None:
        return lambda r: None  # the WAIT instruction requests the message
    key = (ins.peer, ins.number)

    def step(r: Registers) -> None:
        r.receives[key] = post()

    return step


def _wait(ins: Instruction, rank: int, group: Group) -> StepFn:
    journal, writes = group.journal, ins.writes
    what = f"{ins.action}'s message" if ins.action is not None else "gradients"
    note = f"waiting for {what} from rank {ins.peer}"

    post, fetch = group.receiver(ins.peer, rank, ins.specs)
    if fetch is None:
        key = (ins.peer, ins.number)

        def step(r: Registers) -> tuple[Work, tuple[int, ...]]:
            journal(rank, note)
            return r.receives.pop(key), writes

        return step
    slot = writes[0] if writes else -1

    def take(r: Registers) -> tuple[Work, tuple[int, ...]] | None:
        tensor = fetch()
        if tensor is None:
            journal(rank, note)
            return post(), writes
        r.slots[slot] = tensor
        return None

    return take


def _settle(settle: Callable[[int, int], object], peer: int, count: int, r: Registers) -> None:
    settle(peer, count)


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
            torch._foreach_add_([slots[i] for i in into], [slots[i] for i in values])  # pyright: ignore[reportPrivateImportUsage]
        for i in frees:
            slots[i] = None

    return step


def _each(ins: Instruction, rank: int, group: Group) -> StepFn:
    reads, frees, action, journal = ins.reads, ins.frees, ins.action, group.journal
    assert action is not None
    mb, note = action.microbatch, f"each= after {action}"

    def step(r: Registers) -> None:
        tensors = [r.slots[i] for i in reads]
        for i in frees:
            r.slots[i] = None
        journal(rank, note)
        assert r.each is not None
        r.each(mb, tensors)

    return step


def _send_loss(r: Registers) -> None:
    assert r.send_loss is not None
    r.loss = r.send_loss()


def _copy(tensor: torch.Tensor, wide: torch.dtype | None) -> torch.Tensor:
    return tensor.to(sum_dtype(tensor.dtype, wide), copy=True, memory_format=torch.contiguous_format)


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


def _explain(error: Exception, ins: Instruction, rank: int) -> ActionError:
    from_tensors = "(" + ", ".join(map(str, ins.specs)) + ")" if ins.specs else ""
    what = ins.kind if ins.action is None else f"each= after {ins.action}" if ins.kind == "EACH" else str(ins.action)
    whose = f" ({ins.program.stage})" if ins.program is not None and ins.program.stage else ""
    kind = "" if isinstance(error, FpipeError) else f" raised {type(error).__name__}{where(error)}"
    hint = "; a tensor that a backward needs was changed in place: change a copy" if _CHANGED in str(error) else ""
    return ActionError(f"{what}{whose} on rank {rank}{kind}: {error} {from_tensors}".rstrip() + hint)
