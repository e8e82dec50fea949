# SPDX-License-Identifier: Apache-2.0
"""``Problem``: what a search needs to know, as plain numbers; and how a solution of it becomes a
``Schedule``.

A pass is an F or an I: the F of stage s is pass s, and its I is pass ``stages + s``. Where
``whole``, backwards are not split: I stands for B, and W takes no time and is left out at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from ... import Action, Costs, Placement, Schedule
from ...actions import Op, plain

#: By rank, the (pass, microbatch) that it runs.
Orders: TypeAlias = list[list[tuple[int, int]]]
#: By rank, the (op, stage, microbatch) that it runs; op is 0 for F, 1 for I, 2 for W.
Rows: TypeAlias = list[list[tuple[int, int, int]]]
_OPS: tuple[Op, Op, Op] = ("F", "I", "W")

_LARGE = 20_000  #: actions
ALMOST = 1 + 1e-9  #: times that are sums of the same costs in another order differ by less


@dataclass(frozen=True)
class Problem:
    """The costs of stages on ranks. ``F``, ``I``, ``W``, ``saved`` and ``kept`` are by stage,
    ``link`` by boundary.

    ``load`` and ``size`` multiply times and bytes of a microbatch; ``limit`` is what each rank may
    hold.
    """

    path: tuple[int, ...]
    ranks: int
    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741
    W: tuple[float, ...]
    saved: tuple[float, ...]
    kept: tuple[float, ...]
    link: tuple[float, ...]
    limit: tuple[float, ...]
    load: tuple[float, ...]
    size: tuple[float, ...]
    numbers: tuple[int, ...]
    whole: bool = False

    @classmethod
    def of(
        cls,
        costs: Costs,
        path: Sequence[int],
        ranks: int,
        microbatches: int,
        limit: Sequence[float],
        whole: bool = False,
    ) -> Problem:
        """From costs; the time that a message takes of its sender and receiver is added to their
        actions.

        >>> Problem.of(Costs(comm=0.5), (0, 1), 2, 4, (2.0, 2.0)).link
        (0.5,)
        """
        stages = len(path)
        times, memory = costs.times(stages), costs.memory(stages)
        nothing = (0.0,) * stages

        def crossing(numbers: Sequence[float]) -> list[float]:
            """Numbers of boundaries, 0 where both stages are on one rank."""
            return [n if path[s] != path[s + 1] else 0.0 for s, n in enumerate(numbers)]

        def added(passes: Sequence[float], after: list[float], before: list[float]):
            ends = zip(passes, [*after, 0.0], [0.0, *before], strict=True)
            return tuple(time + behind + ahead for time, behind, ahead in ends)

        send = crossing(costs.spread("send", stages - 1))
        receive = crossing(costs.spread("receive", stages - 1))
        return cls(
            tuple(path),
            ranks,
            F=added(times["F"], send, receive),
            I=added(times["B" if whole else "I"], receive, send),
            W=nothing if whole else times["W"],
            saved=memory["F"],
            kept=nothing if whole else tuple(-change for change in memory["W"]),
            link=tuple(crossing(costs.links(stages))),
            limit=tuple(limit),
            load=costs.spread("load", microbatches),
            size=costs.spread("size", microbatches),
            numbers=tuple(range(microbatches)),
            whole=whole,
        )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.path)

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return len(self.load)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        return tuple(
            tuple(s for s, at in enumerate(self.path) if at == rank) for rank in range(self.ranks)
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """What each rank has to do, in time."""
        times = [f + i + w for f, i, w in zip(self.F, self.I, self.W, strict=True)]
        return tuple(sum(self.load) * sum(times[s] for s in stages) for stages in self.of_rank)

    @cached_property
    def adds(self) -> tuple[tuple[float, ...], ...]:
        """What an action adds to the memory of its rank, by op and stage, for a microbatch of size
        1.
        """
        after_i = tuple(kept - saved for saved, kept in zip(self.saved, self.kept, strict=True))
        return self.saved, after_i, tuple(-kept for kept in self.kept)

    @cached_property
    def following(self) -> list[tuple[int, float]]:
        """For each pass the one that waits for it, or -1, and how long its message takes."""
        last, link = self.stages - 1, self.link
        forwards = [(s + 1, link[s]) for s in range(last)] + [(2 * last + 1, 0.0)]
        return forwards + [(-1, 0.0)] + [(last + s, link[s - 1]) for s in range(1, last + 1)]

    @property
    def actions(self) -> int:
        """How many actions there are."""
        return 3 * self.stages * self.microbatches

    @property
    def large(self) -> bool:
        """Whether few starts are tried, and nothing is annealed."""
        return self.actions > _LARGE

    def time(self, op: int, stage: int, microbatch: int) -> float:
        """How long an action takes."""
        return (self.F, self.I, self.W)[op][stage] * self.load[microbatch]

    def needed(
        self, op: int, stage: int, microbatch: int
    ) -> tuple[tuple[int, int, int], float] | None:
        """The action that an action needs, and how long its message takes; None for the F of the
        first stage.
        """
        if op == 0:
            return ((0, stage - 1, microbatch), self.link[stage - 1]) if stage else None
        if op == 1 and stage < self.stages - 1:
            return (1, stage + 1, microbatch), self.link[stage]
        return (op - 1, stage, microbatch), 0.0

    @property
    def even(self) -> bool:
        """Whether all microbatches cost the same."""
        return len(set(self.load)) == len(set(self.size)) == 1

    def reordered(self, order: Sequence[int]) -> Problem:
        """The same problem with the microbatches in another order."""

        def pick(values):
            return tuple(values[k] for k in order)

        return replace(self, load=pick(self.load), size=pick(self.size), numbers=pick(self.numbers))

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

    def schedule(self, rows: Rows, name: str = "") -> Schedule:
        """Rows as a Schedule, with the true numbers of microbatches."""
        ops: Sequence[Op] = ("F", "B") if self.whole else _OPS
        made = (
            tuple([Action(s, ops[op], self.numbers[k]) for op, s, k in row if op < len(ops)])
            for row in rows
        )
        return Schedule(tuple(made), Placement((self.path,), self.ranks), self.microbatches, name)


def rows_of(schedule: Schedule) -> Rows:
    """The actions of a schedule, with B as I and W, and those of fused actions one by one.

    >>> rows_of(Schedule.parse("[0F0, 0B0]"))
    [[(0, 0, 0), (1, 0, 0), (2, 0, 0)]]
    """
    ops = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
    return [
        [(op, part.stage, part.microbatch) for part in plain(row) for op in ops[part.op]]
        for row in schedule.rows
    ]
