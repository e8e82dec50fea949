# SPDX-License-Identifier: Apache-2.0
"""The timeline of a schedule whose times vary at random, in the order of its rows or in the ready
order.

Ranks start actions in the order of time, so that each knows what has arrived. Nothing here knows
tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp, inf
from random import Random
from typing import NamedTuple

from ...actions.action import AnyAction, Placement, Row
from ...actions.action_kinds import KINDS, READERS
from ...actions.broken_rules import stuck
from ...actions.check import Inspection
from ...actions.costs import Costs, number
from ...actions.dependencies import Facts
from ...actions.simulation import Step, overlap_of, steps_of_all, timeline_of
from ...actions.timeline import Carried, Timeline
from ...errors import ScheduleError
from .window import before, check_window, default_window, unawaited

ORDERS = "row", "ready"


def timeline(
    inspected: Inspection,
    costs: Costs,
    name: str,
    *,
    jitter: float,
    seed: int,
    order: str,
    window: int | None,
) -> Timeline:
    """The timeline; its rows are in the order in which they ran."""
    rows, placement, units, _ = inspected.schedule
    if order not in ORDERS:
        raise ScheduleError(f"order={order!r:.80}; give 'row' or 'ready'", rule="order")
    if inspected.walk.blocked:
        raise stuck(rows, placement.stages, inspected.walk)
    width = default_window(rows, units) if window is None else check_window(window)
    if order == "row":
        width = 1
    run = _Run(inspected, costs, number("jitter", jitter), seed, width)
    run.all()
    ran = [tuple(rank.row[position] for position in rank.order) for rank in run.ranks]
    times = (
        tuple(rank.starts for rank in run.ranks),
        tuple(rank.ends for rank in run.ranks),
        tuple(rank.causes for rank in run.ranks),
        tuple(tuple(rank.carried) for rank in run.ranks),
    )
    return timeline_of(inspected.schedule._replace(rows=ran), costs, name, times)


class _Part(NamedTuple):
    """A part of an action: the facts that it needs, with the time of the last one's message; how
    long it receives, runs and sends; the facts that it provides, and the rank that gets the first.
    """

    needs: Sequence[int]
    travel: float
    receive: float
    length: float
    send: float
    provides: Sequence[int]
    to: int


class _Rank:
    """The state of one rank: what ran, and when."""

    def __init__(
        self, row: Row, parts: list[list[_Part]], random: Random, jitter: float, window: int
    ):
        self.row = row
        self.parts = parts
        self.window = window
        #: By position: factors of the time of the action, and of the time of its messages.
        self.factors = [[exp(random.gauss(0, jitter)) for _ in range(2)] for _ in row]
        self.before = before(row)
        self.last = [unawaited(action) for action in row]
        self.done = set[int]()
        self.first = 0
        self.clock = 0.0
        self.order: list[int] = []
        self.starts, self.ends, self.causes = array("d"), array("d"), array("q")
        self.carried: list[Carried] = []

    def able(self) -> Iterator[int]:
        """The actions of the window that wait for no other action of the row."""
        for position in range(self.first, min(self.first + self.window, len(self.row))):
            if position not in self.done and self.done.issuperset(self.before[position]):
                yield position


class _Run:
    """A run of all ranks. ``computed`` has for each fact when it was, ``delay`` the factor of its
    message's time.
    """

    def __init__(self, inspected: Inspection, costs: Costs, jitter: float, seed: int, window: int):
        rows, placement, units, slices = inspected.schedule
        self.facts = facts = Facts(placement.stages, units)
        steps = steps_of_all(facts, placement, costs, slices)
        random = Random(seed)
        parts = partial(_parts, facts, placement, steps)
        self.ranks = []
        for rank, row in enumerate(rows):
            of_row = [list(parts(rank, action)) for action in row]
            self.ranks.append(_Rank(row, of_row, random, jitter, window))
        present = facts.initial()
        self.computed = array("d", [0.0 if here else inf for here in present])
        self.delay = array("d", [1.0]) * facts.size
        self.overlap = overlap_of(costs, placement.stages, slices)

    def all(self) -> None:
        """Run all actions, in the order of time."""
        best = [self._best(rank) for rank in self.ranks]
        while True:
            number = min(range(len(best)), key=lambda n: best[n][0])
            start, _, position, waited = best[number]
            if start == inf:
                return
            rank = self.ranks[number]
            self._start(rank, position, start, waited)
            for one in {number, *(part.to for part in rank.parts[position])}:
                best[one] = self._best(self.ranks[one])

    def _best(self, rank: _Rank) -> tuple[float, bool, int, int]:
        """When a rank can start its next action, whether others come before it, its position, and
        the fact that it waits for.
        """
        best = (inf, True, 0, -1)
        for position in rank.able():
            time = rank.clock
            waited = -1
            for part in rank.parts[position]:
                *own, last = part.needs
                for fact in own:
                    if self.computed[fact] == inf:
                        time = inf
                at = self.computed[last] + part.travel * self.delay[last]
                if at > time:
                    time = at
                    waited = last
            best = min(best, (time, rank.last[position], position, waited))
        return best

    def _start(self, rank: _Rank, position: int, start: float, waited: int) -> None:
        """Run an action."""
        action = rank.row[position]
        parts = rank.parts[position]
        factor, delay = rank.factors[position]
        start += sum(part.receive for part in parts)
        length = sum(part.length for part in parts)
        if self.overlap is not None:
            length, beside = self.overlap(action, length, start)
            rank.carried += beside
        end = start + length * factor
        rank.starts.append(start)
        rank.ends.append(end)
        rank.causes.append(waited)
        rank.clock = end + sum(part.send for part in parts)
        for part in parts:
            for fact in part.provides:
                self.computed[fact] = end
                self.delay[fact] = delay
        rank.order.append(position)
        rank.done.add(position)
        while rank.first in rank.done:
            rank.first += 1


def _parts(
    facts: Facts,
    placement: Placement,
    steps: Sequence[Mapping[str, Sequence[Step]]],
    rank: int,
    action: AnyAction,
) -> Iterator[_Part]:
    """The parts of an action on a rank."""
    table = facts.table
    for stage, op, at in action.parts:
        _, travel, receive, length, send, _ = steps[at][op][stage]
        needed, provided = table[op]
        place = stage * facts.microbatches + at
        path = placement.path(at)
        reader = stage + READERS.get(KINDS[op].provides[0], 0)
        yield _Part(
            [place + offset for offset in needed],
            travel,
            receive,
            length,
            send,
            [place + offset for offset in provided],
            path[reader] if 0 <= reader < len(path) else rank,
        )
