# SPDX-License-Identifier: Apache-2.0
"""The interpreter: one short loop over a plan, a generator that yields only where it may have to
wait.

``bind`` turns each instruction into a small function of the registers, once; ``execute`` runs them.
 ``drive`` runs one rank per process, or all ranks of a local group in turn,
by the same code. Nothing here knows schedules or backends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from ..actions.product import feature
from ..collectives.group import Group, Work
from ..errors import ActionError, FpipeError, StageError
from ..lowering.instruction import Machine, Registers, StepFn
from ..lowering.instructions import nothing
from ..lowering.plan import Plan
from .mistakes import deadlock

#: Steps with the numbers of their instructions.
Numbered: TypeAlias = tuple[tuple[int, StepFn], ...]


@dataclass(frozen=True)
class Executable:
    """A plan whose instructions are ready to be called, on one rank of one group."""

    plan: Plan
    steps: tuple[StepFn, ...]
    group: Group

    @cached_property
    def phases(self) -> tuple[Numbered, Numbered]:
        """The steps before the split of the plan, and those after it, without those that do
        nothing.
        """
        numbered = [(number, step) for number, step in enumerate(self.steps) if step is not nothing]
        first = sum(number < self.plan.split for number, _ in numbered)
        return tuple(numbered[:first]), tuple(numbered[first:])


#: A profiler: from a bound plan and a phase of it, or None for both, to steps that record when they
#: ran, with their numbers.
Watch: TypeAlias = Callable[[Executable, int | None], Iterable[tuple[int, StepFn]]]
WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)

#: Whether ``fpipe.debug`` is on.
DEBUGGING: ContextVar[bool] = ContextVar("DEBUGGING", default=False)


def bind(plan: Plan, machine: Machine) -> Executable:
    """Make every instruction callable."""
    steps = tuple(ins.op.bind(ins, machine) for ins in plan.instructions)
    return Executable(plan, steps, machine.group)


def execute(
    bound: Executable, r: Registers, phase: int | None = None
) -> Generator[Work, None, None]:
    """Run the steps, all or those of one phase; yields each receive that it waits for."""
    number = 0
    slots = r.slots
    watch = WATCH.get()
    steps: Iterable[tuple[int, StepFn]] = (
        chain(*bound.phases) if phase is None else bound.phases[phase]
    )
    if watch is not None:
        steps = watch(bound, phase)
    try:
        for number, step in steps:  # noqa: B007  (an error names the instruction)
            pending = step(r)
            if pending is not None:
                work, writes = pending
                yield work
                for slot, tensor in zip(writes, work.wait(), strict=True):
                    slots[slot] = tensor
                tensor = work = pending = None  # they refer to received tensors
    except Exception as error:
        if isinstance(error, FpipeError) and (
            isinstance(error, ActionError) or not isinstance(error, StageError)
        ):
            raise
        raise feature("explain").action_error(
            error, bound.plan.instructions[number], bound.plan.rank
        ) from error


def drive(runs: Mapping[int, Generator[Work, None, None]], describe: Callable[[int], str]) -> None:
    """Run the ranks of this process, in turn, until all are done."""
    if len(runs) == 1:
        deque(
            next(iter(runs.values())), maxlen=0
        )  # the step that follows waits; yielded receives are not kept
        return
    waiting: dict[int, Work | None] = dict.fromkeys(runs)
    while waiting:
        moved = False
        for rank in list(waiting):
            work = waiting[rank]
            if work is not None and not work.done():
                continue
            moved = True
            waiting[rank] = work = None  # it refers to the tensors that it receives
            try:
                waiting[rank] = next(runs[rank])
            except StopIteration:
                del waiting[rank]
        if not moved:
            raise deadlock(f"rank {rank}: {describe(rank)}" for rank in waiting)
