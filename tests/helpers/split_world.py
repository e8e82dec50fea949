"""A model's trees spread over processes that are threads here: what transforms are tested on.

``run(processes, fn)`` calls ``fn(over)`` once per process, at the same time; ``over`` has what a transform asks of a
pipeline. A sum is taken in an order that depends on who the processes are, as a ring's would, unless told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fpipe.collectives.local import local


@dataclass
class Meeting:
    """Where processes leave what they have and read what the others have."""

    processes: int
    barrier: threading.Barrier = field(init=False)
    table: list[Any] = field(init=False)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.processes, timeout=20)
        self.table = [None] * self.processes

    def exchange(self, rank: int, obj: Any) -> list[Any]:
        self.table[rank] = obj
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        return found


class Pretend:
    """One process's end: a pipeline for transforms, and a data-parallel group with the same processes."""

    def __init__(self, meeting: Meeting, rank: int, here: Sequence[int], stages: int, tied: Sequence[Sequence[str]]):
        self.meeting, self.rank, self.here, self.stages = meeting, rank, tuple(here), stages
        self.tied = tuple(map(tuple, tied))
        self.group = local(1)
        self.sums = 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        found = self.meeting.exchange(self.rank, tensor)
        assert len({(t.shape, t.dtype) for t in found}) == 1, "processes sum different things"
        turn = len(found) // 2
        total = torch.zeros_like(tensor)
        for other in found[turn:] + found[:turn]:
            total = total + other
        return total

    def gather(self, obj: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, obj)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        found = torch.stack(self.meeting.exchange(self.rank, tensor))
        return {"sum": found.sum(0), "mean": found.sum(0) / len(found), "max": found.amax(0)}[op]

    def place(self, tree: list[Any]) -> list[Any]:
        return [part if stage in self.here else None for stage, part in enumerate(tree)]


def owners(stages: int, processes: int, *, how: str = "loop") -> list[list[int]]:
    """Which stages each process has: dealt round, or first to last and back again as in a V."""
    turns = [*range(processes), *reversed(range(processes))] if how == "V" else range(processes)
    return [[s for s in range(stages) if turns[s % len(turns)] == rank] for rank in range(processes)]


def run(
    spread: Sequence[Sequence[int]],
    stages: int,
    fn: Callable[[Pretend], Any],
    *,
    tied: Sequence[Sequence[str]] = (),
) -> list[Any]:
    """Call ``fn`` on every process at once; what each returned, by rank."""
    meeting = Meeting(len(spread))
    results: list[Any] = [None] * len(spread)
    errors: list[BaseException] = []

    def process(rank: int) -> None:
        try:
            results[rank] = fn(Pretend(meeting, rank, spread[rank], stages, tied))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(spread))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    told = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if told or errors:
        raise (told or errors)[0]
    return results


def merge(parts: Sequence[list[Any]]) -> list[Any]:
    """The whole tree from what each process has of it."""
    return [next((part for part in stage if part is not None), None) for stage in zip(*parts, strict=True)]
