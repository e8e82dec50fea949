"""When would each action run, and what would each rank hold?  Costs in, a ``Timeline`` out.

Every rank runs its row in order, each action as soon as the rank is free and what the action needs has arrived. Links
have a latency and a bandwidth but no queue. The order comes from ``walk``; whether the schedule is complete is for
``check`` to say, and half a schedule can be simulated too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

from .actions import Action, Row
from .check import check_cells, stuck
from .costs import Beside, Costs, number
from .dependencies import RULE, Facts, walk
from .placement import Placement
from .spans import Carried
from .timeline import Timeline


# ---- the clock ------------------------------------------------------------------------------------------------------
class _Op(NamedTuple):
    """What an op waits for, makes and costs; whatever depends on the stage is a tuple by stage."""

    needs: tuple[tuple[int, tuple[float, ...]], ...]  # offset of a fact that it waits for, the time that this travels
    gives: tuple[int, ...]  # offsets of the facts that it makes and others wait for
    length: tuple[float, ...]
    before: tuple[float, ...]  # receiving what it needs
    after: tuple[float, ...]  # sending what it made


def simulate_rows(
    rows: tuple[Row, ...], placement: Placement, microbatches: int, costs: Costs, *, name: str = ""
) -> Timeline:
    """The timeline of these rows.

    >>> from fpipe.schedules.actions import Action
    >>> rows = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    >>> simulate_rows(rows, Placement.loop(2), 1, Costs(comm=0.5)).total
    7.0
    """
    check_cells(rows, placement, microbatches)
    stages = placement.stages
    result = walk(rows, stages, microbatches)
    if result.blocked:
        raise stuck(rows, stages, result)
    facts = Facts(stages, microbatches)
    by_path = [_table(facts, path, costs) for path in placement.paths]
    tables = [by_path[placement.path_index(microbatch)] for microbatch in range(microbatches)]
    starts, ends, causes = (tuple(array(code) for _ in rows) for code in "ddq")
    there = [0.0] * facts.size
    clocks = [0.0] * len(rows)
    fused = costs.times(stages).get("overlap")
    predict = costs.overlap if callable(costs.overlap) else None
    carried: list[list[Carried]] = [[] for _ in rows]
    for rank, first, stop in result.runs:
        lane, begin, end, cause = rows[rank], starts[rank].append, ends[rank].append, causes[rank].append
        clock = clocks[rank]
        for position in range(first, stop):
            action = lane[position]
            parts = (action,) if isinstance(action, Action) else action.parts
            waited, received, together, sent = -1, 0.0, 0.0, 0.0
            for stage, op, microbatch in parts:
                base = stage * microbatches + microbatch
                needs, _, length, before, after = tables[microbatch][op]
                for need, travel in needs:
                    arrival = there[base + need] + travel[stage]
                    if arrival > clock:
                        clock, waited = arrival, base + need
                received += before[stage]
                together += length[stage]
                sent += after[stage]
            clock += received
            begin(clock)
            cause(waited)
            if predict is not None:
                together = _predicted(predict(action), together, clock, carried[rank])
            clock += together if fused is None or len(parts) == 1 else fused[parts[0].stage]
            end(clock)
            for stage, op, microbatch in parts:
                for made in tables[microbatch][op][1]:
                    there[stage * microbatches + microbatch + made] = clock
            clock += sent
        clocks[rank] = clock
    return Timeline(
        rows, starts, ends, placement, microbatches, causes, costs.memory(stages), costs.sizes(stages), name,
        costs.unit, tuple(map(tuple, carried)),
    )  # fmt: skip


def _predicted(found: Beside | float | None, otherwise: float, start: float, carried: list[Carried]) -> float:
    """The time of an action; what its link carries is laid down."""
    if found is None:
        return otherwise
    if not isinstance(found, Beside):
        return number("overlap", found)
    carried += [Carried(start + begin, start + end, what) for begin, end, what in found.carried]
    return found.time


def _table(facts: Facts, path: Sequence[int], costs: Costs) -> dict[str, _Op]:
    """What each op waits for, makes and costs, for microbatches that take this path.

    What an action needs of its own stage was made on its own rank before it, so it never waits for that; and what
    nobody waits for need not be noted.
    """
    stages = range(facts.stages)
    links, times = costs.links(facts.stages), costs.times(facts.stages)
    send, receive = costs.handling(facts.stages)

    def over(by: int, each: Sequence[float]) -> tuple[float, ...]:
        """A number of each boundary, by the stage on its other side; 0 where both live on one rank."""
        return tuple(
            each[min(stage, stage + by)] if stage + by in stages and path[stage + by] != path[stage] else 0.0
            for stage in stages
        )

    def total(lists: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(map(sum, zip([0.0] * facts.stages, *lists, strict=True)))

    users = {(kind, -by) for _, asked in RULE.values() for kind, by in asked if by}  # of a fact: who asks for it
    table = {}
    for op, (made, asked) in RULE.items():
        needs, gives = facts.table[op]
        outward = [by for kind, by in users if kind in made]
        travel = [tuple(map(add, over(by, links), over(by, send))) for _, by in asked]
        table[op] = _Op(
            tuple((need, times_) for need, times_, (_, by) in zip(needs, travel, asked, strict=True) if by),
            tuple(offset for offset, kind in zip(gives, made, strict=True) if kind in {kind for kind, _ in users}),
            times[op],
            total(over(by, receive) for _, by in asked if by),
            total(over(by, send) for by in outward),
        )
    return table
