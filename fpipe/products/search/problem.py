# SPDX-License-Identifier: Apache-2.0
"""``Problem``: what a search needs to know, as plain numbers; and how a solution of it becomes a
``Schedule``.

Actions are numbers: ``(op * stages + stage) * microbatches + microbatch``, where op is 0 for F, 1
for I and 2 for W. A pass is an F or an I of all microbatches: the F of stage s is pass s, and its I
is pass ``stages + s``. Where ``whole``, backwards are not split: I stands for B, and W takes no
time and is left out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from ... import Action, Costs, Placement, Schedule
from ...actions import Op, unfused

#: By rank, the numbers of its actions in order.
Rows: TypeAlias = list[list[int]]
#: By stage, boundary, rank or microbatch.
Numbers: TypeAlias = tuple[float, ...]

_LARGE = 20_000  #: actions
ALMOST = 1 + 1e-9  #: times that are sums of the same costs in another order differ by less


@dataclass(frozen=True)
class Problem:
    """The costs of stages on ranks. ``F``, ``I``, ``W``, ``saved`` and ``kept`` are by stage,
    ``link`` by boundary.

    ``load`` and ``size`` multiply times and bytes of a microbatch; ``limit`` is what each rank may
    hold; ``numbers`` are those of the microbatches in the schedule.
    """

    path: tuple[int, ...]
    ranks: int
    F: Numbers
    I: Numbers  # noqa: E741
    W: Numbers
    saved: Numbers
    kept: Numbers
    link: Numbers
    limit: Numbers
    load: Numbers
    size: Numbers
    numbers: tuple[int, ...]
    whole: bool = False

    @classmethod
    def of(
        cls,
        costs: Costs,
        path: tuple[int, ...],
        ranks: int,
        microbatches: int,
        limit: Numbers,
    ) -> Problem:
        """From costs; the time that a message takes of its sender and receiver is added to their
        actions.

        >>> Problem.of(Costs(comm=0.5), (0, 1), 2, 4, (2.0, 2.0)).link
        (0.5,)
        """
        stages = len(path)
        times = costs.times(stages)
        memory = costs.memory(stages)

        def crossing(numbers: Sequence[float]) -> Numbers:
            """Numbers of boundaries, 0 where both stages are on one rank."""
            return tuple(n if path[s] != path[s + 1] else 0.0 for s, n in enumerate(numbers))

        def added(passes: Sequence[float], after: Numbers, before: Numbers) -> Numbers:
            ends = zip(passes, (*after, 0.0), (0.0, *before), strict=True)
            return tuple(time + behind + ahead for time, behind, ahead in ends)

        send = crossing(costs.spread("send", stages - 1))
        receive = crossing(costs.spread("receive", stages - 1))
        return cls(
            path,
            ranks,
            F=added(times["F"], send, receive),
            I=added(times["I"], receive, send),
            W=times["W"],
            saved=memory["F"],
            kept=tuple(-change for change in memory["W"]),
            link=crossing(costs.links(stages)),
            limit=limit,
            load=costs.spread("load", microbatches),
            size=costs.spread("size", microbatches),
            numbers=tuple(range(microbatches)),
        )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.path)

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return len(self.load)

    @property
    def large(self) -> bool:
        """Whether few starts are tried, and nothing is annealed."""
        return len(self.length) > _LARGE

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        return tuple(
            tuple(s for s, at in enumerate(self.path) if at == rank) for rank in range(self.ranks)
        )

    @cached_property
    def work(self) -> Numbers:
        """What each rank has to do, in time."""
        times = [f + i + w for f, i, w in zip(self.F, self.I, self.W, strict=True)]
        return tuple(sum(self.load) * sum(times[s] for s in stages) for stages in self.of_rank)

    # ---- by number of an action ----
    @cached_property
    def length(self) -> list[float]:
        """How long each action takes."""
        return [time * load for time in (*self.F, *self.I, *self.W) for load in self.load]

    @cached_property
    def adds(self) -> list[float]:
        """How many bytes each action adds to the memory of its rank."""
        after_i = [kept - saved for saved, kept in zip(self.saved, self.kept, strict=True)]
        changes = [*self.saved, *after_i, *(-kept for kept in self.kept)]
        return [change * size for change in changes for size in self.size]

    @cached_property
    def needs(self) -> list[int]:
        """The action that each action needs; -1 for the Fs of the first stage, which need none."""
        count = self.microbatches
        half = self.stages * count
        forwards = [*[-1] * count, *range(half - count)]
        return [*forwards, *range(half + count, 2 * half), *range(half - count, 2 * half)]

    @cached_property
    def travel(self) -> list[float]:
        """How long the message takes that each action needs."""
        by_pass = [0.0, *self.link, *self.link, 0.0, *[0.0] * self.stages]
        return [time for time in by_pass for _ in range(self.microbatches)]

    def reordered(self, order: Sequence[int]) -> Problem:
        """The same problem with the microbatches in another order."""
        load, size, numbers = (
            tuple(values[k] for k in order) for values in (self.load, self.size, self.numbers)
        )
        return replace(self, load=load, size=size, numbers=numbers)

    @property
    def lacks(self) -> str | None:
        """Which rank cannot hold its stages of the largest microbatch, as text; None where all
        can.
        """
        for rank, stages in enumerate(self.of_rank):
            needed = max(self.size) * sum(max(self.saved[s], self.kept[s]) for s in stages)
            if needed > self.limit[rank] * ALMOST:
                return (
                    f"rank {rank} holds {needed:g} for one microbatch, more than its limit of "
                    f"{self.limit[rank]:g}"
                )
        return None

    def schedule(self, rows: Rows) -> Schedule:
        """Rows as a Schedule, with the true numbers of microbatches."""
        ops: Sequence[Op] = ("F", "B") if self.whole else ("F", "I", "W")
        end = len(ops) * self.stages * self.microbatches

        def action(number: int) -> Action:
            one, k = divmod(number, self.microbatches)
            op, stage = divmod(one, self.stages)
            return Action(stage, ops[op], self.numbers[k])

        named = tuple(tuple(action(number) for number in row if number < end) for row in rows)
        return Schedule(named, Placement((self.path,), self.ranks), self.microbatches, "Solved")


def rows_of(schedule: Schedule) -> Rows:
    """The actions of a schedule, with B as I and W, and those of fused actions one by one.

    >>> rows_of(Schedule.parse("[0F0, 0F1, 0B0, 0B1]"))
    [[0, 1, 2, 4, 3, 5]]
    """
    count = schedule.microbatches
    stages = schedule.stages
    ops = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
    return [
        [
            (op * stages + part.stage) * count + part.microbatch
            for part in unfused(row)
            for op in ops[part.op]
        ]
        for row in schedule.rows
    ]
