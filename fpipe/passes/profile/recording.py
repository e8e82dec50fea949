# SPDX-License-Identifier: Apache-2.0
"""When each instruction of a plan ran, on every rank, by one clock.

``recording`` hooks into the loop for a while: it takes the time before and after each step and
changes nothing else. ``gathered`` collects the events of all ranks. To set their clocks right, rank
0 asks another rank for its time: that time lies between question and answer. Knows plans; the
meaning of the times is left to ``costing``.
"""

from __future__ import annotations

import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch

from ...actions.action import Action, unfused
from ...collectives.group import Group, Pending
from ...engine.execute import WATCH, Executable
from ...errors import FpipeError
from ...lowering.instruction import Instruction, Registers, StepFn
from ...lowering.instructions import Recv, Send, Wait
from ...programs.internals import setting
from ...tree import Spec

_QUESTIONS = 12
_BYTES = (Spec((8,), (1,), torch.uint8),)  # a float of 64 bits, which not every device has


class Event(NamedTuple):
    """One instruction that ran, with its times.

    ``number`` counts the messages of actions to or from ``peer``; it is -1 for other events.
    """

    kind: str
    action: Action | None
    start: float
    end: float
    peer: int = -1
    number: int = -1
    nbytes: int = 0


class Run(NamedTuple):
    """The events of one rank over its whole plan, and the actions that it carried out, in order."""

    rank: int
    events: tuple[Event, ...]
    actions: tuple[Action, ...] = ()
    free: float = 0.0  # when its last runs were gathered; 0 for none


#: A time of the host or of a device.
Mark: TypeAlias = float | torch.Event


class Clock(NamedTuple):
    """``mark`` marks a time; ``seconds`` converts marks to times of this process's clock."""

    mark: Callable[[], Mark]
    seconds: Callable[[list[Any]], list[float]]

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        """The clock of a device. Where it runs behind its host, a mark is an event in the stream of
        its work.

        >>> clock = Clock.of(torch.device("cpu"))
        >>> first, second = clock.seconds([clock.mark(), clock.mark()])
        >>> first <= second
        True
        """
        if device.type in ("cpu", "meta"):
            return cls(time.perf_counter, list)

        def mark() -> torch.Event:
            event = torch.Event(device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
            return event

        def seconds(marks: list[torch.Event]) -> list[float]:
            torch.accelerator.synchronize(device)
            return [when + zero.elapsed_time(event) / 1e3 for event in marks]

        torch.accelerator.synchronize(device)
        zero = mark()
        when = time.perf_counter()
        return cls(mark, seconds)


class Log(NamedTuple):
    """A run of a plan from instruction ``first`` on, while it is recorded: a mark before and after
    each step.
    """

    bound: Executable
    first: int
    starts: list[Mark]
    ends: list[Mark]
    clock: Clock

    def run(self) -> Run:
        """What was recorded."""
        plan = self.bound.plan
        # an error leaves one without end
        starts, ends = map(self.clock.seconds, (self.starts[: len(self.ends)], self.ends))
        instructions = plan.instructions[self.first :]
        messages = list(_messages(plan.instructions))[self.first :]
        events = tuple(
            Event(ins.kind, ins.action, start, end, *message)
            for ins, message, start, end in zip(instructions, messages, starts, ends, strict=False)
        )
        return Run(plan.rank, events, tuple(unfused(plan.row)))


def _messages(instructions: Sequence[Instruction]) -> Iterator[tuple[int, int, int]]:
    """Of each instruction the other rank, the count of earlier messages of actions between the two,
    and the bytes that it sends.
    """
    sent: dict[int, Iterator[int]] = defaultdict(count)
    for ins in instructions:
        op = ins.op
        if isinstance(op, Send):
            number = -1 if ins.action is None else next(sent[op.peer])
            yield op.peer, number, sum(spec.bytes for spec in op.specs)
        elif isinstance(op, Recv):
            yield op.peer, op.number if isinstance(op, Wait) else -1, 0
        else:
            yield -1, -1, 0


@contextmanager
def recording() -> Iterator[list[Log]]:
    """Record every run of the ranks of this process from here to the end of the block.

    >>> from fpipe import grad, local, pipeline
    >>> pipe = pipeline([lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2,
    ...     group=local(2))
    >>> with recording() as logs:
    ...     grads = grad(pipe)([torch.ones(())] * 2, torch.ones(2))
    >>> [event.kind for event in logs[1].run().events][:4]
    ['RECV', 'RECV', 'WAIT', 'F']
    """
    logs: list[Log] = []

    def watch(bound: Executable, phase: int | None) -> Iterable[tuple[int, StepFn]]:
        """The steps with a mark before and after each; a second phase continues the log of the
        first.
        """
        split = bound.plan.split
        first = split if phase == 1 else 0
        steps = bound.steps[first : split if phase == 0 else None]
        for log in reversed(logs):
            if log.bound is bound and log.first + len(log.ends) == first > 0:
                break
        else:
            log = Log(bound, first, [], [], Clock.of(bound.group.device(bound.plan.rank)))
            logs.append(log)
        marks = log.starts.append, log.ends.append, log.clock.mark
        return enumerate([_timed(step, *marks) for step in steps], first)

    with setting(WATCH, watch):
        yield logs


def _timed(
    step: StepFn,
    start: Callable[[Mark], None],
    end: Callable[[Mark], None],
    mark: Callable[[], Mark],
) -> StepFn:
    def timed(r: Registers) -> Any:
        start(mark())
        pending = step(r)
        if pending is None:
            return end(mark())
        work, slots = pending

        def finish() -> tuple[torch.Tensor, ...]:
            tensors = work.wait()
            end(mark())
            return tensors

        return Pending(finish, work.done), slots

    return timed


def gathered(group: Group, local: Mapping[int, Sequence[Run]]) -> list[tuple[Run, ...]]:
    """The runs of all ranks in the order in which they ran, by the clock of rank 0; ``local`` are
    those recorded here.

    Every process of the group must call it, after the same number of runs.
    """
    reports = group.gather_objects((differences(group), local))
    ahead: list[float] = reports[0][0]
    by_rank = ChainMap(*(part for _, part in reports))
    if len({len(runs) for runs in by_rank.values()}) != 1 or len(by_rank) != group.size:
        counts = ", ".join(f"rank {rank}: {len(runs)}" for rank, runs in sorted(by_rank.items()))
        raise FpipeError(
            f"the ranks ran plans a different number of times while profiled ({counts}); profile "
            "one step that every rank runs"
        )
    rows = zip(*(by_rank[rank] for rank in range(group.size)), strict=True)
    shifted = [tuple(map(_shifted, runs, ahead)) for runs in rows]
    group.barrier()  # or a rank that gathers for longer begins the next step later
    return shifted


def _shifted(run: Run, by: float) -> Run:
    events = (event._replace(start=event.start - by, end=event.end - by) for event in run.events)
    return run._replace(events=tuple(events), free=run.free and run.free - by)


# ---- by how much clocks differ ----
def differences(group: Group) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's; every process must call it, rank
    0 has the result.

    A difference that is smaller than its uncertainty, as on one machine, is 0.
    """
    ahead = [0.0] * group.size
    mine = group.here[0]
    if len(group.here) == group.size:
        return ahead
    group.barrier()
    for rank in range(1, group.size):
        answers: list[tuple[float, float]] = []
        for _ in range(_QUESTIONS if mine in (0, rank) else 0):
            if mine == rank:
                _receive(group, 0, rank)
                _send(group, rank, 0)
                continue
            before = _send(group, 0, rank)
            theirs = _receive(group, rank, 0)
            after = time.perf_counter()
            answers.append((after - before, theirs - (before + after) / 2))
        width, difference = min(answers, default=(0.0, 0.0))
        ahead[rank] = 0.0 if abs(difference) <= width / 2 else difference
    group.flush()
    return ahead


def _send(group: Group, src: int, dst: int) -> float:
    """Send the time, and return it."""
    now = time.perf_counter()
    tensor = torch.tensor([now], dtype=torch.float64).view(torch.uint8).to(group.device(src))
    group.send((tensor,), src, dst, _BYTES).wait()
    return now


def _receive(group: Group, src: int, dst: int) -> float:
    (tensor,) = group.recv(_BYTES, src, dst).wait()
    return tensor.cpu().view(torch.float64).item()
