# SPDX-License-Identifier: Apache-2.0
"""Runs a plan in the ready order: the steps of the nodes, in an order that follows arrivals.

A rank waits only where no node of its window can run, and then for any message. What runs next
depends on nothing but what has run and which messages have arrived, so it is found once, and later
runs follow it. Sets of nodes are the bits of numbers. Nothing here knows schedules or backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain
from operator import or_
from typing import Any, NamedTuple, TypeAlias

from ...collectives.group import Group, Pending as Arrival, Tensors, Work
from ...engine.execute import Executable
from ...lowering.instruction import Registers, StepFn
from ...lowering.instructions import Wait, nothing
from .nodes import BODY, CALLER, LAST, NODE_KINDS, PLACED, SEND, WAIT, Node

#: A work to wait for, and the slots of its result.
Pending: TypeAlias = tuple[Work, tuple[int, ...]]
#: The most branches that are kept.
MOST = 2000


def steps_in_order(plan: Any, executable: Executable, r: Registers) -> Iterator[tuple[int, StepFn]]:
    """The steps of all nodes. Where draws continue the stream of the device, the order of the row
    is part of the result, and is kept.
    """
    if r.seed is None and plan.draws:
        yield from chain(*executable.phases)
        return
    orders = plan.orders
    key = id(executable)
    if key not in orders:
        orders[key] = Order(plan, executable)
    yield from orders[key].steps(r)


#: Steps that run without a look at messages, and the look after them.
Branch: TypeAlias = tuple[Sequence[tuple[int, StepFn]], "_Look"]


class _Look(NamedTuple):
    """A look at messages, after the nodes that are ``done``, while others have ``begun``.

    ``places`` are the receives of messages that could come before the next body; at the end of the
    plan there are none. ``idle`` waits for any of them, if nothing else can run.
    """

    done: int
    begun: int
    places: Sequence[int]
    idle: tuple[int, StepFn] | None


class Order:
    """The order of a plan's nodes, as far as runs of it have come."""

    def __init__(self, plan: Any, executable: Executable):
        self.plan = plan
        self.executable = executable
        self.kinds = [0] * len(NODE_KINDS)  # the nodes of each kind
        #: The works of receives that need not begin, where the group has a ``fetch``.
        self.works: dict[int, Work] = {}
        at = [0] * (len(plan.row) + 2)
        for place, node in enumerate(plan.nodes):
            self.kinds[node.kind] |= 1 << place
            at[node.position + 1] |= 1 << place
            op = plan.instructions[node.message].op if node.kind == WAIT else None
            if isinstance(op, Wait):
                post, fetch = executable.group.receiver(op.peer, plan.rank, op.specs, op.stream)
                if fetch is not None:
                    self.works[place] = post()
        self.reach = list(accumulate(at, or_))  # the nodes before each position
        self.branch = lru_cache(maxsize=MOST)(self._branch)

    def steps(self, r: Registers) -> Iterator[tuple[int, StepFn]]:
        """The steps of a run."""
        branch = self.branch(0, 0, None)
        receives = r.receives
        receives |= self.works
        while True:
            steps, look = branch
            yield from steps
            places = look.places
            if not places:
                break
            while not (arrived := tuple([place for place in places if receives[place].done()])):
                if look.idle is None:
                    break
                yield look.idle
            branch = self.branch(look.done, look.begun, arrived)
        for place in self.works:
            del receives[place]

    def _branch(self, done: int, begun: int, arrived: tuple[int, ...] | None) -> Branch:
        """The branch after a look, once these messages have arrived; None: the first branch."""
        walk = _Walk(self, done, begun)
        walk.run(arrived)
        return walk.steps, walk.look()


class _Walk:
    """Collects the steps of nodes, which run one after another up to a look at messages."""

    def __init__(self, order: Order, done: int, begun: int):
        self.order = order
        self.nodes: Sequence[Node] = order.plan.nodes
        self.done = done
        self.begun = begun
        self.steps: list[tuple[int, StepFn]] = []

    def run(self, arrived: tuple[int, ...] | None) -> None:
        """Take what has arrived, then run nodes."""
        for place in arrived or ():
            self._take(place)
        looked = arrived is not None
        none = len(self.nodes)
        while self.done.bit_count() < none:
            place = self._first(SEND)  # what was computed is released first
            if place == none and not looked:
                self._begin()
                if self.begun and _lowest(self.begun) < self._first(BODY):
                    if self.begun & (self.begun - 1) or self._next() < none:
                        return
                    self._take(_lowest(self.begun))
                    continue
            if place == none:
                place = self._next()
            if place < none or not looked:  # after a look there may be nothing to run yet
                self._add(self.nodes[place].steps)
                self.done |= 1 << place
            looked = False

    def look(self) -> _Look:
        """The look after the steps."""
        places = [place for place in range(self._first(BODY)) if self.begun >> place & 1]
        idle = None
        if places and self._next() == len(self.nodes):
            first = self.nodes[places[0]].message
            idle = first, _any_of(self.order.executable.group, self.nodes, places)
        return _Look(self.done, self.begun, places, idle)

    # ---- nodes ----
    def _reach(self) -> tuple[int, int]:
        """The first body or placed node that has not run, and the nodes of its window."""
        bodies, last, _, _, placed = self.order.kinds
        left = (bodies | last | placed) & ~self.done
        reach = self.order.reach
        if not left:
            return -1, reach[-1]
        front = _lowest(left)
        end = self.nodes[front].position + self.order.plan.window
        return front, reach[min(end, len(reach) - 1)]

    def _first(self, kind: int) -> int:
        """The first node of a kind in the window that can run; past all nodes, if none can."""
        _, window = self._reach()
        left = self.order.kinds[kind] & window & ~(self.done | self.begun)
        while left:
            place = _lowest(left)
            if not self.nodes[place].before & ~self.done:
                return place
            left &= left - 1
        return len(self.nodes)

    def _next(self) -> int:
        """The node that runs next where no message comes first."""
        front, _ = self._reach()
        if front == self._first(PLACED):
            return front
        place = self._first(BODY)
        return self._first(LAST) if place == len(self.nodes) else place

    # ---- steps ----
    def _add(self, numbers: Sequence[int]) -> None:
        bound = self.order.executable.steps
        for number in numbers:
            if bound[number] is not nothing:
                self.steps.append((number, bound[number]))

    def _begin(self) -> None:
        """Begin the receives of the window."""
        order = self.order
        while (place := self._first(WAIT)) < len(self.nodes):
            node = self.nodes[place]
            number = node.message
            self._add(node.steps[: node.steps.index(number)])
            if place not in order.works:
                begin = order.executable.steps[number]
                self.steps.append((number, partial(_post, place, begin)))
            self.begun |= 1 << place

    def _take(self, place: int) -> None:
        """Take a message, or wait for it."""
        order = self.order
        node = self.nodes[place]
        number = node.message
        if place in order.works:
            self._add([number])
        else:
            writes = order.plan.instructions[number].writes
            self.steps.append((number, partial(_wait, place, writes)))
        self._add(node.steps[node.steps.index(number) + 1 :])
        self.begun ^= 1 << place
        self.done |= 1 << place


# ---- steps of receives ----
def _post(key: int, begin: StepFn, r: Registers) -> None:
    r.receives[key], _ = begin(r)


def _wait(key: int, writes: tuple[int, ...], r: Registers) -> Pending:
    return r.receives.pop(key), writes


def _any_of(group: Group, nodes: Sequence[Node], places: Sequence[int]) -> StepFn:
    """A step that waits for any of the receives, the first of the row first."""
    ranks = [channel[0] for place in places if (channel := nodes[place].channel)]
    others = [rank for rank in ranks if rank != CALLER]
    # any of them names the wait for the caller
    names = [others[0] if rank == CALLER and others else rank for rank in ranks]

    def step(r: Registers) -> Pending:
        works = [r.receives[place] for place in places]

        def arrived() -> bool:
            return any(work.done() for work in works)

        def wait() -> Tensors:
            if not arrived():
                if others:
                    group.wait_any(list(zip(names, works, strict=True)))
                else:
                    works[0].wait()
            return ()

        return Arrival(wait, arrived), ()

    return step


def _lowest(bits: int) -> int:
    """The place of the lowest bit."""
    return (bits & -bits).bit_length() - 1
