"""Threads in the place of processes, each with some stages of a model: what transforms are tested
on.

``run(stages_of, stages, fn)`` calls ``fn(over)`` once per process, concurrently; ``over``
implements the methods of a pipeline that transforms call. Like a ring all-reduce, ``all_sum`` adds
in an order that is not the order of the ranks.
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
class Exchange:
    """An all-gather of Python objects between threads."""

    processes: int
    barrier: threading.Barrier = field(init=False)
    table: list[Any] = field(init=False)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.processes, timeout=20)
        self.table = [None] * self.processes

    def exchange(self, rank: int, obj: Any) -> list[Any]:
        self.table[rank] = obj
        self.barrier.wait()
        gathered = list(self.table)
        self.barrier.wait()
        return gathered


class FakePipeline:
    """One process: a pipeline as transforms see it, and a data-parallel group with the same
    processes.
    """

    def __init__(
        self,
        objects: Exchange,
        rank: int,
        here: Sequence[int],
        stages: int,
        tied: Sequence[Sequence[str]],
    ):
        self.objects, self.rank, self.here, self.stages = objects, rank, tuple(here), stages
        self.tied = tuple(map(tuple, tied))
        self.group = local(1)
        self.sums = 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        parts = self.objects.exchange(self.rank, tensor)
        assert len({(t.shape, t.dtype) for t in parts}) == 1, (
            "processes sum tensors of different shapes or dtypes"
        )
        start = len(parts) // 2
        total = torch.zeros_like(tensor)
        for other in parts[start:] + parts[:start]:
            total = total + other
        return total

    def gather(self, obj: Any) -> list[Any]:
        return self.objects.exchange(self.rank, obj)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        stacked = torch.stack(self.objects.exchange(self.rank, tensor))
        return {
            "sum": stacked.sum(0),
            "mean": stacked.sum(0) / len(stacked),
            "max": stacked.amax(0),
        }[op]

    def place(self, tree: list[Any]) -> list[Any]:
        return [part if stage in self.here else None for stage, part in enumerate(tree)]


def owners(stages: int, processes: int, *, how: str = "loop") -> list[list[int]]:
    """The stages of each process: in a loop, or first to last and back as in a V."""
    turns = [*range(processes), *reversed(range(processes))] if how == "V" else range(processes)
    return [
        [s for s in range(stages) if turns[s % len(turns)] == rank] for rank in range(processes)
    ]


def run(
    stages_of: Sequence[Sequence[int]],
    stages: int,
    fn: Callable[[FakePipeline], Any],
    *,
    tied: Sequence[Sequence[str]] = (),
) -> list[Any]:
    """Call ``fn`` on every process concurrently; return the results by rank."""
    objects = Exchange(len(stages_of))
    results: list[Any] = [None] * len(stages_of)
    errors: list[BaseException] = []

    def process(rank: int) -> None:
        try:
            results[rank] = fn(FakePipeline(objects, rank, stages_of[rank], stages, tied))
        except BaseException as error:
            errors.append(error)
            objects.barrier.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(stages_of))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0]
    return results


def merge(parts: Sequence[list[Any]]) -> list[Any]:
    """The whole tree from the parts of all processes."""
    return [
        next((part for part in stage if part is not None), None)
        for stage in zip(*parts, strict=True)
    ]
