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
from .solve import Kind, Solved, solve

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
    replicate: bool = False,
) -> Choice:
    """The solver's schedule beside all named ones for these counts; ``placement`` leaves out those
    that differ from it. With ``replicate`` stages may be on several ranks; later calls keep the
    number of ranks of each stage.

    >>> print(choose(Costs(), 3, 9, 6, memory=6).best.name)
    ZBVZeroBubble
    """
    limit = limits(memory, ranks)
    schedules: list[tuple[str, Schedule]] = []
    bounds: list[Bound] = []
    for kind in _kinds(placement, ranks, stages, replicate):
        try:
            solved = solve(
                costs,
                ranks,
                microbatches,
                kind,
                stages=stages,
                memory=memory,
                time_limit=time_limit,
                progress=False,
            )
        except ScheduleError:
            if not replicate or (kind == "replicated" and not schedules):
                raise
            continue
        bounds.append(solved.bound)
        if kind == "replicated":
            if placement is None or repr(placement) == repr(solved.placement):
                schedules.append(("Replicated", solved))
        else:
            schedules += [*_named(solved, placement), ("Solved", solved)]
    ranked = sorted(
        (_candidate(name, schedule, costs, limit) for name, schedule in schedules),
        key=lambda each: (
            not each.fits,
            round(each.span, 9),
            descends(each.schedule),
            each.name == "Solved",
        ),
    )
    bound = min(bounds)
    bound = Bound(min(ranked[0].span, bound), bound.reason)
    return Choice(tuple(ranked), bound, costs.unit)


def _kinds(
    placement: Placement | None, ranks: int, stages: int, replicate: bool
) -> Iterator[Kind | Placement]:
    """The placements that are solved."""
    several = placement is not None and placement.replicated
    if not several and not (replicate and stages % ranks):
        yield placement or "any"
    if several or (replicate and placement is None):
        yield "replicated"


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
