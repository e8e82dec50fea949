# SPDX-License-Identifier: Apache-2.0
"""Runs a plan in the ready order: the steps of the nodes, in an order that follows arrivals.

A rank waits only where no node of its window can run, and then for any message. Nothing here knows
schedules or backends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ...collectives.group import Group, Tensors, Work
from ...engine.execute import Executable
from ...lowering.instruction import Registers, StepFn
from ...lowering.instructions import Wait
from .nodes import CALLER, KINDS, WAIT, Node

#: A work to wait for, and the slots of its result.
Pending: TypeAlias = tuple[Work, tuple[int, ...]]


class _Receive(NamedTuple):
    """The wait for the next message of a channel that has begun."""

    node: int
    peer: int
    work: Work
    writes: Sequence[int]
    then: Sequence[int]  # the steps after it


class _AnyOf(NamedTuple):
    """The wait for one of several messages, the first of the row first."""

    group: Group
    receives: Sequence[tuple[int, Work]]  # each with its sender

    def done(self) -> bool:
        return any(work.done() for _, work in self.receives)

    def wait(self) -> Tensors:
        if self.done():
            return ()
        ranks = [peer for peer, _ in self.receives if peer != CALLER]
        if ranks:  # any of them names the wait for the caller
            named = []
            for peer, work in self.receives:
                rank = ranks[0] if peer == CALLER else peer
                named.append((rank, work))
            self.group.wait_any(named)
        else:
            _, work = self.receives[0]
            work.wait()
        return ()


def steps_in_order(plan: Any, executable: Executable, r: Registers) -> Iterator[tuple[int, StepFn]]:
    """The steps of all nodes. Where draws continue the stream of the device, the order of the row
    is part of the result, and is kept.
    """
    if r.seed is None and plan.draws:
        for number, step in chain(*executable.phases):
            op = plan.keyed[number].op
            if type(op) is Wait:
                step = partial(_at_once, step)
            yield number, step
        return
    yield from _Run(plan, executable.steps, executable.group, r).all()


def _at_once(step: StepFn, r: Registers) -> Pending | None:
    """Take a message that has arrived without a turn of another rank, as a row does."""
    work, writes = step(r)
    if not work.done():
        return work, writes
    for slot, tensor in zip(writes, work.wait(), strict=True):
        r.slots[slot] = tensor
    return None


class _Run:
    """The state of a run.

    ``queues`` are the nodes that wait for no other node, by their kind. ``front`` is the first
    body or placed node that has not run, and ``end`` the position at which its window ends.
    """

    def __init__(self, plan: Any, steps: Sequence[StepFn], group: Group, r: Registers):
        self.nodes: Sequence[Node] = plan.nodes
        self.row: Sequence[int] = plan.in_row
        self.window = plan.window
        self.steps = steps
        self.group = group
        self.r = r
        self.missing = [node.missing for node in self.nodes]
        self.left = len(self.nodes)
        self.done = bytearray(self.left)
        self.queues: tuple[list[int], ...] = tuple([] for _ in KINDS)
        self.receives: list[_Receive] = []
        self.ran = 0  # of ``row``, those before ``front``
        self._advance()
        for place, count in enumerate(self.missing):
            if not count:
                heappush(self.queues[self.nodes[place].kind], place)

    def all(self) -> Iterator[tuple[int, StepFn]]:
        """Run all nodes."""
        nodes = self.nodes
        steps = self.steps
        bodies, last, sends, waits, placed = self.queues
        while self.left:
            arrived: list[_Receive] = []
            if sends:  # what was computed is released first
                place = heappop(sends)
            else:
                if waits and nodes[waits[0]].position < self.end:
                    yield from self._post()
                first = len(nodes)
                if bodies and nodes[bodies[0]].position < self.end:
                    first = bodies[0]
                if self.receives and self.receives[0].node < first:
                    arrived = [one for one in self.receives if one.work.done()]
                    yield from self._take(arrived)
                if placed and placed[0] == self.front:
                    place = heappop(placed)
                elif bodies and nodes[bodies[0]].position < self.end:
                    place = heappop(bodies)
                elif last and nodes[last[0]].position < self.end:
                    place = heappop(last)
                elif arrived:
                    continue
                else:
                    yield self._wait()
                    continue
            for number in nodes[place].steps:
                yield number, steps[number]
            self._ended(place)

    def _ended(self, place: int) -> None:
        nodes = self.nodes
        missing = self.missing
        self.done[place] = 1
        self.left -= 1
        if place == self.front:
            self._advance()
        for later in nodes[place].after:
            missing[later] -= 1
            if not missing[later]:
                heappush(self.queues[nodes[later].kind], later)

    def _advance(self) -> None:
        """Move the window to the first node of the row that has not run."""
        row = self.row
        while self.ran < len(row) and self.done[row[self.ran]]:
            self.ran += 1
        if self.ran < len(row):
            self.front = row[self.ran]
            self.end = self.nodes[self.front].position + self.window
        else:
            self.front = -1
            self.end = len(self.nodes)

    # ---- messages ----
    def _post(self) -> Iterator[tuple[int, StepFn]]:
        """Begin the waits of the window."""
        waits = self.queues[WAIT]
        while waits and self.nodes[waits[0]].position < self.end:
            place = heappop(waits)
            node = self.nodes[place]
            split = node.steps.index(node.message)
            for number in node.steps[:split]:
                yield number, self.steps[number]
            work, writes = self.steps[node.message](self.r)
            then = node.steps[split + 1 :]
            assert node.channel is not None, "a wait has a channel"
            peer, _ = node.channel
            insort(self.receives, _Receive(place, peer, work, writes, then))

    def _take(self, arrived: Sequence[_Receive]) -> Iterator[tuple[int, StepFn]]:
        """Take what has arrived."""
        for one in arrived:
            self.receives.remove(one)
            for slot, tensor in zip(one.writes, one.work.wait(), strict=True):
                self.r.slots[slot] = tensor
            for number in one.then:
                yield number, self.steps[number]
            self._ended(one.node)

    def _wait(self) -> tuple[int, StepFn]:
        """A step that waits for any of the messages."""
        works = [(one.peer, one.work) for one in self.receives]
        pending: Pending = (_AnyOf(self.group, works), ())
        return self.nodes[self.receives[0].node].message, lambda r: pending
