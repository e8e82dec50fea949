# SPDX-License-Identifier: Apache-2.0
"""What is known of a call of a pipeline before it runs, from all of its processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ... import Costs, Schedule, Timeline
from ...actions import counted
from ...tree import Tree, is_tensor, leaves


class StageFacts(NamedTuple):
    """A stage of a rank: its name and engine, and its parameters in numbers and bytes."""

    stage: int
    name: str
    engine: str
    parameters: int
    nbytes: int


class Edge(NamedTuple):
    """The messages from a rank to another one, of one direction and one stage."""

    rank: int
    to: int
    stage: int
    direction: str
    messages: int
    nbytes: int  # of all of them


@dataclass(frozen=True)
class Facts:
    """What plans and parameters say; the same on all processes."""

    title: str
    schedule: Schedule
    costs: Costs
    measured: bool
    devices: Mapping[int, str]
    stages: Mapping[int, Sequence[StageFacts]]  # by rank
    edges: Sequence[Edge]
    peaks: Mapping[int, int]  # of the plans, in bytes

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.schedule.simulate(self.costs)


def collect(
    pipe: Any,
    params: Sequence[Tree],
    x: Tree,
    targets: Sequence[Tree],
    side: Mapping[str, Any],
    costs: Costs | None,
) -> Facts:
    """The facts of a call. Every process of the pipeline must call it."""
    plans = pipe.plan(params, x, *targets, **side)
    own = {
        "figures": plans.figures,
        "peaks": dict(plans.peak),
        "devices": {rank: str(pipe.group.device(rank)) for rank in plans.peak},
        "stages": {rank: _stages_of(pipe, rank, params) for rank in plans.peak},
        "edges": [tuple(edge) for plan in plans.by_rank.values() for edge in _edges(plan)],
    }
    every = pipe.gather(own)
    if pipe.config.local:
        every = every[:1]
    merged = {name: {k: v for one in every for k, v in one[name].items()} for name in list(own)[:4]}
    figures: dict[str, dict[int, float]] = defaultdict(dict)
    for one in every:
        for name, by_stage in one["figures"].items():
            figures[name].update(by_stage)
    units = (part.microbatch for p in plans.by_rank.values() for a in p.row for part in a.parts)
    number = max(units) // pipe.config.slices + 1
    schedule = pipe.schedule(number)
    return Facts(
        f"{schedule.name or 'a schedule'}: {counted(pipe.stages, 'stage')} on "
        f"{counted(schedule.ranks, 'rank')}, {counted(number, 'microbatch')}",
        schedule,
        _costs(figures, pipe.stages, costs),
        costs is not None,
        merged["devices"],
        {rank: [StageFacts(*one) for one in rows] for rank, rows in merged["stages"].items()},
        sorted(Edge(*edge) for one in every for edge in one["edges"]),
        merged["peaks"],
    )


def _costs(figures: Mapping[str, Mapping[int, float]], stages: int, given: Costs | None) -> Costs:
    """The costs that were given, or estimates; both with the bytes of the programs."""
    by_stage = {
        name: tuple(values.get(stage, 0.0) for stage in range(stages))
        for name, values in figures.items()
    }
    if given is None:
        return Costs(**by_stage, unit="us")
    return replace(given, saved=by_stage["saved"], kept=by_stage["kept"])


def _stages_of(pipe: Any, rank: int, params: Sequence[Tree]) -> list[tuple[Any, ...]]:
    """The stages of a rank, as plain tuples."""
    rows = []
    for stage in pipe.placement.stages_of(rank):
        function = pipe.config.functions[stage]
        tensors = [leaf for leaf in leaves(params[stage]) if is_tensor(leaf)]
        count = sum(leaf.numel() for leaf in tensors)
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        rows.append((stage, function.label, str(function.engine or ""), count, nbytes))
    return rows


def _edges(plan: Any) -> list[Edge]:
    """The messages that a rank sends between stages."""
    forwards = {key for ins in plan.keyed if ins.kind == "F" for key in ins.writes}
    messages: Counter[tuple[int, int, str]] = Counter()
    total: Counter[tuple[int, int, str]] = Counter()
    for ins in plan.keyed:
        if ins.kind != "SEND":
            continue
        source = getattr(ins.reads[0][0], "stage", -1)
        direction = "forward" if ins.reads[0] in forwards else "backward"
        edge = (ins.op.peer, source, direction)
        messages[edge] += 1
        total[edge] += sum(spec.bytes for spec in ins.op.specs)
    return [Edge(plan.rank, *edge, messages[edge], total[edge]) for edge in messages]
