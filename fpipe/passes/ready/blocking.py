# SPDX-License-Identifier: Apache-2.0
"""Whether ranks in the ready order can wait for each other for ever.

Where a send returns at once they cannot. A rank waits only if it can run no action of its window,
so not the first that it has not run. All that this action needs comes before it in the order in
which the rows run, whatever else ran early. So the first action of that order that has not run can
always run.

Where a send waits until its receiver's window has the action that reads the message, a rank that
ran an action early may wait in its send while another rank needs an earlier action of it. ``check``
proves that this cannot be: it draws what may wait for what, and finds no circle. An order without
a circle never blocks. A circle may be one that no run completes: the rule is safe, not exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from ...actions.action import Rows
from ...actions.rule import Fact, needs, provides
from ...errors import ScheduleError
from .window import before, check_window

#: A rank and a position in its row.
Place: TypeAlias = tuple[int, int]
#: What may wait: "run" is an action with its sends, "send" its sends, "all" the row up to here.
Node: TypeAlias = tuple[str, int, int]


def check(schedule: Rows, window: int) -> None:
    """Raise ScheduleError unless no order of the window can block, where sends wait.

    >>> from fpipe import make_schedule
    >>> make_schedule("1F1B", ranks=4, microbatches=8).check(window=8)
    Schedule(1F1B, ranks=4, microbatches=8, stages=4)
    """
    check_window(window)
    graph = _Graph(schedule, window)
    try:
        definite = graph.definite()
        order = list(TopologicalSorter(definite).static_order())
        possible = _possible(graph, definite, order)
        list(TopologicalSorter(possible).static_order())
    except CycleError as error:
        raise _blocks(schedule, window, error.args[1]) from None


class _Graph:
    """What an action waits for in every order of the window."""

    def __init__(self, schedule: Rows, window: int):
        self.rows = schedule.rows
        self.window = window
        self.stages = schedule.placement.stages
        self.home: dict[Fact, Place] = {
            fact: (rank, position)
            for rank, row in enumerate(schedule.rows)
            for position, action in enumerate(row)
            for part in action.parts
            for fact in provides(part)
        }
        self.readers = defaultdict[Place, set[Place]](set)
        for place in set(self.home.values()):
            for source in self.sources(place):
                if source[0] != place[0]:
                    self.readers[source].add(place)

    def sources(self, place: Place) -> Iterator[Place]:
        """The actions of which an action needs a fact."""
        rank, position = place
        for part in self.rows[rank][position].parts:
            for fact in needs(part, self.stages):
                home = self.home.get(fact)
                if home is not None:
                    yield home

    def sends(self, place: Place) -> Iterator[Node]:
        """What the sends of an action wait for: their readers come into their windows."""
        for rank, position in self.readers.get(place, ()):
            if position >= self.window:
                yield ("all", rank, position - self.window)

    def definite(self) -> dict[Node, set[Node]]:
        """For each node those for which it waits in every order."""
        graph: dict[Node, set[Node]] = {}
        for rank, row in enumerate(self.rows):
            for position, earlier in enumerate(before(row)):
                place = (rank, position)
                waits: set[Node] = {("run", rank, one) for one in earlier}
                waits |= {("run", *source) for source in self.sources(place)}
                if position >= self.window:
                    waits.add(("all", rank, position - self.window))
                graph["start", rank, position] = waits
                graph["send", rank, position] = set(self.sends(place))
                graph["run", rank, position] = {("start", *place), ("send", *place)}
                whole: set[Node] = {("run", *place)}
                if position:
                    whole.add(("all", rank, position - 1))
                graph["all", rank, position] = whole
        return graph


def _possible(
    graph: _Graph,
    definite: dict[Node, set[Node]],
    order: list[Node],
) -> dict[Node, set[Node]]:
    """What waits for what in some order: also an action for the sends of another one of its rank
    that may have started before it.
    """
    number = {node: place for place, node in enumerate(order)}
    #: For each node all that come before it in every order, as bits.
    reach = [0] * len(order)
    for place, node in enumerate(order):
        for earlier in definite[node]:
            before_it = number[earlier]
            reach[place] |= reach[before_it] | 1 << before_it
    possible = {node: set(waits) for node, waits in definite.items()}
    for rank, row in enumerate(graph.rows):
        for position in range(len(row)):
            me = 1 << number["run", rank, position]
            first = max(position - graph.window + 1, 0)
            end = min(position + graph.window, len(row))
            for other in range(first, end):
                sends = ("send", rank, other)
                may_run_before = not reach[number["start", rank, other]] & me
                if other != position and may_run_before and definite[sends]:
                    possible["run", rank, position].add(sends)
    return possible


def _blocks(schedule: Rows, window: int, circle: Sequence[Node]) -> ScheduleError:
    """The error that names a send that may wait for ever, and what it keeps from running."""
    _, rank, position = next((node for node in circle if node[0] == "send"), circle[0])
    action = schedule.rows[rank][position]
    return ScheduleError(
        f"window={window}: rank {rank} may wait for ever in a send of {action}, at position "
        f"{position}, while its receiver waits for another action of rank {rank}; take a larger "
        "window, or sends that return at once",
        rank=rank,
        position=position,
        rule="window",
    )
