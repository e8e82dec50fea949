# SPDX-License-Identifier: Apache-2.0
"""Schedules whose stages are on several ranks, each of which runs its share of the microbatches.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018
(arXiv:1806.03377). Stage 0 takes three times as long as stage 1, and is on three ranks:

    rank 0   0F0 0F3 0B0     0F6 0B3     ...
    rank 1   0F1 0F4     0B1     0F7 0B4 ...
    rank 2   0F2 0F5         0B2     0F8 ...
    rank 3       1F0 1B0 1F1 1B1 1F2 1B2 1F3 ...

Microbatch m runs on copy m mod k of a stage with k copies, so each stage gets its microbatches in
ascending order. Let n be the ranks of a stage and of those after it. At most n / k microbatches,
rounded up, are on a copy between F and B: as many as PipeDream admits ("NOAM"). With one copy this
is the warm-up of 1F1B. The other schedules change their limits in the same way.

The rows come from list scheduling within these limits: of all ranks the one runs next that can
start first, F before B before W. The lowest microbatch that is not over can always go on, so no
rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ..actions.action import Action, Placement
from ..actions.action_kinds import Op
from ..errors import ScheduleError
from ..generators.refusals import too_large
from ..schedule import Schedule


class Rule(NamedTuple):
    """How the copies of a schedule run.

    Let n be the ranks from a stage on, and k its copies. A copy has at most ``warm * n / k - less``
    microbatches between F and B; if ``warm`` is 0 all of them, and no B before the last F. With
    ``held`` a B is I and W, and a copy holds at most ``held * n / k - less`` activations from F to
    W, where n counts all ranks.
    """

    warm: int
    less: int = 0
    held: int = 0


RULES = {
    "GPipe": Rule(0),
    "1F1B": Rule(1),
    "Eager1F1B": Rule(2, less=1),
    "ZBH1": Rule(1, held=1),
    "ZBH2": Rule(2, less=1, held=2),
    "ZB1P": Rule(1, held=1),
    "ZB2P": Rule(2, less=1, held=2),
}


def make_replicated(
    name: str, copies: Sequence[int], microbatches: int, slices: int, most: int
) -> Schedule:
    """The schedule called ``name`` with ``copies[s]`` copies of stage s; ``most`` is the limit of
    forwards and backwards.

    >>> print(make_replicated("1F1B", (2, 1), 2, 1, 100))
    [0F0, 0B0]
    [0F1, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    """
    if name not in RULES:
        raise ScheduleError(
            f"{name} has no form with replicas={tuple(copies)}; take one of {', '.join(RULES)}",
            rule="replicas",
        )
    if 2 * len(copies) * microbatches * slices > most:
        raise too_large(len(copies), microbatches, slices, most)
    groups = [(stage,) for stage in range(len(copies))]
    times = [float(k) for k in copies]
    return replicated(name, groups, copies, microbatches, times).sliced(slices)


def checked(replicas: object, ranks: int, stages: int | None) -> tuple[int, ...]:
    """``replicas=`` as a tuple, or the error that says what is wrong with it."""
    try:
        copies = tuple(replicas)  # type: ignore[arg-type]  # the error is caught
    except TypeError:
        copies = ()
    if not copies or any(type(k) is not int or k < 1 for k in copies):
        raise ScheduleError(
            f"replicas={replicas!r}; give the number of ranks of each stage, such as (3, 1)",
            rule="replicas",
        )
    if stages not in (None, len(copies)):
        raise ScheduleError(
            f"replicas={copies} has {len(copies)} numbers for {stages} stages; give one for each",
            rule="replicas",
        )
    if sum(copies) != ranks:
        raise ScheduleError(
            f"replicas={copies} are {sum(copies)} ranks, not {ranks}; give ranks={sum(copies)}, or "
            "other numbers",
            rule="replicas",
        )
    return copies


def replicated(
    name: str,
    groups: Sequence[Sequence[int]],
    copies: Sequence[int],
    microbatches: int,
    times: Sequence[float],
) -> Schedule:
    """A schedule with neighbouring stages in groups, each on some ranks of its own.

    A F, an I or a W of group g takes ``times[g]``.

    >>> replicated("1F1B", [(0, 1), (2,)], (2, 1), 4, (2.0, 1.0)).placement
    Placement(0: [0, 1], 1: [0, 1], 2: [2])
    """
    if max(copies) > microbatches:
        raise ScheduleError(
            f"a stage has {max(copies)} replicas for {microbatches} microbatches, and each needs "
            f"one; give microbatches={max(copies)} or more, or fewer replicas",
            rule="replicas",
        )
    ranks = sum(copies)
    before = [0, *accumulate(copies)]
    lanes = [
        Lane(group, range(copy, microbatches, k), k, ranks - before[group])
        for group, k in enumerate(copies)
        for copy in range(k)
    ]
    patterns = listed(RULES[name], lanes, times)
    rows = [
        tuple(_actions(pattern, lane, groups[lane.group]))
        for pattern, lane in zip(patterns, lanes, strict=True)
    ]
    paths = [
        tuple(before[g] + m % copies[g] for g, group in enumerate(groups) for _ in group)
        for m in range(microbatches)
    ]
    placement = Placement(tuple(paths), ranks, tuple(range(microbatches)))
    return Schedule(tuple(rows), placement, microbatches, name)


class Lane(NamedTuple):
    """A rank: its group of stages, its microbatches, the copies of the group, and the ranks from
    the group on.
    """

    group: int
    own: range
    copies: int
    onward: int


def _actions(pattern: Sequence[Op], lane: Lane, stages: Sequence[int]) -> Iterator[Action]:
    """The actions of a pattern; neighbouring stages run as one."""
    own = {op: iter(lane.own) for op in "FBIW"}
    for op in pattern:
        microbatch = next(own[op])
        for stage in stages if op == "F" else reversed(stages):
            yield Action(stage, op, microbatch)


def listed(rule: Rule, lanes: Sequence[Lane], times: Sequence[float]) -> list[list[Op]]:
    """The letters of each rank's row, by list scheduling.

    >>> listed(Rule(1), [Lane(0, range(2), 1, 2), Lane(1, range(2), 1, 1)], [1, 1])
    [['F', 'F', 'B', 'B'], ['F', 'B', 'F', 'B']]
    """
    copies = [_Copy.of(rule, lane, len(lanes), len(times) - 1) for lane in lanes]
    done: list[dict[Op, int]] = [{"F": 0, "B": 0, "I": 0, "W": 0} for _ in lanes]
    clocks = [0.0 for _ in lanes]
    rows: list[list[Op]] = [[] for _ in lanes]
    ends: dict[tuple[int, Op, int], float] = {}  # by group, letter and microbatch
    best = [copy.best(done[rank], 0.0, ends) for rank, copy in enumerate(copies)]
    for _ in range(sum(len(lane.own) * (3 if rule.held else 2) for lane in lanes)):
        rank = min(range(len(lanes)), key=best.__getitem__)
        start, _, op = best[rank]
        group = lanes[rank].group
        clocks[rank] = start + times[group] * (2 if op == "B" else 1)
        ends[group, op, lanes[rank].own[done[rank][op]]] = clocks[rank]
        done[rank][op] += 1
        rows[rank].append(op)
        for other, lane in enumerate(lanes):
            if abs(lane.group - group) <= 1:
                best[other] = copies[other].best(done[other], clocks[other], ends)
    return rows


class _Copy(NamedTuple):
    """A rank and its limits in list scheduling."""

    lane: Lane
    last: int  # the last group
    backward: Op
    flight: int
    held: int
    drains: bool

    @classmethod
    def of(cls, rule: Rule, lane: Lane, ranks: int, last: int) -> _Copy:
        """The limits of a rank under a rule."""
        flight = -(-rule.warm * lane.onward // lane.copies) - rule.less
        held = -(-rule.held * ranks // lane.copies) - rule.less
        return cls(lane, last, "I" if rule.held else "B", flight, held, not rule.warm)

    def best(
        self, done: dict[Op, int], clock: float, ends: dict[tuple[int, Op, int], float]
    ) -> tuple[float, int, Op]:
        """When the rank can run something, and what: of one time F, then the backward, then W."""
        lane = self.lane
        backward = self.backward

        def start(op: Op, by: int) -> float:
            """When the next one can start; infinity: what it needs has not run."""
            source = lane.group + by
            if not 0 <= source <= self.last:
                return clock
            return max(clock, ends.get((source, op, lane.own[done[op]]), inf))

        found: list[tuple[float, int, Op]] = [(inf, 3, "W")]
        ahead = done["F"] - done[backward]
        split = backward == "I"
        full = split and done["F"] - done["W"] >= self.held
        more = done["F"] < len(lane.own)
        if more and (self.drains or (ahead < self.flight and not full)):
            found.append((start("F", -1), 0, "F"))
        if ahead and not (self.drains and more):
            found.append((start(backward, 1), 1, backward))
        if split and done["I"] > done["W"]:
            found.append((clock, 2, "W"))
        return min(found)
