# SPDX-License-Identifier: Apache-2.0
"""When each instruction of a plan ran, on every rank, by one clock.

A ``Recorder`` hooks into the loop for a while: it takes the time before and after each step and changes nothing else.
``gathered`` collects the events of all ranks. Knows plans; the meaning of the times is left to ``costing``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...collectives.group import Group, Work
from ...errors import FpipeError
from ...plans.plan import Instruction
from ...schedules.actions import Action, plain
from ..loop import WATCH, Executable, StepFn
from ..registers import Registers
from .clocks import Clock, differences

_BESIDE = re.compile(r"with ([0-9]+)([FBIW])([0-9]+)")


class Event(NamedTuple):
    """One instruction that ran, with its times.

    ``number`` counts the messages of actions to or from ``peer``; it is -1 for other events. ``beside`` is the other
    action of a program that runs two.
    """

    kind: str
    action: Action | None
    start: float
    end: float
    peer: int = -1
    number: int = -1
    nbytes: int = 0
    beside: Action | None = None


@dataclass(frozen=True)
class Run:
    """The events of one rank over its whole plan, and the actions that it carried out, in order."""

    rank: int
    did: tuple[Event, ...]
    actions: tuple[Action, ...] = ()


@dataclass
class _Log:
    bound: Executable
    first: int
    clock: Clock
    starts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The instruction after the last one that ran to its end."""
        return self.first + len(self.ends)


class Recorder:
    """Records what the ranks of this process do, while it is ``on``.

    >>> import torch
    >>> from fpipe import grad, local, pipeline
    >>> pipe = pipeline([lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2, group=local(2))
    >>> recorder = Recorder()
    >>> with recorder.on():
    ...     grads = grad(pipe)([torch.ones(())] * 2, torch.ones(2))
    >>> [did.kind for did in recorder.runs()[1][0].did][:4]
    ['RECV', 'RECV', 'WAIT', 'F']
    """

    def __init__(self) -> None:
        self._logs: list[_Log] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record every run from here to the end of the block."""
        before = WATCH.set(self._watch)
        try:
            yield
        finally:
            WATCH.reset(before)

    @property
    def group(self) -> Group | None:
        """The group of the first run, if there was one."""
        return self._logs[0].bound.group if self._logs else None

    def _watch(self, bound: Executable, steps: Sequence[StepFn], first: int) -> Sequence[StepFn]:
        log = next((log for log in reversed(self._logs) if log.bound is bound and log.next == first > 0), None)
        if log is None:
            log = _Log(bound, first, Clock(bound.group.device(bound.plan.rank)))
            self._logs.append(log)
        start, end, mark = log.starts.append, log.ends.append, log.clock.mark
        return [_timed(step, start, end, mark) for step in steps]

    def runs(self) -> dict[int, list[Run]]:
        """The recorded runs by rank."""
        found: dict[int, list[Run]] = {}
        for log in self._logs:
            rank = log.bound.plan.rank
            actions = tuple(plain(log.bound.plan.row))
            found.setdefault(rank, []).append(Run(rank, tuple(_did(log)), actions))
        return found


def _timed(step: StepFn, start: Callable[[Any], None], end: Callable[[Any], None], mark: Callable[[], Any]) -> StepFn:
    def timed(r: Registers) -> Any:
        start(mark())
        pending = step(r)
        if pending is not None:
            work, *rest = pending
            return (_Timed(work, end, mark), *rest)
        end(mark())
        return None

    return timed


class _Timed:
    """A work whose end is recorded."""

    __slots__ = ("_end", "_mark", "_work")

    def __init__(self, work: Work, end: Callable[[Any], None], mark: Callable[[], Any]):
        self._work, self._end, self._mark = work, end, mark

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> Any:
        made = self._work.wait()
        self._end(self._mark())
        return made


def _did(log: _Log) -> Iterator[Event]:
    numbers = list(_numbers(log.bound.plan.instructions))
    starts, ends = log.clock.seconds(log.starts), log.clock.seconds(log.ends)
    for index, (start, end) in enumerate(zip(starts, ends, strict=False), log.first):  # an error leaves one without end
        ins = log.bound.plan.instructions[index]
        nbytes = sum(spec.bytes for spec in ins.specs) if ins.kind == "SEND" else 0
        found = _BESIDE.fullmatch(ins.program.label) if ins.program is not None and ins.program.label else None
        beside = Action(int(found[1]), found[2], int(found[3])) if found else None  # type: ignore[arg-type]
        yield Event(ins.kind, ins.action, start, end, ins.peer, numbers[index], nbytes, beside)


def _numbers(instructions: Sequence[Instruction]) -> Iterator[int]:
    """For messages of actions, the count of those before it to or from the same rank; -1 for everything else."""
    sent: dict[int, int] = {}
    for ins in instructions:
        if ins.kind == "SEND" and ins.action is not None:
            yield sent.get(ins.peer, 0)
            sent[ins.peer] = sent.get(ins.peer, 0) + 1
        else:
            yield ins.number if ins.kind == "WAIT" and ins.share is None else -1


def gathered(recorder: Recorder) -> list[tuple[Run, ...]]:
    """The runs of all ranks in the order in which they ran, by the clock of rank 0.

    Every process of the group must call it, after the same number of runs.
    """
    group, mine = recorder.group, recorder.runs()
    if group is None:
        return []
    ahead = differences(group)
    told: list[tuple[list[float], dict[int, list[Run]]]] = group.gather_objects((ahead, mine))
    by_rank: dict[int, list[Run]] = {}
    for _, runs in told:
        by_rank |= runs
    if len({len(runs) for runs in by_rank.values()}) != 1 or len(by_rank) != group.size:
        counts = ", ".join(f"rank {rank}: {len(runs)}" for rank, runs in sorted(by_rank.items()))
        raise FpipeError(f"the ranks ran plans a different number of times while profiled ({counts}); profile one step "
                         "that every rank runs")  # fmt: skip
    ahead = told[0][0]
    return [
        tuple(_shifted(by_rank[rank][k], ahead[rank]) for rank in range(group.size)) for k in range(len(by_rank[0]))
    ]


def _shifted(run: Run, by: float) -> Run:
    if not by:
        return run
    did = tuple(did._replace(start=did.start - by, end=did.end - by) for did in run.did)
    return Run(run.rank, did, run.actions)
