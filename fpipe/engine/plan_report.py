# SPDX-License-Identifier: Apache-2.0
"""``Plans``: the plans of the ranks of this process as a value that is printed, and what is
expected of them.

Knows plans and programs; no pipeline and no call.
"""

from __future__ import annotations

from ..actions.costs import Costs
from ..actions.product import feature, product
from ..lowering.plan import Plan
from .prepare import Prepared


class Plans:
    """The plans of the ranks of this process, by rank; ``peak`` is the peak memory of each in
    bytes.

    Where steps are captured, ``graph`` are the bytes that the graph of a step keeps allocated at
    most: those of the ranks, copies of the arguments, and the results.
    """

    def __init__(self, prepared: Prepared, captured: bool = False):
        self.by_rank = prepared.plans
        self.graph = _held_by_a_graph(prepared) if captured else None
        self.peak = {rank: plan.peak for rank, plan in self.by_rank.items()}
        self._inputs = prepared.inputs

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """What is expected of the programs of the stages of this process, by shapes: microseconds,
        and bytes.
        """
        microseconds = feature("weaving.segments").microseconds
        figures: dict[str, dict[int, float]] = {
            name: {} for name in ("F", "B", "I", "W", "saved", "kept")
        }
        for source in self._inputs.values():
            for stage, slices in source.of_a_microbatch().items():
                times = (
                    sum(microseconds(getattr(each, letter)) for each in slices) for letter in "fbiw"
                )
                held = (
                    sum(each.saved_bytes for each in slices),
                    sum(each.kept_bytes for each in slices),
                )
                for known, figure in zip(figures.values(), (*times, *held), strict=True):
                    known[stage] = figure
        return figures

    @property
    def costs(self) -> Costs:
        """What is expected, for ``schedule.simulate``: programs by shapes, woven actions by their
        weaves.

        The mean over the stages of this process stands for the others.
        """
        figures = self.figures
        stages = next(iter(self._inputs.values())).stages
        mean = {name: sum(known.values()) / max(len(known), 1) for name, known in figures.items()}
        spread = {
            name: tuple(known.get(s, mean[name]) for s in range(stages))
            for name, known in figures.items()
        }
        woven = {
            name: weave
            for plan in self.by_rank.values()
            for name, weave in plan.weaves.items()
            if not weave.reason
        }

        def overlap(action):
            return woven[str(action)].beside() if str(action) in woven else None

        return Costs(**spread, overlap=overlap, unit="us")

    def __getitem__(self, rank: int) -> Plan:
        return self.by_rank[rank]

    def __str__(self) -> str:
        plans = [plan for _, plan in sorted(self.by_rank.items())]
        rows = [
            f"{p.rank:4d}  {len(p.instructions):12d}  {p.slots:5d}  {p.peak:10,d}" for p in plans
        ]
        graph = (
            []
            if self.graph is None
            else [f"its graph keeps {self.graph:,} bytes allocated at most"]
        )
        return "\n".join(
            ["rank  instructions  slots  peak bytes", *rows, *graph, "", *map(str, plans)]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a table, and the instructions of each rank, folded."""
        plans = [plan for _, plan in sorted(self.by_rank.items())]
        head = "rank", "instructions", "slots", "peak bytes"
        rows = [(plan.rank, len(plan.instructions), plan.slots, f"{plan.peak:,}") for plan in plans]
        return product("pictures").table(head, rows) + "".join(
            map(product("pictures").titled, map(str, plans))
        )


def _held_by_a_graph(prepared: Prepared) -> int:
    """The peaks of all ranks, which share one device, copies of the arguments, and gradients."""
    request = prepared.request
    params = [tree for tree in request.params if tree is not None]
    states = [tree for tree in request.states if tree is not None]
    batch = [
        tree
        for kind in request.kind_of
        for x, targets, sides in [request.kinds[kind]]
        for tree in (x, *targets, *sides)
    ]
    arguments = sum(
        aval.nbytes for tree in (*params, *states, *batch) for aval in tree.avals.values()
    )
    gradients = sum(aval.nbytes for tree in params for aval in tree.avals.values() if aval.grad)
    return sum(plan.peak for plan in prepared.plans.values()) + arguments + gradients
