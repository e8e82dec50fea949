# SPDX-License-Identifier: Apache-2.0
"""``Action``, ``Slice`` and ``Fused``, the elements of a schedule, and ``Placement``, the rank of
each stage.

Standard library only. Nothing here knows tensors or order.

    3F0                     forward of stage 3 on microbatch 0
    3I0                     gradient of the input of the stage
    3W0                     gradients of its parameters
    3B0                     both in one
    (3F1;0B0)OVERLAP_F_B    a fused action: its parts run as one and may not need each other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

from ..errors import ScheduleError
from .action_kinds import Op
from .unit import Slice


class Action(NamedTuple):
    """One piece of work: ``op`` of ``stage`` on a microbatch, or on a slice of one.

    Args:
        stage: the number of the stage.
        op: ``F`` forward, ``I`` gradient of the input, ``W`` gradients of the parameters, ``B``
            both in one.
        microbatch: the number of the microbatch, or a ``Slice`` of one.

    >>> Action(3, "F", 0), Action(3, "F", Slice(0, 1, of=2))
    (3F0, 3F0.1)
    >>> Action(3, "F", 0).op, Action(3, "F", Slice(7, 1, of=2)).whole
    ('F', 7)
    """

    stage: int
    op: Op
    microbatch: int  #: its number; where microbatches have slices, a ``Slice``

    @property
    def whole(self) -> int:
        """The number of the microbatch, also where it is one of its slices."""
        return self.microbatch.microbatch if isinstance(self.microbatch, Slice) else self.microbatch

    @property
    def slices(self) -> int:
        """The number of slices of each microbatch."""
        return self.microbatch.of if isinstance(self.microbatch, Slice) else 1

    @property
    def slice(self) -> int:
        """The number of the slice within the microbatch; 0 where there are no slices."""
        return self.microbatch.slice if isinstance(self.microbatch, Slice) else 0

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    __repr__ = __str__

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself: plain and fused actions have the same interface."""
        return (self,)


class Fused(NamedTuple):
    """Two or more actions run as one; no part needs what another part provides.

    Args:
        parts: the actions, in the order in which they are printed.

    >>> Fused((Action(0, "F", 1), Action(3, "B", 0)))
    (0F1;3B0)OVERLAP_F_B
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return "(" + ";".join(map(str, self.parts)) + ")OVERLAP_F_B"

    __repr__ = __str__


AnyAction: TypeAlias = Action | Fused
Row: TypeAlias = tuple[AnyAction, ...]
#: A schedule with so many forwards and backwards is large, and its rows are made when they are
#: read: see ``columns``.
LARGE = 1 << 16


class LazyRows(Sequence[Row]):
    """Rows whose actions are made when they are read: see ``columns``."""

    size: int


def size(rows: Sequence[Row]) -> int:
    """How many actions there are."""
    return rows.size if isinstance(rows, LazyRows) else sum(map(len, rows))


def joined(parts: Sequence[Action]) -> AnyAction:
    """The action with these parts: a lone part itself, several of them fused.

    >>> joined([Action(0, "F", 1)]), joined([Action(0, "F", 1), Action(3, "B", 0)])
    (0F1, (0F1;3B0)OVERLAP_F_B)
    """
    return parts[0] if len(parts) == 1 else Fused(tuple(parts))


def unfused(row: Iterable[AnyAction]) -> Iterator[Action]:
    """The actions of a row in order, with each fused one replaced by its parts.

    >>> list(unfused([Fused((Action(0, "F", 1), Action(1, "B", 0))), Action(0, "B", 1)]))
    [0F1, 1B0, 0B1]
    """
    for action in row:
        yield from action.parts


class Rows(NamedTuple):
    """The rows of a schedule, with what its numbers mean.

    ``units`` counts the microbatches, or all their ``slices`` where they have some.
    """

    rows: Sequence[Row]
    placement: Placement
    units: int
    slices: int = 1


#: A ScheduleError about a placement.
refuse = partial(ScheduleError, rule="placement")


@dataclass(frozen=True)
class Placement:
    """Which rank runs each stage, for each microbatch.

    A path is the rank of every stage. With one path each stage is on one rank. A stage that is on
    different ranks in different paths has replicas (DualPipe, Chimera).

    Equal placements compare equal: paths that no microbatch takes are removed, and the others are
    sorted by the first microbatch that takes them.

    Args:
        paths: ``paths[k][s]`` is the rank of stage ``s`` for the microbatches that take path ``k``.
        ranks: how many ranks there are.
        route: ``route[m]`` is the index of the path of microbatch ``m``, or of slice ``m`` of all
            slices. It is empty if there is one path.

    >>> Placement.v(2)
    Placement(0: [0, 3], 1: [1, 2])
    >>> Placement([[0, 0, 1, 1, 0]], ranks=2)
    Placement(0: [0, 1, 4], 1: [2, 3])
    """

    paths: tuple[tuple[int, ...], ...]
    ranks: int
    route: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(map(tuple, self.paths)))
        if not self.paths or not self.paths[0]:
            raise refuse("a placement needs at least one stage; give each stage a rank")
        if any(len(path) != len(self.paths[0]) for path in self.paths):
            raise refuse("every path of a placement must name a rank for each stage")
        outside = [r for path in self.paths for r in path if not 0 <= r < self.ranks]
        if outside:
            raise refuse(
                f"a placement names rank {outside[0]}, but there are ranks 0 to {self.ranks - 1}; "
                "give ranks=, or correct the rank of the stage"
            )
        if len(self.paths) > 1 and not self.route:
            raise refuse("several paths need a route: one path index per microbatch")
        if any(not 0 <= k < len(self.paths) for k in self.route):
            raise refuse("a route names a path that the placement does not have")
        index: dict[tuple[int, ...], int] = {}  # of the paths that a microbatch takes
        route = tuple(index.setdefault(self.paths[k], len(index)) for k in self.route)
        object.__setattr__(self, "paths", tuple(index) or self.paths[:1])
        object.__setattr__(self, "route", route if len(index) > 1 else ())

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
        """Stages go down the ranks, up again, down, ..., ``per_rank`` times in all.

        With two stages a rank, rank 0 holds the first and the last stage.

        Args:
            ranks: how many ranks there are.
            per_rank: how many stages each holds.

        Returns:
            The placement, as of ZBV and DualPipeV.

        >>> Placement.v(3)
        Placement(0: [0, 5], 1: [1, 4], 2: [2, 3])
        """
        down = tuple(range(ranks))
        crossings = (down if c % 2 == 0 else down[::-1] for c in range(per_rank))
        return cls((sum(crossings, ()),), ranks)

    @classmethod
    def bidirectional(cls, ranks: int, microbatches: int, up: Iterable[int]) -> Placement:
        """Stage ``s`` on rank ``s``; for the microbatches in ``up``, on rank ``ranks - 1 - s``.

        Args:
            ranks: how many ranks there are.
            microbatches: how many microbatches there are.
            up: the numbers of the microbatches that enter at the last rank.

        Returns:
            The placement, as of DualPipe and Chimera.

        >>> Placement.bidirectional(2, 4, up=[2, 3]).rank_of(0, microbatch=3)
        1
        """
        down = tuple(range(ranks))
        upwards = set(up)
        return cls((down, down[::-1]), ranks, tuple(int(m in upwards) for m in range(microbatches)))

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
            microbatch: the number of the microbatch, which decides the path.

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
        """The index of the path that a microbatch takes."""
        return self.route[microbatch % len(self.route)] if self.route else 0

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """All ranks of ``stage``, in the order of paths, without repetition.

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

        >>> Placement.bidirectional(2, 2, up=[1]).sliced(2).route
        (0, 0, 1, 1)
        """
        route = tuple(k for k in self.route for _ in range(slices))
        return Placement(self.paths, self.ranks, route)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the stages that ``rank`` holds, ascending.

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
