# SPDX-License-Identifier: Apache-2.0
"""``Placement``: which rank runs each stage, for each microbatch. It knows actions, not the order
in which they run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ..errors import ScheduleError
from .action import Row, plain

_refuse = partial(ScheduleError, rule="placement")


@dataclass(frozen=True)
class Placement:
    """Which rank runs each stage, for each microbatch.

    With one path each stage is on one rank. A stage that is on different ranks in different paths
    has replicas (DualPipe, Chimera). Paths that no microbatch takes are removed, and the others are
    sorted by the first microbatch that takes them, so that equal placements compare equal.

    Args:
        paths: ``paths[k][s]`` is the rank that runs stage ``s`` for the microbatches of route
            ``k``.
        ranks: how many ranks there are.
        route: ``route[m]`` is the path of microbatch ``m``, or of slice ``m`` of all; empty where
            there is one path.

    >>> Placement.v(2)
    Placement(0: [0, 3], 1: [1, 2])
    >>> Placement.of([[0, 1, 4], [2, 3]]).rank_of(4)
    0
    """

    paths: tuple[tuple[int, ...], ...]
    ranks: int
    route: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(map(tuple, self.paths)))
        if not self.paths or not self.paths[0]:
            raise _refuse("a placement needs at least one stage; give each stage a rank")
        if any(len(path) != len(self.paths[0]) for path in self.paths):
            raise _refuse("every path of a placement must name a rank for each stage")
        bad = [r for path in self.paths for r in path if not 0 <= r < self.ranks]
        if bad:
            remedy = "give ranks=, or correct the rank of the stage"
            raise _refuse(
                f"a placement names rank {bad[0]}, but there are ranks 0 to {self.ranks - 1}; "
                f"{remedy}"
            )
        if len(self.paths) > 1 and not self.route:
            raise _refuse("several paths need a route: one path index per microbatch")
        if any(not 0 <= k < len(self.paths) for k in self.route):
            raise _refuse("a route names a path that the placement does not have")
        taken: dict[tuple[int, ...], int] = {}
        route = tuple(taken.setdefault(self.paths[k], len(taken)) for k in self.route)
        object.__setattr__(self, "paths", tuple(taken) or self.paths[:1])
        object.__setattr__(self, "route", route if len(taken) > 1 else ())

    # ---- constructors ----
    @classmethod
    def loop(cls, ranks: int, per_rank: int = 1) -> Placement:
        """Stage ``s`` on rank ``s % ranks``.

        Args:
            ranks: how many ranks there are.
            per_rank: how many stages each holds.

        Returns:
            The placement, as of 1F1B and Interleaved1F1B.

        >>> Placement.loop(2, 2)
        Placement(0: [0, 2], 1: [1, 3])
        """
        return cls((tuple(s % ranks for s in range(ranks * per_rank)),), ranks)

    @classmethod
    def v(cls, ranks: int, per_rank: int = 2) -> Placement:
        """Down the ranks and up again, ``per_rank`` times in all: rank 0 holds the first and, for
        2, the last stage.

        Args:
            ranks: how many ranks there are.
            per_rank: how many stages each holds.

        Returns:
            The placement, as of ZBV and DualPipeV.

        >>> Placement.v(3)
        Placement(0: [0, 5], 1: [1, 4], 2: [2, 3])
        """
        down = tuple(range(ranks))
        return cls((sum((down if c % 2 == 0 else down[::-1] for c in range(per_rank)), ()),), ranks)

    @classmethod
    def of(cls, stages_by_rank: Sequence[Iterable[int]]) -> Placement:
        """From the stages that each rank holds, each stage on exactly one.

        Args:
            stages_by_rank: for each rank, its stages.

        Returns:
            The placement.

        Raises:
            ScheduleError: if a stage is missing or on two ranks.

        >>> Placement.of([[0, 3], [1, 2]]) == Placement.v(2)
        True
        """
        rank_of: dict[int, int] = {}
        for rank, held in enumerate(stages_by_rank):
            for stage in held:
                if stage in rank_of:
                    remedy = (
                        "place it on one rank, or build Placement(paths, ranks, route) for replicas"
                    )
                    raise _refuse(
                        f"stage {stage} is on rank {rank_of[stage]} and on rank {rank}; {remedy}"
                    )
                rank_of[stage] = rank
        missing = sorted(set(range(max(rank_of, default=-1) + 1)) - set(rank_of))
        if missing:
            raise _refuse(f"no rank holds stage {missing[0]}; give every stage a rank")
        return cls((tuple(rank_of[s] for s in sorted(rank_of)),), len(stages_by_rank))

    @classmethod
    def bidirectional(
        cls, ranks: int, microbatches: int, up: Iterable[int], per_rank: int = 1
    ) -> Placement:
        """Stages as in ``v(ranks, per_rank)`` and, for the microbatches in ``up``, with the ranks
        the other way round.

        Args:
            ranks: how many ranks there are.
            microbatches: how many microbatches there are.
            up: the microbatches that enter at the last rank.
            per_rank: how many stages each rank holds for one direction.

        Returns:
            The placement, as of DualPipe and Chimera, and of BitPipe for 2 or more stages a rank.

        >>> Placement.bidirectional(2, 4, up=[2, 3]).rank_of(0, microbatch=3)
        1
        """
        (down,), upwards = cls.v(ranks, per_rank).paths, set(up)
        other = tuple(ranks - 1 - rank for rank in down)
        return cls((down, other), ranks, tuple(int(m in upwards) for m in range(microbatches)))

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> Placement:
        """The placement that the rows imply.

        A stage is on the rank of its actions. If these are on several ranks, each microbatch has
        its own rank: that of its actions or, if they differ, of most of them (``check`` then
        reports the others).

        Args:
            rows: the actions of each rank, as in a ``Schedule``.

        Returns:
            The placement.

        Raises:
            ScheduleError: if a stage has no action.

        >>> from fpipe.actions.action import Action
        >>> Placement.from_rows([(Action(0, "F", 0), Action(1, "F", 1)), (Action(1, "F", 0),
        ...     Action(0, "F", 1))]).paths
        ((0, 1), (1, 0))
        """
        held = Counter((part.stage, rank) for rank, row in enumerate(rows) for part in plain(row))
        candidates: dict[int, list[int]] = defaultdict(list)
        for (stage, rank), _ in held.most_common():
            candidates[stage].append(rank)
        stages = max(candidates, default=-1) + 1
        missing = next((stage for stage in range(stages) if stage not in candidates), None)
        if missing is not None:
            what = f"no rank holds stage {missing}, but stage {stages - 1} occurs"
            raise _refuse(f"{what}; number stages from 0 without gaps")
        ranks = max(len(rows), 1)
        if all(len(ranks_held) == 1 for ranks_held in candidates.values()):
            return cls((tuple(candidates[stage][0] for stage in range(stages)),), ranks)
        paths: dict[tuple[int, ...], int] = {}
        route = [paths.setdefault(path, len(paths)) for path in _routes(rows, candidates, stages)]
        return cls(tuple(paths), ranks, tuple(route))

    # ---- questions ----
    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.paths[0])

    @property
    def replicated(self) -> bool:
        """Whether any stage is on more than one rank."""
        return len(self.paths) > 1

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs ``stage`` for ``microbatch``.

        Args:
            stage: the number of the stage.
            microbatch: which of several paths counts.

        Returns:
            The rank.

        >>> Placement.v(2).rank_of(3)
        0
        """
        return self.path(microbatch)[stage]

    def path(self, microbatch: int) -> tuple[int, ...]:
        """The rank of every stage, for one microbatch.

        Args:
            microbatch: the number of the microbatch.

        Returns:
            One rank for each stage.

        >>> Placement.v(2).path(0)
        (0, 1, 1, 0)
        """
        return self.paths[self.path_index(microbatch)]

    def path_index(self, microbatch: int) -> int:
        """Which of ``paths`` a microbatch takes."""
        return self.route[microbatch % len(self.route)] if self.route else 0

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """All ranks of ``stage``, in path order, each once.

        Args:
            stage: the number of the stage.

        Returns:
            The ranks: more than one where the stage has replicas.

        >>> Placement.v(2).ranks_of(3)
        (0,)
        """
        return tuple(dict.fromkeys(path[stage] for path in self.paths))

    def sliced(self, slices: int) -> Placement:
        """The placement of the slices of microbatches: all slices of a microbatch take its path.

        Args:
            slices: how many slices each microbatch has.

        Returns:
            The placement.

        >>> Placement.bidirectional(2, 2, up=[1]).sliced(2).route
        (0, 0, 1, 1)
        """
        return Placement(
            self.paths, self.ranks, tuple(k for k in self.route for _ in range(slices))
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending.

        Args:
            rank: the rank.

        Returns:
            Numbers of stages.

        >>> Placement.v(2).stages_of(0)
        (0, 3)
        """
        return self._held[rank]

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        held: list[set[int]] = [set() for _ in range(self.ranks)]
        for path in self.paths:
            for stage, rank in enumerate(path):
                held[rank].add(stage)
        return tuple(tuple(sorted(stages)) for stages in held)

    def __repr__(self) -> str:
        inside = ", ".join(f"{rank}: {list(stages)}" for rank, stages in enumerate(self._held))
        return f"Placement({inside})"


def _routes(
    rows: Sequence[Row], candidates: dict[int, list[int]], stages: int
) -> Iterator[tuple[int, ...]]:
    """The rank of every stage, by microbatch. ``candidates`` are a stage's ranks, that with most
    actions first.
    """
    votes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for part in plain(row):
            votes[part.stage, part.microbatch][rank] += 1
    count = max(microbatch for _, microbatch in votes) + 1
    if stages * count > 100_000 + 100 * len(votes):
        what = (
            f"microbatches up to {count - 1}, but actions of only {len({m for _, m in votes})} "
            "of them"
        )
        raise _refuse(f"{what}; number them from 0 without gaps")
    for microbatch in range(count):
        yield tuple(
            max(candidates[stage], key=votes[stage, microbatch].__getitem__)
            for stage in range(stages)
        )
