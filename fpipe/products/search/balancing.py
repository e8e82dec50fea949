# SPDX-License-Identifier: Apache-2.0
"""Proposes cuts into stages of even cost, and simulates the gain.

Costs are numbers, one for each thing that must stay whole (a layer, an embedding, a head), or
modules whose cost is estimated from their parameters. This module uses schedules and the simulator;
it does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf, isfinite
from typing import Any

from ... import Costs, Placement, Schedule, Timeline, schedule_names
from ...errors import ScheduleError, StageError
from ...generators import schedule_from

#: How many simulated actions a search may spend; a second or two.
_BUDGET = 2_000_000


@dataclass(frozen=True)
class Balance:
    """A proposal: ``cuts`` begin stages 1, 2, ...; ``sizes`` and ``costs`` are the stages' counts
    and costs.

    ``even`` is the cut into equal counts, for comparison; ``timeline`` and ``even_timeline`` are
    what the simulator says of both. ``str()`` shows them side by side.
    """

    cuts: tuple[Any, ...]
    starts: tuple[int, ...]
    items: tuple[float, ...]
    even: tuple[int, ...]
    schedule: Schedule

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many items each stage holds."""
        return tuple(hi - lo for lo, hi in pairwise((*self.starts, len(self.items))))

    @property
    def costs(self) -> tuple[float, ...]:
        """What each stage costs."""
        return _sums(self.items, self.starts)

    @cached_property
    def timeline(self) -> Timeline:
        """The proposal in the simulator, backward at twice the forward."""
        return _simulate(self.schedule, self.costs)

    @cached_property
    def even_timeline(self) -> Timeline:
        """The equal counts in the simulator."""
        return _simulate(self.schedule, _sums(self.items, self.even))

    @property
    def gain(self) -> float:
        """How many times faster a step is than with equal counts."""
        return self.even_timeline.total / self.timeline.total

    def __str__(self) -> str:
        even = replace(self, starts=self.even)
        lines = ["stage  rank    items       cost    evenly       cost"]
        columns = zip(self.sizes, self.costs, even.sizes, even.costs, strict=True)
        for stage, (size, cost, even_size, even_cost) in enumerate(columns):
            rank = ",".join(map(str, self.schedule.placement.ranks_of(stage)))
            lines.append(
                f"{stage:5d}  {rank:>4s}  {size:7d}  {cost:9.4g}  {even_size:8d}  {even_cost:9.4g}"
            )
        for title, timeline in (("balanced", self.timeline), ("evenly", self.even_timeline)):
            lines.append(f"{title:>8s}: total {timeline.total:.4g}, bubble {timeline.bubble:.1%}")
        return "\n".join(
            [
                *lines,
                f"    gain: {self.gain:.3f}x ({self.schedule.name}, {self.schedule.ranks} ranks)",
            ]
        )


def balance(
    costs: Any,
    ranks: int,
    placement: str | Placement | Schedule = "1F1B",
    *,
    stages: int | None = None,
    microbatches: int | None = None,
) -> Balance:
    """Propose cuts that make a step short: items stay in order, every stage gets one at least.

    Args:
        costs: of the items: numbers in the order of the forward, a mapping from names to numbers,
            or modules (a list, a mapping, or one module for its children), whose costs are
            estimated.
        ranks: how many ranks there are.
        placement: a schedule by name, a ``Schedule``, ``"loop"``, ``"v"`` or a ``Placement`` of
            either kind.
        stages: how many stages there are; by default those of the placement.
        microbatches: for a schedule by name; by default twice the number of ranks.

    Returns:
        A value with ``cuts`` (names, as ``from_module`` takes them, where there are names),
        ``sizes``, ``costs`` of stages, and the ``gain`` over stages of equal counts.

    Raises:
        StageError: if there are fewer items than stages, or a cost is no number.
        ScheduleError: if the placement does not fit the ranks.

    >>> plan = balance([0, 1, 1, 1, 1, 1, 1, 3], ranks=4)
    >>> plan.sizes, plan.costs
    ((3, 2, 2, 1), (2.0, 2.0, 2.0, 3.0))
    >>> plan.cuts, round(plan.gain, 2)
    ((3, 5, 7), 1.28)
    """
    names, items = _items(costs)
    schedule = _schedule(ranks, placement, stages, microbatches)
    count = schedule.stages
    if len(items) < count:
        remedy = "give finer items, or fewer ranks or stages a rank"
        raise StageError(f"{len(items)} items cannot fill {count} stages; {remedy}")
    even = tuple(len(items) * s // count for s in range(count))
    best = min((spread(items, count), even), key=lambda starts: _score(schedule, items, starts))
    best = _climb(schedule, items, best)
    return Balance(tuple(names[start] for start in best[1:]), best, items, even, schedule)


def spread(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where contiguous parts begin so that the largest cost is least and then the others are as
    even as possible.

    >>> spread([1, 1, 1, 1, 4], 3)
    (0, 2, 4)
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise StageError(
            f"{count} items cannot be cut into {parts} parts; every part needs one at least"
        )
    sums = [0.0, *accumulate(costs)]
    ends = range(count + 1)
    # by the number of parts, then of items: the least possible largest cost
    least = sums
    for k in range(2, parts + 1):
        least = [
            min((max(least[i], sums[j] - sums[i]) for i in range(k - 1, j)), default=inf)
            for j in ends
        ]
    bound = least[count] * (1 + 1e-12)
    # the same for the sum of squares of costs up to that one, with the places where the parts begin
    best: list[tuple[float, tuple[int, ...]]] = [(inf, ()) for _ in ends]
    best[0] = (0.0, ())
    for k in range(1, parts + 1):
        squares = [
            [
                (best[i][0] + cost * cost, i)
                for i in range(k - 1, j)
                if (cost := sums[j] - sums[i]) <= bound
            ]
            for j in ends
        ]
        best = [
            (value, (*best[i][1], i))
            for value, i in (min(some, default=(inf, 0)) for some in squares)
        ]
    return best[count][1]


def estimate(module: Any) -> float:
    """What a module costs a token: the entries of its matrices, lookups excepted.

    ``module`` is anything with ``modules()`` as an ``nn.Module`` has it. A vocabulary head counts
    in full, an embedding nothing.
    """
    counted = (child for child in module.modules() if "Embedding" not in type(child).__name__)
    parameters = {id(p): p for child in counted for p in child.parameters(recurse=False)}
    return float(sum(p.numel() for p in parameters.values() if p.dim() > 1))


# ---- inside ----
def _items(costs: Any) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    if hasattr(costs, "named_children"):
        costs = dict(costs.named_children())
    if isinstance(costs, Mapping):
        names, values = tuple(costs), list(costs.values())
    elif isinstance(costs, Iterable):
        values = list(costs)
        names = tuple(range(len(values)))
    else:
        raise StageError(
            f"costs={costs!r}; give a list of numbers or modules, or a mapping from names to them"
        )
    items = tuple(estimate(v) if hasattr(v, "modules") else v for v in values)
    for name, item in zip(names, items, strict=True):
        if (
            isinstance(item, bool)
            or not isinstance(item, (int, float))
            or not isfinite(item)
            or item < 0
        ):
            raise StageError(
                f"the cost of {name!r} is {item!r}; costs are finite numbers, 0 or more"
            )
    if not any(items):
        raise StageError(
            "all costs are 0; give what forward costs in each item, measured or estimated"
        )
    return names, tuple(map(float, items))


def _schedule(
    ranks: int, placement: str | Placement | Schedule, stages: int | None, microbatches: int | None
) -> Schedule:
    if isinstance(placement, Schedule):
        if placement.ranks != ranks:
            raise ScheduleError(
                f"the schedule is for {placement.ranks} ranks, not {ranks}; make both agree"
            )
        return placement
    if isinstance(placement, Placement):
        stages = placement.stages
        looped = stages % ranks == 0 and placement == Placement.loop(ranks, stages // ranks)
        if not looped and placement != Placement.v(ranks):
            raise ScheduleError(
                f"no schedule is known for {placement}; pass the Schedule that will run"
            )
        placement = "loop" if looped else "v"
    if not isinstance(placement, str):
        known = ", ".join(schedule_names()[:3])
        remedy = f"give 'loop', 'v', a schedule's name ({known}, ...) or a Schedule"
        raise ScheduleError(f"placement={placement!r}; {remedy}")
    names = {"loop": "1F1B" if stages in (None, ranks) else "Interleaved1F1B", "v": "ZBV"}
    count = 4 * ranks if microbatches is None else microbatches
    return schedule_from(names.get(placement.lower(), placement), ranks, count, stages)


def _sums(items: Sequence[float], starts: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(sum(items[lo:hi])) for lo, hi in pairwise((*starts, len(items))))


def _simulate(schedule: Schedule, costs: Sequence[float]) -> Timeline:
    return schedule.simulate(Costs(F=costs, I=costs, W=costs))


def _score(
    schedule: Schedule, items: Sequence[float], starts: Sequence[int]
) -> tuple[float, float]:
    costs = _sums(items, starts)
    return _simulate(schedule, costs).total, sum(cost * cost for cost in costs)


def _climb(schedule: Schedule, items: Sequence[float], starts: tuple[int, ...]) -> tuple[int, ...]:
    """Move single cuts by one while that makes the step shorter."""
    left = _BUDGET // max(sum(map(len, schedule.rows)), 1)
    score, better = _score(schedule, items, starts), True
    while better and left > 0:
        better = False
        for index, by in product(range(1, len(starts)), (-1, 1)):
            moved = (*starts[:index], starts[index] + by, *starts[index + 1 :])
            if left > 0 and all(lo < hi for lo, hi in pairwise((*moved, len(items)))):
                left -= 1
                tried = _score(schedule, items, moved)
                if tried < score:
                    score, starts, better = tried, moved, True
    return starts
