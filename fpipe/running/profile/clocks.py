# SPDX-License-Identifier: Apache-2.0
"""Clocks: of this process and of a device, and by how much those of two processes differ.

To measure a difference, rank 0 asks another rank for its time: that time lies between question and answer. Knows groups
and devices; no plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...collectives.group import Group
from ...tree import Spec

_QUESTIONS = 12
_BYTES = (Spec((8,), (1,), torch.uint8),)  # a float of 64 bits, which not every device has


class Clock:
    """Marks times; ``seconds`` converts them to this process's clock.

    On a device that runs behind its host, a mark is an event in the stream of its work.

    >>> clock = Clock(torch.device("cpu"))
    >>> marks = [clock.mark(), clock.mark()]
    >>> first, second = clock.seconds(marks)
    >>> first <= second
    True
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._zero: tuple[Any, float] | None = None
        self.mark: Callable[[], Any] = time.perf_counter if device.type in ("cpu", "meta") else self._event
        if self.mark is not time.perf_counter:
            torch.accelerator.synchronize(device)
            self._zero = self._event(), time.perf_counter()

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        """The times of marks."""
        if self._zero is None:
            return list(marks)
        torch.accelerator.synchronize(self._device)
        first, when = self._zero
        return [when + first.elapsed_time(mark) / 1e3 for mark in marks]


def differences(group: Group) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's; every process must call it, rank 0 has the result.

    A difference that is smaller than its uncertainty, as on one machine, is 0.
    """
    if len(group.here) == group.size:
        return [0.0] * group.size
    mine = group.here[0]
    group.barrier()
    ahead = [0.0] * group.size
    for rank in range(1, group.size):
        if mine == 0:
            ahead[rank] = _ask(group, rank)
        elif mine == rank:
            _answer(group, rank)
    group.flush()
    return ahead


def _ask(group: Group, rank: int) -> float:
    best = (float("inf"), 0.0)
    for _ in range(_QUESTIONS):
        before = time.perf_counter()
        _send(group, before, 0, rank)
        theirs = _receive(group, rank, 0)
        after = time.perf_counter()
        best = min(best, (after - before, theirs - (before + after) / 2))
    width, difference = best
    return 0.0 if abs(difference) <= width / 2 else difference


def _answer(group: Group, rank: int) -> None:
    for _ in range(_QUESTIONS):
        _receive(group, 0, rank)
        _send(group, time.perf_counter(), rank, 0)


def _send(group: Group, value: float, src: int, dst: int) -> None:
    tensor = torch.tensor([value], dtype=torch.float64).view(torch.uint8).to(group.device(src))
    group.send((tensor,), src, dst, _BYTES).wait()


def _receive(group: Group, src: int, dst: int) -> float:
    (tensor,) = group.recv(_BYTES, src, dst).wait()
    return tensor.cpu().view(torch.float64).item()
