# SPDX-License-Identifier: Apache-2.0
"""The most bytes that a plan holds in any order of its window.

While ``first`` is the first action that has not run, a rank holds what it holds before this action
in the order of the row, and at most all that the actions of the window add. What they free is not
subtracted: it may be freed last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ...lowering.memory import MemoryAccount
from ...lowering.plan import Plan
from .nodes import Node


class _Counting(MemoryAccount):
    """An account that records the storages of the current node that it began to hold."""

    def __init__(self, wired: bool):
        super().__init__(wired)
        self.begun: dict[Hashable, int] = {}

    def begin(self, key: Hashable, storage: Hashable, nbytes: int) -> None:
        before = self.live
        super().begin(key, storage, nbytes)
        if self.live > before:
            self.begun[storage] = nbytes

    def taken(self) -> int:
        """The bytes that were begun since the last call, and are still held."""
        held = sum(size for storage, size in self.begun.items() if storage in self._sizes)
        self.begun.clear()
        return held


def bound(plan: Plan, nodes: Sequence[Node], window: int) -> tuple[int, ...]:
    """For each instruction, the most bytes held while its action is the first that has not run."""
    positions = [0] * len(plan.keyed)
    for node in nodes:
        for number in node.steps:
            positions[number] = node.position
    count = len(plan.row) + 1
    before = [0] * count  # what is held before an action, in the order of the row
    added = [0] * count
    excess = [0] * count
    account = _Counting(plan.wired)
    reached = -1
    for number, ins in enumerate(plan.keyed):
        position = positions[number]
        while reached < position:
            reached += 1
            before[reached] = account.live
        start = account.live
        ends, needed = plan.uses[number]
        during = ins.op.hold(ins, ends, account)
        for key, later in zip(ins.writes, needed, strict=True):
            if not later:
                account.end(key)
        excess[position] = max(excess[position], during - start, account.live - start)
        for place in ends:
            account.end(ins.reads[place])
        added[position] += account.taken()
    for position in range(reached + 1, count):
        before[position] = account.live
    windows = [slice(first, first + window) for first in range(count)]
    most = [
        held + sum(added[near]) + max(excess[near])
        for held, near in zip(before, windows, strict=True)
    ]
    return tuple(most[position] for position in positions)
