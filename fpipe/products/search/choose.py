# SPDX-License-Identifier: Apache-2.0
"""Which schedule to take for given costs and memory: the solver's, or the best of those with a
name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ... import Costs, Placement, Schedule, make_schedule, schedule_names
from ...actions import number, plain
from ...errors import ScheduleError
from .bounds import Bound
from .memory_limit import Memory, limits
from .problem import ALMOST
from .solve import Solved, solve

#: Forwards up to which all named schedules are simulated.
MOST = 20_000


class Candidate(NamedTuple):
    """A schedule with its figures under the costs."""

    name: str
    schedule: Schedule
    span: float
    bubble: float
    memory: float  #: the most that a rank holds
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The candidates, those that fit first, the shortest span first; the first is chosen."""

    candidates: tuple[Candidate, ...]
    bound: Bound
    unit: str = ""

    @property
    def best(self) -> Candidate:
        """The one to take."""
        return self.candidates[0]

    def __str__(self) -> str:
        best = self.best
        unit = self.unit and f" {self.unit}"
        proof = f"no schedule is shorter than {number(self.bound)}{unit} ({self.bound.reason})"
        figures = (
            f"span {number(best.span)}{unit}, bubble {best.bubble:.2%}, holds {number(best.memory)}"
        )
        wide = max(len(each.name) for each in self.candidates)
        lines = [f"{'schedule':<{wide}}  {'span':>10}  {'bubble':>7}  {'memory':>10}"]
        for each in self.candidates:
            row = f"{number(each.span):>10}  {each.bubble:>7.2%}  {number(each.memory):>10}"
            lines.append(f"{each.name:<{wide}}  {row}" + ("" if each.fits else "  does not fit"))
        return "\n".join([f"{best.name}: {figures}; {proof}", "", *lines])


def choose(
    costs: Costs,
    ranks: int,
    microbatches: int,
    stages: int,
    memory: Memory = None,
    *,
    placement: Placement | None = None,
    time_limit: float = 2.0,
) -> Choice:
    """The solver's schedule beside all named ones for these counts; ``placement`` leaves out those
    that differ from it.

    >>> print(choose(Costs(), 3, 9, 6, memory=6).best.name)
    ZBVZeroBubble
    """
    limit = limits(memory, ranks)
    solved = solve(
        costs,
        ranks,
        microbatches,
        placement or "any",
        stages=stages,
        memory=memory,
        time_limit=time_limit,
        progress=False,
    )
    schedules = [*_named(solved, placement), ("Solved", solved)]
    ranked = sorted(
        (_candidate(name, schedule, costs, limit) for name, schedule in schedules),
        key=lambda each: (
            not each.fits,
            round(each.span, 9),
            descends(each.schedule),
            each.name == "Solved",
        ),
    )
    bound = Bound(min(ranked[0].span, solved.bound), solved.bound.reason)
    return Choice(tuple(ranked), bound, costs.unit)


def _named(solved: Solved, placement: Placement | None) -> Iterator[tuple[str, Schedule]]:
    """The named schedules for the same counts, without those that hold parameters twice, which
    costs do not count.
    """
    ranks = solved.ranks
    microbatches = solved.microbatches
    stages = solved.stages
    for name in schedule_names() if stages * microbatches <= MOST else ():
        try:
            schedule = make_schedule(name, ranks, microbatches, stages).check()
        except ScheduleError:  # it needs other counts, or has no backwards
            continue
        fits = placement is None or repr(schedule.placement) == repr(placement)
        if fits and not schedule.placement.replicated:
            yield name, schedule


def descends(schedule: Schedule) -> bool:
    """Whether a stage adds the gradients of its microbatches in another order than the ascending
    one.
    """
    for row in schedule.rows:
        last: dict[int, int] = {}
        for part in plain(row):
            if part.op in "BW":
                if last.get(part.stage, -1) > part.microbatch:
                    return True
                last[part.stage] = part.microbatch
    return False


def _candidate(name: str, schedule: Schedule, costs: Costs, limit: tuple[float, ...]) -> Candidate:
    t = schedule.simulate(costs)
    fits = all(held <= most * ALMOST for held, most in zip(t.peak_bytes, limit, strict=True))
    return Candidate(name, schedule, t.span, max(t.bubble, 0.0), max(t.peak_bytes), fits)
