"""When would each action run, and what would each rank hold?  Costs in, a ``Timeline`` out.

Every rank runs its row in order, each action as soon as the rank is free and what the action needs has arrived. It
knows costs and the order of ``walk``; it does not ask whether a schedule is complete (``check`` does).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from .actions import Placement, Row
from .errors import ScheduleError
from .timeline import Timeline
from .walk import Facts, walk

PerStage: TypeAlias = float | Sequence[float] | Mapping[int, float]


@dataclass(frozen=True)
class Costs:
    """What actions cost: each one number, or one per stage.

    ``F``, ``I``, ``W``, ``B`` (default: I + W) are times; ``overlap`` is the time of a fused action, by the stage of
    its first part (default: the sum of its parts). A message between different ranks takes ``comm`` plus
    ``boundary`` (bytes, one number or one per boundary between stages) over ``bandwidth`` (bytes per time).
    ``saved`` bytes are held from F to I, ``kept`` (default: all of ``saved``) from I to W.
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741
    W: PerStage = 1.0
    B: PerStage | None = None
    overlap: PerStage | None = None
    comm: PerStage = 0.0
    boundary: PerStage = 0.0
    bandwidth: float = inf
    saved: PerStage = 1.0
    kept: PerStage | None = None


def _spread(value: PerStage, count: int) -> list[float]:
    if isinstance(value, Mapping):
        return [float(value[k]) for k in range(count)]
    if isinstance(value, Sequence):
        return [float(v) for v in value]
    return [float(value)] * count


def simulate_rows(
    rows: tuple[Row, ...], placement: Placement, microbatches: int, costs: Costs, *, name: str = ""
) -> Timeline:
    """The timeline of these rows."""
    stages = placement.stages
    result = walk(rows, stages, microbatches)
    if result.blocked:
        first = result.blocked[0]
        raise ScheduleError(
            f"rank {first.rank} waits for ever", rank=first.rank, position=first.position, rule="deadlock"
        )
    cost = {op: _spread(getattr(costs, op), stages) for op in "FIW"}
    cost["B"] = [i + w for i, w in zip(cost["I"], cost["W"])] if costs.B is None else _spread(costs.B, stages)
    saved = _spread(costs.saved, stages)
    kept = saved if costs.kept is None else _spread(costs.kept, stages)
    memory = {
        "F": saved,
        "I": [k - s for k, s in zip(kept, saved)],
        "W": [-k for k in kept],
        "B": [-s for s in saved],
    }
    boundary = _spread(costs.boundary, stages - 1)
    edges = [c + b / costs.bandwidth for c, b in zip(_spread(costs.comm, stages - 1), boundary)]
    starts = [array("d", bytes(8 * len(row))) for row in rows]
    ends = [array("d", bytes(8 * len(row))) for row in rows]
    waits = tuple({} for _ in rows)
    facts = Facts(stages, microbatches)
    done = [0.0] * facts.size
    table = facts.table
    from .actions import RULE

    for rank, position in result.order:
        clock = ends[rank][position - 1] if position else 0.0
        action = rows[rank][position]
        length = 0.0
        for part in action.parts:
            base = part.stage * microbatches + part.microbatch
            path = placement.path(part.microbatch)
            for (kind, by), offset in zip(RULE[part.op][1], table[part.op][0]):
                other = part.stage + by
                arrival = done[base + offset]
                if by and 0 <= other < stages and path[other] != path[part.stage]:
                    arrival += edges[min(other, part.stage)]
                if arrival > clock:
                    clock = arrival
                    waits[rank][position] = facts.fact(base + offset)
            length += cost[part.op][part.stage]
        if len(action.parts) > 1 and costs.overlap is not None:
            length = _spread(costs.overlap, stages)[action.parts[0].stage]
        starts[rank][position] = clock
        ends[rank][position] = clock + length
        for part in action.parts:
            for offset in table[part.op][1]:
                done[part.stage * microbatches + part.microbatch + offset] = clock + length
    return Timeline(rows, tuple(starts), tuple(ends), placement, microbatches, waits, memory, boundary, name)
