# SPDX-License-Identifier: Apache-2.0
"""Proposes cuts into stages of even cost, and simulates the gain.

Costs are numbers, one for each thing that must stay whole (a layer, an embedding, a head), or
modules whose cost is estimated from their parameters. This module uses schedules and the simulator;
it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from math import inf
from operator import attrgetter
from typing import Any, TypeAlias

from ... import Costs, Schedule, Timeline
from ...errors import ScheduleError, StageError
from ...generators import schedule_from

#: How many simulated actions a search may spend; a second or two.
_BUDGET = 2_000_000
#: Where parts begin.
Starts: TypeAlias = tuple[int, ...]
#: A value, and where parts begin.
_Cut: TypeAlias = tuple[float, Starts]


@dataclass(frozen=True)
class Balance:
    """A proposal: ``cuts`` begin stages 1, 2, ...; ``sizes`` and ``costs`` are the stages' counts
    and costs.

    ``even`` is the cut into equal counts, for comparison; ``timeline`` and ``even_timeline`` are
    what the simulator says of both. ``str()`` shows them side by side.
    """

    names: tuple[object, ...]
    items: tuple[float, ...]
    schedule: Schedule
    even: Starts
    starts: Starts

    @property
    def cuts(self) -> tuple[Any, ...]:
        """The names of the items that begin stages 1, 2, ..."""
        return tuple(self.names[start] for start in self.starts[1:])

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many items each stage holds."""
        return tuple(hi - lo for lo, hi in pairwise((*self.starts, len(self.items))))

    @property
    def costs(self) -> tuple[float, ...]:
        """What each stage costs."""
        bounds = pairwise((*self.starts, len(self.items)))
        return tuple(sum(self.items[lo:hi]) for lo, hi in bounds)

    @cached_property
    def timeline(self) -> Timeline:
        """The proposal in the simulator, backward at twice the forward."""
        return self.schedule.simulate(Costs(F=self.costs, I=self.costs, W=self.costs))

    @cached_property
    def even_timeline(self) -> Timeline:
        """The equal counts in the simulator."""
        return replace(self, starts=self.even).timeline

    @property
    def _score(self) -> tuple[float, float]:
        """What is less in a better proposal: the time of a step, then how uneven stages are."""
        return self.timeline.total, sum(cost * cost for cost in self.costs)

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
                "    cost: as given; of a module, the entries of its matrices (an embedding: 0)",
            ]
        )


def balance(
    costs: object,
    ranks: int,
    schedule: str | Schedule = "1F1B",
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
        schedule: a name, or a ``Schedule``.
        stages: how many stages there are; by default those of the schedule.
        microbatches: for a schedule by name; by default four times the number of ranks.

    Returns:
        A value with ``cuts`` (names, as ``from_module`` takes them, where there are names),
        ``sizes``, ``costs`` of stages, and the ``gain`` over stages of equal counts.

    Raises:
        StageError: if there are fewer items than stages, or a cost is no number.
        ScheduleError: if the schedule does not fit the ranks.

    >>> plan = balance([0, 1, 1, 1, 1, 1, 1, 3], ranks=4)
    >>> plan.sizes, plan.costs
    ((3, 2, 2, 1), (2.0, 2.0, 2.0, 3.0))
    >>> plan.cuts, round(plan.gain, 2)
    ((3, 5, 7), 1.28)
    """
    names, items = _items(costs)
    schedule = schedule_from(schedule, ranks, microbatches or 4 * ranks, stages)
    if schedule.ranks != ranks:
        raise ScheduleError(
            f"the schedule is for {schedule.ranks} ranks, not {ranks}; make both agree"
        )
    count = schedule.stages
    if len(items) < count:
        raise StageError(
            f"{len(items)} items cannot fill {count} stages; give finer items, or fewer ranks or "
            "stages a rank"
        )
    starts = tuple(len(items) * s // count for s in range(count))
    even = Balance(names, items, schedule, starts, starts)
    spread_out = replace(even, starts=spread(items, count))
    return _climb(min(spread_out, even, key=attrgetter("_score")))


def spread(costs: Sequence[float], parts: int) -> Starts:
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

    def best_cut(add: Callable[[float, float], float]) -> _Cut:
        """The least value of the parts, and where they begin; ``add(value, cost)`` is the value
        with one part more.
        """
        nothing: _Cut = (inf, ())
        best: list[_Cut] = [(0.0, ()), *[nothing] * count]
        for _ in range(parts):
            longer: list[_Cut] = [nothing]
            for end in range(1, count + 1):
                cut = min(
                    (add(value, sums[end] - sums[start]), (*starts, start))
                    for start, (value, starts) in enumerate(best[:end])
                )
                longer.append(cut)
            best = longer
        return best[-1]

    bound = best_cut(max)[0] * (1 + 1e-12)
    return best_cut(lambda total, cost: total + cost * cost if cost <= bound else inf)[1]


def estimate(module: Any) -> float:
    """What a module costs a token: the entries of its matrices, lookups excepted.

    ``module`` is anything with ``modules()`` as an ``nn.Module`` has it. A vocabulary head counts
    in full, an embedding nothing.
    """
    counted = (child for child in module.modules() if "Embedding" not in type(child).__name__)
    parameters = {id(p): p for child in counted for p in child.parameters(recurse=False)}
    return float(sum(p.numel() for p in parameters.values() if p.dim() > 1))


def _items(costs: object) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """The names of items, or their numbers, and what they cost."""
    children = getattr(costs, "named_children", None)
    if children is not None:
        costs = dict(children())
    if not isinstance(costs, Iterable):
        raise StageError(
            f"costs={costs!r}; give a list of numbers or modules, or a mapping from names to them"
        )
    named = costs if isinstance(costs, Mapping) else dict(enumerate(costs))
    items = {name: _cost(name, item) for name, item in named.items()}
    if not any(items.values()):
        raise StageError(
            "all costs are 0; give what forward costs in each item, measured or estimated"
        )
    return tuple(items), tuple(items.values())


def _cost(name: object, item: object) -> float:
    cost = estimate(item) if hasattr(item, "modules") else item
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost < inf:
        raise StageError(f"the cost of {name!r} is {cost!r}; costs are finite numbers, 0 or more")
    return float(cost)


def _climb(best: Balance) -> Balance:
    """Move cuts by one, alone or with those that follow each other, while that makes the step
    shorter.
    """
    tries = _BUDGET // max(sum(map(len, best.schedule.rows)), 1)
    while True:
        ends = range(1, len(best.starts) + 1)
        for (first, after), by in product(combinations(ends, 2), (-1, 1)):
            starts = (by * (first <= k < after) + start for k, start in enumerate(best.starts))
            moved = replace(best, starts=tuple(starts))
            tries -= 1
            if tries < 0:
                return best
            if min(moved.sizes) > 0 and moved._score < best._score:
                best = moved
                break
        else:
            return best
