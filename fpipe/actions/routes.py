# SPDX-License-Identifier: Apache-2.0
"""The placement that rows of actions imply."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from .action import Placement, Row, refuse, unfused


def placement_of(rows: Sequence[Row]) -> Placement:
    """The placement that the rows imply.

    A stage is on the rank of its actions. If these are on several ranks, each microbatch has a
    path: the stage is on the rank of the actions of this microbatch or, if they differ, of most of
    them. ``check`` then reports the others.

    Args:
        rows: the actions of each rank, as in a ``Schedule``.

    Raises:
        ScheduleError: if a stage has no action.

    >>> from fpipe.actions.action import Action
    >>> placement_of([(Action(0, "F", 0), Action(1, "F", 1)), (Action(1, "F", 0),
    ...     Action(0, "F", 1))]).paths
    ((0, 1), (1, 0))
    """
    held = Counter((part.stage, rank) for rank, row in enumerate(rows) for part in unfused(row))
    candidates: dict[int, list[int]] = defaultdict(list)
    for (stage, rank), _ in held.most_common():
        candidates[stage].append(rank)
    stages = max(candidates, default=-1) + 1
    missing = next((stage for stage in range(stages) if stage not in candidates), None)
    if missing is not None:
        what = f"no rank holds stage {missing}, but stage {stages - 1} occurs"
        raise refuse(f"{what}; number stages from 0 without gaps")
    ranks = max(len(rows), 1)
    if all(len(ranks_held) == 1 for ranks_held in candidates.values()):
        return Placement((tuple(candidates[stage][0] for stage in range(stages)),), ranks)
    paths: dict[tuple[int, ...], int] = {}
    route = [paths.setdefault(path, len(paths)) for path in _routes(rows, candidates, stages)]
    return Placement(tuple(paths), ranks, tuple(route))


def _routes(
    rows: Sequence[Row], candidates: dict[int, list[int]], stages: int
) -> Iterator[tuple[int, ...]]:
    """The path of each microbatch. ``candidates`` are the ranks of a stage, that with most actions
    first.
    """
    votes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for part in unfused(row):
            votes[part.stage, part.microbatch][rank] += 1
    count = max(microbatch for _, microbatch in votes) + 1
    if stages * count > 100_000 + 100 * len(votes):
        what = (
            f"microbatches up to {count - 1}, but actions of only {len({m for _, m in votes})} "
            "of them"
        )
        raise refuse(f"{what}; number them from 0 without gaps")
    for microbatch in range(count):
        yield tuple(
            max(candidates[stage], key=votes[stage, microbatch].__getitem__)
            for stage in range(stages)
        )
