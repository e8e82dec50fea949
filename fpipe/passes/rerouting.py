# SPDX-License-Identifier: Apache-2.0
"""``pipe.rerouted``: the pipeline without some ranks, whose stages have copies on other ranks.

The microbatches of a lost copy go to the other copies of its stage in turn. The remaining ranks
keep their stages, so parameters stay where they are. Actions keep the order in which they would
have started: that order agrees with all dependencies, so no rank waits for ever. Where gradients
are added in the order of microbatches, each rank also runs each kind of action in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any, TypeVar

from ..actions.action import Action, AnyAction, Placement, joined
from ..engine.config import Config
from ..engine.pipeline_base import PipelineBase
from ..errors import GroupError, StageError
from ..schedule import Schedule
from .sums import by_order

P = TypeVar("P", bound=PipelineBase[Any, Any])


def rerouted(pipe: P, without: Sequence[int]) -> P:
    """See ``PipelineBase.rerouted``."""
    config = pipe.config
    group = config.group
    lost = _checked(without, group.size)
    if config.copies is not None:
        raise StageError(
            "rerouted() of a pipeline with dp=: the other copies keep the ranks that this one "
            "loses; leave out a whole copy, as with fpipe.elastic"
        )
    schedule: Rerouted | Schedule = Rerouted(config, lost)
    route(config.placement, lost)  # raises before anything is sent
    if config.microbatches is not None:
        schedule = schedule(group.size - len(lost), config.microbatches)
    rest = [rank for rank in range(group.size) if rank not in lost]
    if lost.issuperset(group.here):
        raise GroupError(
            f"rank {group.here[0]} is not one of the ranks {rest}; only they make a group"
        )
    return type(pipe)(replace(config, schedule=schedule, group=group.part(rest)))


def _checked(without: object, ranks: int) -> frozenset[int]:
    lost = tuple(without) if isinstance(without, (list, tuple, set, frozenset)) else ()
    if not lost or any(type(rank) is not int or not 0 <= rank < ranks for rank in lost):
        raise StageError(
            f"rerouted(without={without!r}); give ranks between 0 and {ranks - 1}, as in "
            "without=[2]"
        )
    return frozenset(lost)


@dataclass(frozen=True)
class Rerouted:
    """The schedules of a pipeline without the ranks ``lost``, by number of microbatches."""

    config: Config
    lost: frozenset[int]

    def __call__(self, ranks: int, microbatches: int) -> Schedule:
        return without(self.config.schedule_for(microbatches), self.lost)


def route(placement: Placement, lost: frozenset[int]) -> Placement:
    """The placement in which copies on lost ranks get no microbatches; ranks keep their numbers.

    >>> route(Placement([[0, 3], [1, 3], [2, 3]], 4, range(3)), frozenset({2})).paths
    ((0, 3), (1, 3))
    """
    turns = []
    for stage in range(placement.stages):
        copies = [rank for rank in placement.ranks_of(stage) if rank not in lost]
        if not copies:
            held = ", ".join(map(str, placement.ranks_of(stage)))
            raise StageError(
                f"stage {stage} is on no rank but {held}; load a checkpoint "
                "into a pipeline without it, or give it copies with make_schedule(replicas=)"
            )
        turns.append(cycle(copies))
    paths = tuple(
        tuple(next(turn) if rank in lost else rank for rank, turn in zip(path, turns, strict=True))
        for path in map(placement.path, range(max(1, len(placement.route))))
    )
    return Placement(paths, placement.ranks, tuple(range(len(paths))) if placement.route else ())


def without(schedule: Schedule, lost: frozenset[int]) -> Schedule:
    """The schedule without some ranks; the others are numbered from 0 again.

    >>> from fpipe import make_schedule
    >>> print(without(make_schedule("1F1B", 3, 4, replicas=(2, 1)), frozenset({0})))
    [0F0, 0F1, 0F2, 0F3, 0B0, 0B1, 0B2, 0B3]
    [1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3, 1B3]
    """
    placement = route(schedule.placement, lost)
    rest = [rank for rank in range(schedule.ranks) if rank not in lost]
    number = {rank: new for new, rank in enumerate(rest)}
    rows: list[list[AnyAction]] = [[] for _ in rest]
    for action in _in_order(schedule):
        by_rank: dict[int, list[Action]] = {}
        for part in action.parts:
            rank = placement.rank_of(part.stage, part.microbatch)
            by_rank.setdefault(number[rank], []).append(part)
        for rank, parts in by_rank.items():
            rows[rank].append(joined(parts))
    paths = tuple(tuple(number[rank] for rank in path) for path in placement.paths)
    renumbered = Placement(paths, len(rest), placement.route)
    return Schedule(
        tuple(map(tuple, rows)),
        renumbered,
        schedule.microbatches,
        schedule.name,
        slices=schedule.slices,
    )


def _in_order(schedule: Schedule) -> list[AnyAction]:
    """All actions in an order that agrees with their dependencies: by their start.

    Where a stage adds gradients in the order of microbatches, an action comes after those of the
    same kind on lower microbatches: in place of its start stands that of the last of them.
    """
    spans = sorted(schedule.simulate(), key=lambda span: (span.start, span.rank))
    if not by_order(schedule.placement):
        return [span.action for span in spans]
    latest: dict[tuple[int, str], list[float]] = {}
    parts: list[Action] = []
    for span in spans:
        for part in span.action.parts:
            parts.append(part)
            starts = latest.setdefault((part.stage, part.op), [0.0] * schedule.microbatches)
            starts[part.whole] = span.start
    latest = {kind: list(accumulate(starts, max)) for kind, starts in latest.items()}
    parts.sort(key=lambda part: (latest[part.stage, part.op][part.whole], part.whole))
    return list[AnyAction](parts)
