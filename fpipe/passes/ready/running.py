# SPDX-License-Identifier: Apache-2.0
"""Runs a plan in the ready order: the steps of the nodes, in an order that follows arrivals.

A rank waits only where no node of its window can run, and then for any message. Nothing here knows
schedules or backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ...collectives.group import Group, Tensors, Work
from ...engine.execute import Executable
from ...lowering.instruction import Registers, StepFn
from ...lowering.instructions import Wait
from .nodes import BODY, CALLER, PLACED, SEND, WAIT, Node

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
            named = [(ranks[0] if peer == CALLER else peer, work) for peer, work in self.receives]
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
            yield number, partial(_at_once, step) if type(plan.keyed[number].op) is Wait else step
        return
    yield from _Run(plan.nodes, plan.window, executable.steps, executable.group, r).all()


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

    ``bodies`` are those that wait for no node, by whether no other rank waits for them, and place.
    ``front`` is the first body or placed node that has not run.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        window: int,
        steps: Sequence[StepFn],
        group: Group,
        r: Registers,
    ):
        self.nodes = nodes
        self.window = window
        self.steps = steps
        self.group = group
        self.r = r
        self.missing = [node.missing for node in nodes]
        self.done = bytearray(len(nodes))
        self.row = []
        for place, node in enumerate(nodes):
            if node.kind in (BODY, PLACED):
                self.row.append(place)
        self.front = 0
        self.bodies: tuple[list[int], list[int]] = ([], [])
        self.sends: list[int] = []
        self.waits: list[int] = []  # those whose channel has come to them
        self.receives: list[_Receive] = []
        self.left = len(nodes)
        for place, count in enumerate(self.missing):
            if not count:
                self._open(place)

    def all(self) -> Iterator[tuple[int, StepFn]]:
        """Run all nodes."""
        while self.left:
            left = self.left
            if not self.sends:  # what was computed is released first
                if self.waits:
                    yield from self._post()
                if self.receives:
                    yield from self._take()
            place = self._next()
            if place is not None:
                for number in self.nodes[place].steps:
                    yield number, self.steps[number]
                self._ended(place)
            elif self.left == left:
                receives = sorted(self.receives, key=lambda one: one.node)
                works = [(one.peer, one.work) for one in receives]
                wait = (_AnyOf(self.group, works), ())
                first = self.nodes[receives[0].node]
                yield first.message, lambda r, wait=wait: wait

    def _open(self, place: int) -> None:
        """A node waits for no other node."""
        node = self.nodes[place]
        if node.kind == BODY:
            heappush(self.bodies[node.last], place)
        elif node.kind == SEND:
            heappush(self.sends, place)
        elif node.kind == WAIT:
            heappush(self.waits, place)

    def _ended(self, place: int) -> None:
        self.done[place] = 1
        self.left -= 1
        row = self.row
        while self.front < len(row) and self.done[row[self.front]]:
            self.front += 1
        for later in self.nodes[place].after:
            self.missing[later] -= 1
            if not self.missing[later]:
                self._open(later)

    def _end(self) -> int:
        """The position at which the window ends."""
        if self.front == len(self.row):
            return len(self.nodes)
        return self.nodes[self.row[self.front]].position + self.window

    def _next(self) -> int | None:
        """The node to run now, if one can."""
        if self.sends:
            return heappop(self.sends)
        if self.front < len(self.row):
            place = self.row[self.front]
            if self.nodes[place].kind == PLACED and not self.missing[place]:
                return place
        end = self._end()
        for heap in self.bodies:
            if heap and self.nodes[heap[0]].position < end:
                return heappop(heap)
        return None

    # ---- messages ----
    def _post(self) -> Iterator[tuple[int, StepFn]]:
        """Begin the waits of the window."""
        end = self._end()
        while self.waits and self.nodes[self.waits[0]].position < end:
            place = heappop(self.waits)
            node = self.nodes[place]
            split = node.steps.index(node.message)
            for number in node.steps[:split]:
                yield number, self.steps[number]
            work, writes = self.steps[node.message](self.r)
            then = node.steps[split + 1 :]
            assert node.channel is not None, "a wait has a channel"
            peer, _ = node.channel
            self.receives.append(_Receive(place, peer, work, writes, then))

    def _take(self) -> Iterator[tuple[int, StepFn]]:
        """Take what has arrived."""
        arrived = [one for one in self.receives if one.work.done()]
        for one in arrived:
            self.receives.remove(one)
            for slot, tensor in zip(one.writes, one.work.wait(), strict=True):
                self.r.slots[slot] = tensor
            for number in one.then:
                yield number, self.steps[number]
            self._ended(one.node)
