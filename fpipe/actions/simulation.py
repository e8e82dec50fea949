# SPDX-License-Identifier: Apache-2.0
"""When each action would run, and what each rank would hold: from costs to a ``Timeline``.

Every rank runs its row in order. An action runs as soon as the rank is free and the facts that it
needs have arrived. Links have a latency and a bandwidth but no queue. ``dependencies.walk`` returns
the order. An incomplete schedule can be simulated too: only ``check`` asks for all actions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from .action import AnyAction, LazyRows, Placement, Row, Rows
from .action_kinds import KINDS, READERS
from .broken_rules import stuck
from .check import Inspection
from .costs import Beside, Costs, Predict, number
from .dependencies import Facts, walk
from .rule import Walk
from .timeline import Carried, Timeline

#: How an op runs on a stage. A plain tuple is unpacked three times as fast as a named one. It has:
#: - the offset of the last fact that the op needs, the only one that it can wait for;
#: - the time from the end of the action that provides this fact to its arrival;
#: - the times to receive, to run and to send;
#: - the offset of the first fact that the op provides, the only one that other stages wait for.
Step: TypeAlias = tuple[int, float, float, float, float, int]
_Columns: TypeAlias = "tuple[array[float], ...]"
#: For each rank the starts, ends and causes of its actions, and what its link carries.
Times: TypeAlias = (
    "tuple[_Columns, _Columns, tuple[array[int], ...], tuple[tuple[Carried, ...], ...]]"
)
#: From an action, its time without overlap and its start to its time, and what the link carries.
Overlap: TypeAlias = Callable[[AnyAction, float, float], tuple[float, Sequence[Carried]]]


def simulate_rows(inspected: Inspection, costs: Costs, name: str = "") -> Timeline:
    """The timeline of these rows. Costs are those of whole microbatches.

    >>> from fpipe.actions.action import Action, Rows
    >>> from fpipe.actions.check import inspect_rows
    >>> rows = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    >>> simulate_rows(inspect_rows(Rows(rows, Placement.loop(2), 1)), Costs(comm=0.5)).total
    7.0
    """
    (rows, placement, units, slices), _, walked, waves = inspected
    stages = placement.stages
    if walked.blocked:
        raise stuck(rows, stages, walked)
    facts = Facts(stages, units)
    steps = steps_of_all(facts, placement, costs, slices)
    times: Times
    if waves and not callable(costs.overlap):
        times = *waves.run(steps), ()
    else:
        if waves:
            walked = walk(rows, stages, units)
        times = _run(rows, walked, steps, facts, overlap_of(costs, stages, slices))
    return timeline_of(inspected.schedule, costs, name, times)


def timeline_of(schedule: Rows, costs: Costs, name: str, times: Times) -> Timeline:
    """The timeline of rows that ran at these times."""
    rows, placement, units, slices = schedule
    starts, ends, causes, carried = times
    sizes = costs.of_units("size", units, slices)
    return Timeline(
        rows if isinstance(rows, LazyRows) else tuple(rows),
        starts,
        ends,
        placement,
        units,
        causes,
        memory=costs.memory(placement.stages),
        boundary=costs.spread("boundary", placement.stages - 1),
        name=name,
        unit=costs.unit,
        carried=carried,
        sizes=sizes if set(sizes) != {1.0} else (),
    )


def _run(
    rows: Sequence[Row],
    walked: Walk,
    steps: Sequence[Mapping[str, Sequence[Step]]],
    facts: Facts,
    overlap: Overlap | None,
) -> Times:
    starts, ends, causes = (tuple(array(code) for _ in rows) for code in "ddq")
    append = [(s.append, e.append, c.append) for s, e, c in zip(starts, ends, causes, strict=True)]
    carried: list[list[Carried]] = [[] for _ in rows]
    arrivals = array("d", bytes(8 * facts.size))
    clocks = [0.0] * len(rows)
    microbatches = facts.microbatches
    for rank, first, stop in walked.runs:
        clock = clocks[rank]
        begin, end, cause = append[rank]
        for action in rows[rank][first:stop]:
            waited = -1
            receive = length = send = 0.0
            finished = []
            for stage, op, microbatch in action.parts:
                need, travel, receives, runs, sends, provided = steps[microbatch][op][stage]
                fact = stage * microbatches + microbatch
                finished.append(fact + provided)
                arrival = arrivals[need + fact] + travel
                if arrival > clock:
                    clock = arrival
                    waited = need + fact
                receive += receives
                length += runs
                send += sends
            clock += receive
            begin(clock)
            if overlap is not None:
                length, beside = overlap(action, length, clock)
                carried[rank] += beside
            clock += length
            for fact in finished:
                arrivals[fact] = clock
            cause(waited)
            end(clock)
            clock += send
        clocks[rank] = clock
    return starts, ends, causes, tuple(map(tuple, carried))


def overlap_of(costs: Costs, stages: int, slices: int) -> Overlap | None:
    """What the cost ``overlap`` says of an action; None where there is no such cost."""
    overlap = costs.overlap
    if not callable(overlap):
        overlap = costs.times(stages).get("overlap")
    return None if overlap is None else partial(_overlapped, overlap, slices)


def _overlapped(
    overlap: Predict | Sequence[float], slices: int, action: AnyAction, length: float, start: float
) -> tuple[float, Sequence[Carried]]:
    """The time of an action if ``overlap`` has a cost, and what the link carries meanwhile."""
    if not callable(overlap):
        if len(action.parts) > 1:
            length = overlap[action.parts[0].stage] / slices
        return length, ()
    predicted = overlap(action)
    if isinstance(predicted, Beside):
        carried = [
            Carried(start + first, start + last, what) for first, last, what in predicted.carried
        ]
        return predicted.time, carried
    return (length if predicted is None else number("overlap", predicted)), ()


def steps_of_all(
    facts: Facts, placement: Placement, costs: Costs, slices: int
) -> list[dict[str, tuple[Step, ...]]]:
    """For each microbatch the steps of ops; computed once for each path, load and size."""
    paths = map(placement.path_index, range(facts.microbatches))
    factors = (costs.of_units(name, facts.microbatches, slices) for name in ("load", "size"))
    groups = list(zip(paths, *factors, strict=True))
    steps = {
        (path, load, size): _steps(facts, placement.paths[path], costs, load, size)
        for path, load, size in set(groups)
    }
    return [steps[group] for group in groups]


def _steps(
    facts: Facts, path: Sequence[int], costs: Costs, load: float, size: float
) -> dict[str, tuple[Step, ...]]:
    """op -> its step on each stage, for microbatches with this path, load and size."""
    stages = facts.stages
    table = facts.table
    times = costs.times(facts.stages)
    sending, receiving = (costs.spread(way, stages - 1) for way in ("send", "receive"))
    travels = [a + b for a, b in zip(costs.links(stages, size), sending, strict=True)]

    def crossing(numbers: Sequence[float], stage: int, by: int) -> float:
        """The number of the boundary between two stages; 0 if there is none between ranks."""
        if 0 <= stage + by < stages and path[stage + by] != path[stage]:
            return numbers[min(stage, stage + by)]
        return 0.0

    def step(op: str, stage: int) -> Step:
        kind = KINDS[op]
        (needed, provided) = table[op]
        source = kind.needs[-1][1]
        reader = READERS.get(kind.provides[0], 0)
        return (
            needed[-1],
            crossing(travels, stage, source),
            crossing(receiving, stage, source),
            times[op][stage] * load,
            crossing(sending, stage, reader),
            provided[0],
        )

    return {op: tuple(step(op, stage) for stage in range(stages)) for op in KINDS}
