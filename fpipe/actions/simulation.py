# SPDX-License-Identifier: Apache-2.0
"""When each action would run, and what each rank would hold: costs in, a ``Timeline`` out.

Every rank runs its row in order, each action as soon as the rank is free and the facts it needs
have arrived. Links have a latency and a bandwidth but no queue. The order comes from
``dependencies.walk``; an incomplete schedule can be simulated too, since only ``check`` asks
whether it is complete.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from .action import Action, AnyAction, Carried, Row
from .action_kinds import KINDS
from .broken_rules import stuck
from .check import inspect_rows
from .costs import Beside, Costs, Predict, number
from .dependencies import Facts, Walk
from .placement import Placement
from .timeline import Timeline

#: How an op runs on a stage; a plain tuple, since unpacking that is three times as fast:
#: the offset of the last fact that it needs, the only one that it can wait for; the time from the
#: end of that fact's action to its arrival; the times to receive, to run and to send; and the
#: offset of the first fact that it provides, the only one that other stages wait for.
_Step: TypeAlias = tuple[int, float, float, float, float, int]


def simulate_rows(
    rows: tuple[Row, ...],
    placement: Placement,
    microbatches: int,
    costs: Costs,
    *,
    name: str = "",
    walked: Walk | None = None,
    slices: int = 1,
) -> Timeline:
    """The timeline of these rows. ``walked`` is their walk, if it is known; then they have been
    checked.

    ``microbatches`` counts slices where each microbatch has several; costs are those of whole
    microbatches.

    >>> rows = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    >>> simulate_rows(rows, Placement.loop(2), 1, Costs(comm=0.5)).total
    7.0
    """
    walked, stages = (
        walked or inspect_rows(rows, placement, microbatches, slices).walk,
        placement.stages,
    )
    if walked.blocked:
        raise stuck(rows, stages, walked)
    facts = Facts(stages, microbatches)
    starts, ends, causes = (tuple(array(code) for _ in rows) for code in "ddq")
    carried: list[list[Carried]] = [[] for _ in rows]
    steps, size = _steps_of_all(facts, placement, costs, slices)
    arrivals, clocks = array("d", bytes(8 * facts.size)), [0.0] * len(rows)
    overlap = costs.overlap if callable(costs.overlap) else costs.times(stages).get("overlap")
    tables = tuple(
        (row, s.append, e.append, c.append)
        for row, s, e, c in zip(rows, starts, ends, causes, strict=True)
    )
    for rank, first, stop in walked.runs:
        (row, begin, end, cause), clock = tables[rank], clocks[rank]
        for action in row[first:stop]:
            waited = -1
            if overlap is None and isinstance(
                action, Action
            ):  # as below, for an action that is not fused
                stage, op, microbatch = action
                need, travel, receive, takes, send, provided = steps[microbatch][op][stage]
                fact = stage * microbatches + microbatch
                arrival = arrivals[need + fact] + travel
                if arrival > clock:
                    clock, waited = arrival, need + fact
                cause(waited)
                clock += receive
                begin(clock)
                clock += takes
                end(clock)
                arrivals[fact + provided] = clock
                clock += send
                continue
            receive, length, send = 0.0, 0.0, 0.0
            for stage, op, microbatch in action.parts:
                need, travel, receives, takes, sends, _ = steps[microbatch][op][stage]
                need += stage * microbatches + microbatch
                arrival = arrivals[need] + travel
                if arrival > clock:
                    clock, waited = arrival, need
                receive += receives
                length += takes
                send += sends
            clock += receive
            begin(clock)
            cause(waited)
            if overlap is not None:
                length, beside = _overlapped(overlap, action, length, clock, slices)
                carried[rank] += beside
            clock += length
            end(clock)
            for stage, op, microbatch in action.parts:
                arrivals[stage * microbatches + microbatch + steps[microbatch][op][stage][5]] = (
                    clock
                )
            clock += send
        clocks[rank] = clock
    memory, sizes = costs.memory(stages), costs.spread("boundary", stages - 1)
    links = tuple(map(tuple, carried))
    figures = memory, sizes, name, costs.unit, links, size if set(size) != {1.0} else ()
    return Timeline(rows, starts, ends, placement, microbatches, causes, *figures)


def _overlapped(
    overlap: Predict | Sequence[float], action: AnyAction, length: float, start: float, slices: int
) -> tuple[float, Sequence[Carried]]:
    """The time of an action where overlap has a cost, and what its rank's link carries
    meanwhile.
    """
    if not callable(overlap):
        return (length if len(action.parts) == 1 else overlap[action.parts[0].stage] / slices), ()
    predicted = overlap(action)
    if isinstance(predicted, Beside):
        return predicted.time, [
            Carried(start + begin, start + end, what) for begin, end, what in predicted.carried
        ]
    return (length if predicted is None else number("overlap", predicted)), ()


def _steps_of_all(
    facts: Facts, placement: Placement, costs: Costs, slices: int
) -> tuple[list[dict[str, tuple[_Step, ...]]], Sequence[float]]:
    """For each microbatch how ops run on it, and its size; computed once for equal path, load and
    size.
    """
    load, size = (costs.of_units(name, facts.microbatches, slices) for name in ("load", "size"))
    kinds = list(zip(map(placement.path_index, range(facts.microbatches)), load, size, strict=True))
    by_kind = {
        kind: _steps(facts, placement.paths[kind[0]], costs, *kind[1:]) for kind in set(kinds)
    }
    return [by_kind[kind] for kind in kinds], size


def _steps(
    facts: Facts, path: Sequence[int], costs: Costs, load: float, size: float
) -> dict[str, tuple[_Step, ...]]:
    """op -> how it runs on each stage, for microbatches with this path, load and size."""
    stages, table, times = facts.stages, facts.table, costs.times(facts.stages)
    links, transfers = costs.links(stages), costs.transfers(stages)
    sending, receiving = (costs.spread(way, stages - 1) for way in ("send", "receive"))
    users = {
        kind: -by for each in KINDS.values() for kind, by in each.needs if by
    }  # of a fact: offset of its user

    def over(each: Sequence[float], stage: int, by: int) -> float:
        """The number of the boundary between two stages; 0 where there is none or both are on one
        rank.
        """
        crossed = 0 <= stage + by < stages and path[stage + by] != path[stage]
        return each[min(stage, stage + by)] if crossed else 0.0

    def step(op: str, stage: int) -> _Step:
        by, user = KINDS[op].needs[-1][1], users.get(KINDS[op].provides[0], 0)
        travel = (
            over(links, stage, by)
            + over(sending, stage, by)
            + (size - 1) * over(transfers, stage, by)
        )
        receive, length, send = (
            over(receiving, stage, by),
            times[op][stage] * load,
            over(sending, stage, user),
        )
        return table[op][0][-1], travel, receive, length, send, table[op][1][0]

    return {op: tuple(step(op, stage) for stage in range(stages)) for op in KINDS}
