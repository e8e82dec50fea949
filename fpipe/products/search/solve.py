# SPDX-License-Identifier: Apache-2.0
"""``fpipe.solve``: a schedule for given costs and memory, with a lower bound that says how far it
is from the best.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from operator import attrgetter, itemgetter
from time import monotonic
from typing import Literal, TypeAlias

from ... import Costs, Placement, Schedule, Timeline
from ...actions import Per, as_costs, progress as progress_line
from ...errors import ScheduleError
from .bounds import Bound, lower_bound
from .memory_limit import Memory, limits
from .problem import ALMOST, Problem
from .replicate import solve_replicated
from .search import Figures, search

Kind: TypeAlias = Literal["one", "loop", "V", "any", "replicated"]


@dataclass(frozen=True, repr=False, eq=False)
class Solved(Schedule):
    """The result of ``fpipe.solve``: a Schedule, its costs, and a lower bound on the span of any
    other one.

    It equals a Schedule with the same rows. ``costs`` are those of the search, and ``bound`` is a
    number with a ``reason``.

    >>> s = solve(Costs(), ranks=2, microbatches=4)
    >>> s == Schedule.parse(str(s)), s.timeline.span, s.gap
    (True, 24.0, 0.0)
    """

    costs: Costs = field(default_factory=Costs)
    bound: Bound = field(default_factory=lambda: Bound(0.0, "none was computed"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        facts = attrgetter("rows", "placement", "microbatches")
        return facts(self) == facts(other)

    __hash__ = Schedule.__hash__

    @property
    def timeline(self) -> Timeline:
        """The schedule in the simulator, with its costs."""
        return self.simulate(self.costs)

    @property
    def gap(self) -> float:
        """By how much its span exceeds the bound, as a share of the bound: 0 where it is known to
        be the best.
        """
        span = self.timeline.span
        if span <= self.bound * ALMOST:
            return 0.0
        return span / self.bound - 1 if self.bound > 0 else inf


def solve(
    costs: Costs,
    ranks: int,
    microbatches: int,
    placement: Kind | Placement = "any",
    *,
    per: Per = "stage",
    stages: int | None = None,
    memory: Memory = None,
    time_limit: float = 10.0,
    progress: bool = True,
    seed: int = 0,
) -> Solved:
    """Search for the schedule of the least span for these costs within this memory.

    Args:
        costs: of actions by stage, of microbatches, and of messages. One number is that of each
            stage.
        ranks: of the pipeline.
        microbatches: of a step.
        placement: "one" puts neighbouring stages on a rank, "loop" every ``ranks``-th, "V" goes
            down the ranks and up again, "any" tries all of these; or a Placement with one rank for
            each stage. "replicated" puts neighbouring stages on one or several ranks, each of which
            runs its share of the microbatches, so that the busiest rank works least; the bound is
            the work of that rank, the least of all such placements.
        per: "rank" where one number is that of all stages of a rank together, as in the commands:
            then placements with one stage a rank and with two have equal work.
        stages: in all; by default as many as the costs have numbers for, else one a rank with
            "one", and two.
        memory: what a rank may hold in the bytes of ``costs.saved``: a number, "60GB", or one of
            them for each rank.
        time_limit: seconds. The search ends earlier where the schedule is known to be the best.
        progress: whether a terminal shows how far a search that takes longer than a second is from
            the best.
        seed: of the search; its result depends on the speed of the machine too.

    Returns:
        A Schedule with ``bound``, a number with a ``reason``, and ``gap``; after Ctrl-C the best
        that was found.

    Raises:
        ScheduleError: where counts and costs do not fit, or a rank cannot hold its stages of one
        microbatch.

    >>> s = solve(Costs(), ranks=2, microbatches=6, placement="one", memory=3)
    >>> s.timeline.span, s.bound, s.gap
    (18.0, Bound(18, 'rank 0: its work'), 0.0)
    >>> solve(Costs(F=[3, 1], I=[3, 1], W=[3, 1]), 4, 12, "replicated").placement
    Placement(0: [0], 1: [0], 2: [0], 3: [1])
    """
    if isinstance(time_limit, bool) or not isinstance(time_limit, Real) or not time_limit >= 0:
        raise ScheduleError(f"time_limit={time_limit!r}; give a number of seconds, such as 10")
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"{what}={number!r} must be a whole number, 1 or more", rule=what)
    count = stages_of(costs, ranks, placement, stages)
    limit = limits(memory, ranks, costs)
    costs = as_costs(costs, per, ranks / count)
    if placement == "replicated":
        s, bound = solve_replicated(costs, ranks, microbatches, count, limit)
    else:
        paths = _paths(count, ranks, placement)
        problems = [Problem.of(costs, path, ranks, microbatches, limit) for path in paths]
        fitting = [problem for problem in problems if problem.lacks is None]
        if not fitting:
            raise ScheduleError(
                f"{problems[0].lacks}; give more memory, more ranks or smaller microbatches",
                rule="memory",
            )
        bounds = [lower_bound(problem, costs) for problem in fitting]
        bound = min(bounds)
        s = _best(fitting, bounds, costs, time_limit, progress, seed)
    return Solved(s.rows, s.placement, s.microbatches, s.name, costs, bound)


def _best(
    problems: list[Problem],
    bounds: list[Bound],
    costs: Costs,
    time_limit: float,
    progress: bool,
    seed: int,
) -> Schedule:
    """The best that the search finds, without more time where one has the least bound."""
    begin = monotonic()
    bound = min(bounds)
    best: tuple[Figures, Schedule] | None = None

    def share() -> float:
        if time_limit > 0 and (best is None or best[0][0] > bound * ALMOST):
            return (monotonic() - begin) / time_limit
        return 1.0

    def note() -> str:
        if best is None or bound <= 0:
            return "solving"
        return f"solving: at most {best[0][0] / bound - 1:.2%} above the best"

    with progress_line(note) if progress else nullcontext():
        try:
            for found in search(problems, bounds, costs, share, seed):
                best = min(best or found, found, key=itemgetter(0))
        except KeyboardInterrupt:
            if best is None:
                raise
    assert best is not None, "one microbatch after another fits"
    return best[1]


def stages_of(costs: Costs, ranks: int, placement: Kind | Placement, stages: int | None) -> int:
    """How many stages a schedule for these arguments of ``solve`` has."""
    if isinstance(placement, Placement):
        return placement.stages
    usual = ranks if placement in ("one", "replicated") else 2 * ranks
    return stages or next(iter(as_costs(costs).counts), usual)


def _paths(count: int, ranks: int, placement: Kind | Placement) -> list[tuple[int, ...]]:
    """For each placement that is tried, the ranks of its stages, ``count`` in all."""
    if isinstance(placement, Placement):
        if placement.ranks != ranks:
            raise ScheduleError(
                f"the placement is for {placement.ranks} ranks, not {ranks}; make both agree",
                rule="ranks",
            )
        if len(placement.paths) > 1:
            raise ScheduleError(
                "solve places every stage once, without replicas; give another placement",
                rule="placement",
            )
        return list(placement.paths)
    if count % ranks:
        raise ScheduleError(
            f"{count} stages cannot be placed evenly on {ranks} ranks; give a multiple of {ranks}, "
            "or a Placement",
            rule="stages",
        )
    per_rank = count // ranks
    paths = {
        "one": tuple(stage // per_rank for stage in range(count)),
        "loop": Placement.loop(ranks, per_rank).paths[0],
        "V": Placement.v(ranks, per_rank).paths[0],
    }
    if placement == "any":
        return list(dict.fromkeys(paths.values()))
    if placement not in paths:
        raise ScheduleError(
            f"placement={placement!r}; give 'one', 'loop', 'V', 'any', 'replicated' or a Placement",
            rule="placement",
        )
    return [paths[placement]]
