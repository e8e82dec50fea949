# SPDX-License-Identifier: Apache-2.0
"""The facts that an action needs and provides, and ``Walk``, the result of a walk. At the end sets
of ops as bits of a byte, for a stage and microbatch: those that have occurred so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from .action import Action
from .action_kinds import KINDS, OPS, REQUIRED, FactKind
from .unit import unit


class Fact(NamedTuple):
    """What one action provides and others need: an output (F), the gradient of an input (I) or the
    gradients of parameters (W).
    """

    kind: FactKind
    stage: int
    microbatch: int


def provides(action: Action) -> tuple[Fact, ...]:
    """The facts that ``action`` provides.

    >>> provides(Action(2, "B", 5))
    (Fact(kind='I', stage=2, microbatch=5), Fact(kind='W', stage=2, microbatch=5))
    """
    stage, op, microbatch = action
    return tuple(Fact(kind, stage, microbatch) for kind in KINDS[op].provides)


def needs(action: Action, stages: int) -> tuple[Fact, ...]:
    """The facts that ``action`` needs before it can run, in a model of ``stages`` stages.

    Facts of other slices are left out; see :func:`needs_slice`.

    >>> needs(Action(2, "I", 5), stages=4)
    (Fact(kind='F', stage=2, microbatch=5), Fact(kind='I', stage=3, microbatch=5))
    >>> needs(Action(0, "F", 5), stages=4)
    ()
    """
    stage, op, microbatch = action
    return tuple(
        Fact(kind, stage + by, microbatch)
        for kind, by in KINDS[op].needs
        if 0 <= stage + by < stages
    )


def needs_slice(action: Action) -> Fact | None:
    """The fact of another slice that ``action`` needs. All slices of a microbatch are on one rank,
    so this concerns the order within a row alone.

    >>> from fpipe import Slice
    >>> needs_slice(Action(2, "F", Slice(3, 1, of=2)))
    Fact(kind='F', stage=2, microbatch=3.0)
    >>> needs_slice(Action(2, "F", Slice(3, 0, of=2)))
    """
    stage, op, at = action
    kind, by = KINDS[op].needs[-1]
    if not by or not 0 <= action.slice + by < action.slices:
        return None
    return Fact(kind, stage, unit(at + by, action.slices))


class Blocked(NamedTuple):
    """A rank that cannot continue: the position of its action, and the fact that this lacks."""

    rank: int
    position: int
    lacks: Fact


class Walk(NamedTuple):
    """A walk: its runs of actions, and the ranks that did not reach the end of their rows.

    ``numbers`` holds three integers for each run.
    """

    numbers: array[int]
    blocked: tuple[Blocked, ...]

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop) of each run: the positions that a rank runs without waiting."""
        numbers = iter(self.numbers)
        return zip(numbers, numbers, numbers, strict=True)

    @property
    def order(self) -> Iterator[tuple[int, int]]:
        """(rank, position) of every action that can run, each after all that it needs."""
        return (
            (rank, position) for rank, start, stop in self.runs for position in range(start, stop)
        )


# ---- sets of ops ----
#: op -> its bit in a set of ops
BIT = {op: 1 << index for index, op in enumerate(OPS)}
_SETS = range(1 << len(OPS))


def _complete(ops: int) -> bool:
    """Whether these ops provide every required fact once."""
    provided = [fact for op, bit in BIT.items() if ops & bit for fact in KINDS[op].provides]
    return sorted(fact for fact in provided if fact in REQUIRED) == sorted(REQUIRED)


def _after(op: str) -> list[int]:
    """For each set of ops, the set after ``op`` was added.

    It is 256, which does not fit into a byte, where an op of the set provided the same.
    """
    provided = set(KINDS[op].provides)
    clash = sum(bit for other, bit in BIT.items() if provided & set(KINDS[other].provides))
    return [256 if ops & clash else ops | BIT[op] for ops in _SETS]


AFTER = {op: _after(op) for op in OPS}
#: The sets of a complete stage and microbatch, with its backward and without.
TRAINED = tuple(filter(_complete, _SETS))
FORWARD = (BIT["F"],)
