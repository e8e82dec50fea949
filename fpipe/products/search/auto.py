# SPDX-License-Identifier: Apache-2.0
"""``schedule="auto"``: the schedule of a pipeline is chosen for its costs and its memory, once for
each number of microbatches.

Where costs are given, all placements are candidates, and the choice is that of rank 0 when the
pipeline is built. Else the placement is the one that is best for equal stages, and the first call
that needs gradients estimates the costs from the programs of all stages. Rank 0 searches, and the
others get what it chose: the solver's schedule, or the best of those with a name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from ... import Costs, Placement, Schedule, make_schedule
from ...actions import as_costs, number, unfused
from ...collectives import Group
from ...errors import ScheduleError, StageError
from ..pictures.labels import aligned
from .bounds import Bound
from .comparison import named_alike
from .memory_limit import Memory, in_bytes, is_within, limits
from .solve import Kind, solve

#: Forwards up to which all named schedules are simulated.
MOST = 20_000
#: op or figure -> stage -> its value
Figures = Mapping[str, Mapping[int, float]]
SECONDS = 2.0  #: of a search
TRIES = 4  #: choices whose plans are checked against the memory


class Candidate(NamedTuple):
    """A schedule with its figures under the costs."""

    name: str
    schedule: Schedule
    total: float
    span: float
    bubble: float
    memory: float  #: the most that a rank holds
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The candidates, those that fit first, the shortest span first; the first is chosen."""

    candidates: tuple[Candidate, ...]
    bound: Bound
    unit: str

    @property
    def best(self) -> Candidate:
        """The one to take."""
        return self.candidates[0]

    def __str__(self) -> str:
        best = self.best
        unit = self.unit and f" {self.unit}"
        rows = [("schedule", "total", "bubble", "memory", "")]
        for each in self.candidates:
            held = number(each.memory), "" if each.fits else "does not fit"
            rows.append((each.name, number(each.total), f"{each.bubble:.2%}", *held))
        return "\n".join(
            [
                f"{best.name}: total {number(best.total)}{unit}, bubble {best.bubble:.2%}, holds "
                f"{number(best.memory)}; the span is {number(best.span)}{unit}, and no schedule "
                f"has one below {number(self.bound)}{unit} ({self.bound.reason})",
                "",
                *aligned(rows),
            ]
        )


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
    several = placement is not None and placement.replicated
    kinds: list[Kind | Placement] = []
    if not several and not (replicate and stages % ranks):
        kinds.append(placement or "any")
    if several or (replicate and placement is None):
        kinds.append("replicated")
    for kind in kinds:
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
        if kind != "replicated" and solved.stages * microbatches <= MOST:
            schedules += named_alike(solved)
        schedules.append(("Replicated" if kind == "replicated" else "Solved", solved))
    candidates: list[Candidate] = []
    for name, schedule in schedules:
        if placement is None or repr(placement) == repr(schedule.placement):
            t = schedule.simulate(costs)
            figures = t.total, t.span, max(t.bubble, 0.0), max(t.peak_bytes)
            candidates.append(Candidate(name, schedule, *figures, is_within(limit, t)))
    ranked = sorted(candidates, key=_order)
    bound = min(bounds)
    bound = Bound(min(ranked[0].span, bound), bound.reason)
    return Choice(tuple(ranked), bound, costs.unit)


def _order(one: Candidate) -> tuple[bool, float, bool, bool]:
    return not one.fits, round(one.span, 9), descends(one.schedule), one.name == "Solved"


def descends(schedule: Schedule) -> bool:
    """Whether a stage adds the gradients of its microbatches in another order than the ascending
    one.
    """
    for row in schedule.rows:
        last: dict[int, int] = {}
        for part in unfused(row):
            if part.op in "BW":
                if last.get(part.stage, -1) > part.microbatch:
                    return True
                last[part.stage] = part.microbatch
    return False


@dataclass(frozen=True)
class Automatic:
    """A schedule that is to be chosen; see :func:`auto`."""

    memory: float | None
    costs: Costs | None
    replicate: bool

    def bound_to(self, group: Group, stages: int, microbatches: int | None) -> Auto:
        """What chooses the schedule of a pipeline."""
        bound = Auto(group, stages, self.memory, self.costs, self.replicate)
        if self.costs is not None:
            bound(group.size, microbatches or 2 * group.size)
        return bound


def auto(
    memory: float | str | None = None, costs: Costs | None = None, *, replicate: bool = False
) -> Automatic:
    """A schedule that is chosen for its costs and its memory: a value for
    ``fpipe.pipeline(schedule=)``, where ``"auto"`` is the same without limits.

    Args:
        memory: what a rank may use: bytes, or text such as ``"60GB"``.
        costs: as from ``fpipe.measure_costs``. None: estimates in the first call.
        replicate: whether stages may be on several ranks, each of which holds their parameters. It
            needs ``costs``, since parameters are placed before the first call.

    Returns:
        A value for ``fpipe.pipeline(schedule=)``; ``pipe.why`` says what was chosen and why.

    Raises:
        StageError: if the memory is no limit.
        ScheduleError: if it cannot be read.

    >>> auto(memory="60GB").memory
    60000000000.0
    """
    if memory is not None and not isinstance(memory, (str, int, float)):
        raise StageError(f"memory={memory!r}; give one limit for all ranks, such as '60GB'")
    if costs is not None:
        limits(memory, 1, as_costs(costs))
    elif replicate:
        raise StageError(
            "auto(replicate=True) places stages by their costs before the first call; give costs=, "
            "as from fpipe.measure_costs"
        )
    return Automatic(None if memory is None else in_bytes(memory), costs, replicate)


@dataclass(frozen=True, eq=False)
class Auto:
    """A schedule that is chosen: a function (ranks, microbatches) -> Schedule, as
    ``fpipe.pipeline`` takes.

    ``chosen`` is by number of microbatches: the schedule, and why. ``provisional`` is run where
    there was no choice yet, as in calls without gradients.
    """

    group: Group
    stages: int
    memory: float | None
    costs: Costs | None = None
    replicate: bool = False
    chosen: dict[int, tuple[Schedule, str]] = field(default_factory=dict)

    def __call__(self, ranks: int, microbatches: int) -> Schedule:
        if microbatches not in self.chosen:
            if self.costs is None:
                return provisional(ranks, microbatches, self.stages)
            placement = next((s.placement for s, _ in self.chosen.values()), None)
            self.chosen[microbatches] = self._agreed(microbatches, self.costs, placement)
        return self.chosen[microbatches][0]

    def _agreed(
        self,
        microbatches: int,
        costs: Costs,
        placement: Placement | None,
        used: float = 0.0,
    ) -> tuple[Schedule, str]:
        """What rank 0 chooses for these costs, and why; ``used`` is the memory that is not for
        activations. Collective.
        """
        answer: tuple[str, str, str] | str = ""
        if 0 in self.group.here:
            try:
                limit = None if self.memory is None else self.memory - used
                if limit is not None and limit <= 0:
                    raise ScheduleError(
                        f"memory={self.memory:g} does not hold parameters, gradients and "
                        f"messages, {used:g} bytes; give more memory, more ranks or copies(zero=)"
                    )
                choice = choose(
                    costs,
                    self.group.size,
                    microbatches,
                    self.stages,
                    limit,
                    placement=placement,
                    time_limit=SECONDS,
                    replicate=self.replicate,
                )
                best = choice.best
                answer = (best.schedule.name or best.name, str(best.schedule), str(choice))
            except ScheduleError as error:
                answer = str(error)
        first = next(filter(None, self.group.gather_objects(answer)))
        if isinstance(first, str):
            raise ScheduleError(first, rule="memory")
        name, rows, why = first
        return Schedule.parse(rows, name=name), why

    def estimated(
        self,
        microbatches: int,
        plans_of: Callable[[Schedule], Any],
        run: Schedule,
        latency: float,
    ) -> Schedule:
        """Choose from what the programs of all stages are expected to take. Collective.

        ``run`` is a schedule with the same placement, ``plans_of`` returns ``pipe.plan`` of one,
        and ``latency`` is that of a message, in microseconds.
        What plans hold beside activations depends on the schedule, so the plans of what is chosen
        are checked. Where they exceed the memory, the choice is made again with as much less.
        """
        plans = plans_of(run)
        parts = self.group.gather_objects(plans.figures)
        figures = {name: ChainMap(*(part[name] for part in parts)) for name in parts[0]}
        costs = costs_of(figures, self.stages, latency)
        held = run.simulate(costs).peak_bytes
        peaks = self._peaks(plans.peak)
        used = max(0.0, *(peak - held[rank] for rank, peak in peaks.items()))
        over = 0.0
        for _ in range(TRIES):
            used += over
            schedule, why = self._agreed(microbatches, costs, run.placement, used)
            if self.memory is not None:
                over = max(self._peaks(plans_of(schedule).peak).values()) - self.memory
            if over <= 0:
                self.chosen[microbatches] = schedule, why
                return schedule
        raise ScheduleError(
            f"the plans of {TRIES} schedules that were chosen take more than "
            f"memory={self.memory:g}, the last one by "
            f"{over:,.0f} bytes; give more memory, more ranks or copies(zero=)",
            rule="memory",
        )

    def _peaks(self, here: Mapping[int, int]) -> Mapping[int, int]:
        """The peaks of memory of all ranks."""
        return ChainMap(*self.group.gather_objects(here))


def costs_of(figures: Figures, stages: int, latency: float = 0.0) -> Costs:
    """Costs in microseconds and bytes; the mean stands for stages that nobody knows."""
    spread: dict[str, tuple[float, ...]] = {}
    for name, values in figures.items():
        if values:
            mean = fmean(values.values())
            spread[name] = tuple(values.get(stage, mean) for stage in range(stages))
    return Costs(**spread, comm=latency, unit="us")


def provisional(ranks: int, microbatches: int, stages: int) -> Schedule:
    """The schedule by name that suits stages of equal cost: its placement is kept.

    >>> provisional(2, 4, 4).name, provisional(2, 4, 2).name, provisional(2, 4, 6).name
    ('ZBVZeroBubble', 'ZBH1', 'InterleavedZeroBubble')
    """
    if stages % ranks:
        raise StageError(
            f"{stages} stages cannot be placed evenly on {ranks} ranks; give a multiple, or a "
            "Schedule"
        )
    name = {1: "ZBH1", 2: "ZBV"}.get(stages // ranks, "InterleavedZeroBubble")
    return make_schedule(name, ranks, microbatches, stages)
