# SPDX-License-Identifier: Apache-2.0
"""The interpreter: one short loop over the instructions of a plan.

``bind`` turns each instruction into a function of the registers, once. ``execute`` is a generator
that calls these functions, and yields where it has to wait for a message. ``drive`` runs the
generator of the only rank of a process, or those of all ranks of a local group in turn. Nothing
here knows schedules or backends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from ..actions.product import load_pass
from ..collectives.group import Group, Work
from ..errors import ActionError, DeadlockError, FpipeError, StageError
from ..lowering.instruction import Machine, Registers, StepFn
from ..lowering.instructions import nothing
from ..lowering.plan import Plan

#: Functions of instructions, with the numbers of these.
Steps: TypeAlias = tuple[tuple[int, StepFn], ...]


@dataclass(frozen=True)
class Executable:
    """A plan, and a function of the registers for each of its instructions, on one rank."""

    plan: Plan
    steps: tuple[StepFn, ...]
    group: Group
    name: str  # of the schedule

    @cached_property
    def phases(self) -> tuple[Steps, Steps]:
        """The steps before the split of the plan, and the steps after it.

        Steps that do nothing are left out.
        """
        steps = [(number, step) for number, step in enumerate(self.steps) if step is not nothing]
        first = sum(number < self.plan.split for number, _ in steps)
        return tuple(steps[:first]), tuple(steps[first:])


#: A profiler: it returns the steps of a plan, wrapped so that they record when they ran. Its second
#: argument is the phase, or None for both.
Watch: TypeAlias = Callable[[Executable, int | None], Iterable[tuple[int, StepFn]]]
WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)

#: Whether ``fpipe.debug`` is on.
DEBUGGING: ContextVar[bool] = ContextVar("DEBUGGING", default=False)


def bind(plan: Plan, machine: Machine, name: str) -> Executable:
    """Turn every instruction into a function of the registers."""
    steps = tuple(ins.op.bind(ins, machine) for ins in plan.instructions)
    return Executable(plan, steps, machine.group, name)


def execute(
    bound: Executable, r: Registers, phase: int | None = None
) -> Generator[Work, None, None]:
    """Run the steps of a plan, or of one phase of it. Yields each receive that it waits for."""
    number = 0
    slots = r.slots
    watch = WATCH.get()
    steps: Iterable[tuple[int, StepFn]]
    if watch is not None:
        steps = watch(bound, phase)
    elif bound.plan.steps_in_order is not None:
        steps = bound.plan.steps_in_order(bound, r)
    elif phase is None:
        steps = chain(*bound.phases)
    else:
        steps = bound.phases[phase]
    try:
        for number, step in steps:  # noqa: B007  (an error names the instruction)
            pending = step(r)
            if pending is not None:
                work, writes = pending
                yield work
                for slot, tensor in zip(writes, work.wait(), strict=True):
                    slots[slot] = tensor
                tensor = work = pending = None  # they keep received tensors alive
    except ActionError:
        raise
    except Exception as error:
        # The cause may be a function of the user. Other errors of fpipe explain themselves.
        if isinstance(error, FpipeError) and not isinstance(error, StageError):
            raise
        instruction = bound.plan.instructions[number]
        raise load_pass("explain").action_error(error, instruction, bound.plan.rank) from error


def drive(runs: Mapping[int, Generator[Work, None, None]], describe: Callable[[int], str]) -> None:
    """Run the ranks of this process in turn, until all are done.

    ``describe`` returns what a rank waits for.
    """
    if len(runs) == 1:
        # A rank alone waits in ``execute``. The deque drops the receives that it yields.
        (run,) = runs.values()
        deque(run, maxlen=0)
        return
    waiting: dict[int, Work | None] = dict.fromkeys(runs)
    while waiting:
        progress = False
        for rank in list(waiting):
            work = waiting[rank]
            if work is not None and not work.done():
                continue
            progress = True
            waiting[rank] = work = None  # the receive keeps its tensors alive
            try:
                waiting[rank] = next(runs[rank])
            except StopIteration:
                del waiting[rank]
        if not progress:
            ranks = "\n".join(f"  rank {rank}: {describe(rank)}" for rank in waiting)
            raise DeadlockError(
                f"every rank waits for another:\n{ranks}\nschedule.check() finds such a schedule "
                "before it runs"
            )
