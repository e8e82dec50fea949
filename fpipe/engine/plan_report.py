# SPDX-License-Identifier: Apache-2.0
"""``Plans``: the plans of the ranks of this process as a value that is printed, and what is
expected of them.

Knows plans and programs; no pipeline and no call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..actions.costs import Costs
from ..actions.product import load_pass
from ..actions.text import counted
from ..lowering.plan import Plan
from .prepare import Prepared

HEADING = (
    "<p><b>Plan of {}, {}</b><br/>Open a rank for its instructions, which scroll.<br/>"
    "The peak is the most bytes held at once, without parameters and the batch.</p>"
)


class Plans:
    """The plans of the ranks of this process, by rank; ``peak`` is the peak memory of each in
    bytes.

    ``plans[rank]`` is the plan of one rank, and ``print`` shows the instructions of all.

    Where steps are captured, ``graph`` are the bytes that the graph of a step keeps allocated at
    most: those of the ranks, copies of the arguments, and the results.
    """

    def __init__(self, prepared: Prepared, captured: bool):
        self.by_rank = prepared.plans
        self.graph = _held_by_a_graph(prepared) if captured else None
        self.peak = {rank: plan.peak for rank, plan in self.by_rank.items()}
        self._jobs = prepared.jobs

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """What is expected of the programs of the stages of this process, by shapes: microseconds,
        and bytes.
        """
        microseconds = load_pass("weaving.segments").microseconds
        names = "F", "B", "I", "W", "saved", "kept"
        figures: dict[str, dict[int, float]] = {name: {} for name in names}
        for job in self._jobs.values():
            for stage, slices in job.slice_programs().items():
                for letter in "FBIW":
                    programs = [getattr(part, letter.lower()) for part in slices]
                    figures[letter][stage] = sum(map(microseconds, programs))
                figures["saved"][stage] = sum(part.saved_bytes for part in slices)
                figures["kept"][stage] = sum(part.kept_bytes for part in slices)
        return figures

    @property
    def costs(self) -> Costs:
        """What is expected, for ``schedule.simulate``: programs by shapes, woven actions by their
        weaves.

        The mean over the stages of this process stands for the others.
        """
        stages = next(iter(self._jobs.values())).stages
        spread: dict[str, tuple[float, ...]] = {}
        for name, figures in self.figures.items():
            mean = sum(figures.values()) / max(len(figures), 1)
            spread[name] = tuple(figures.get(stage, mean) for stage in range(stages))
        weaves = {name: w for plan in self.by_rank.values() for name, w in plan.weaves.items()}

        def overlap(action):
            weave = weaves.get(str(action))
            if weave is None or weave.reason:
                return None
            return weave.beside()

        return Costs(**spread, overlap=overlap, unit="us")

    def __getitem__(self, rank: int) -> Plan:
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[Plan]:
        return (self.by_rank[rank] for rank in sorted(self.by_rank))

    def __str__(self) -> str:
        rows = ["rank  instructions  peak bytes"]
        for p in self:
            rows.append(f"{p.rank:4d}  {len(p.instructions):12d}  {p.peak:10,d}")
        if self.graph is not None:
            rows.append(f"its graph keeps {self.graph:,} bytes allocated at most")
        return "\n".join([*rows, "", *map(str, self)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a line for each rank, below which its instructions fold."""
        schedule = next(iter(self._jobs.values())).schedule
        count = counted(schedule.microbatches, "microbatch")
        heading = HEADING.format(counted(len(self.by_rank), "rank"), count)
        return heading + "".join(plan._repr_html_() for plan in self)


def _held_by_a_graph(prepared: Prepared) -> int:
    """The peaks of all ranks, which share one device, copies of the arguments, and gradients."""
    request = prepared.request
    trees = [*request.params, *request.states]
    for kind in request.kind_of:
        x, targets, sides = request.kinds[kind]
        trees += [x, *targets, *sides]
    arguments = [aval for tree in filter(None, trees) for aval in tree.avals.values()]
    params = [aval for tree in filter(None, request.params) for aval in tree.avals.values()]
    peaks = sum(plan.peak for plan in prepared.plans.values())
    gradients = sum(aval.nbytes for aval in params if aval.grad)
    return peaks + sum(aval.nbytes for aval in arguments) + gradients
