# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline: what ``fpipe.pipeline`` was called with, checked and frozen.

A variant of a pipeline has a ``dataclasses.replace`` of it. Knows stages, schedules and groups; no
plan and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import get_ident
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch

from .. import tree
from ..collectives.group import Group
from ..generators import Source, is_path, schedule_from
from ..programs.signature import loss_sides
from ..schedule import Placement, Schedule
from ..stage import MISSING, Stage
from ..tree import Tree
from . import mistakes
from .choice import Chosen
from .copies import Copies
from .microbatches import Reduction
from .options import Option, Overlap

Outputs: TypeAlias = Literal["zeros", "everywhere", "last"]
Loss: TypeAlias = Callable[..., Any] | Stage


@dataclass(frozen=True, eq=False, repr=False)
class Config:
    """Everything that a pipeline is built from. ``schedule`` is a name, a Schedule, a CSV file or a
    function.
    """

    functions: tuple[Stage, ...]
    schedule: Source
    group: Group
    loss: Loss | None = None
    microbatches: int | None = None
    reduction: Reduction = "mean"
    seed: int | None = None
    frozen: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    outputs: Outputs = "zeros"
    accumulate: torch.dtype | None = None
    overlap: Overlap = "weave"
    copies: Copies | None = None
    sliced: int | None = None
    capture: bool = False
    more: tuple[Option, ...] = ()  # those of passes

    def __repr__(self) -> str:
        name = getattr(self.schedule, "name", "custom")
        name = self.schedule if isinstance(self.schedule, str) else name
        name = "auto" if isinstance(self.schedule, Chosen) else name
        return f"<fpipe pipeline: {self.stages} stages, schedule {name}, {self.group!r}>"

    # ---- what follows from it ----
    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.functions)

    @cached_property
    def identity(self) -> object:
        """What is of this pipeline alone, and keeps nothing of it alive."""
        return object()

    @cached_property
    def plain(self) -> bool:
        """Whether there is nothing to check: options that are not given, plain functions, and the
        name of a schedule.
        """
        given = any(getattr(self, name) != default for name, default in DEFAULTS.items())
        special = any(stage.initial_carry is not MISSING for stage in self.functions)
        function = self.loss is None or isinstance(self.loss, FunctionType)
        named = isinstance(self.schedule, str) and function
        return named and not (given or special or self.carries or any(self.sides))

    @cached_property
    def stateful(self) -> bool:
        """Whether a stage carries state."""
        return any(stage.state for stage in self.functions)

    @cached_property
    def carries(self) -> bool:
        """Whether a stage carries something from slice to slice."""
        return any(stage.carry for stage in self.functions)

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch: ``slices=``, or that of the schedule."""
        if self.sliced is None and isinstance(self.schedule, str) and not is_path(self.schedule):
            return 1
        return self.sliced or self._some_schedule.slices

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """The names of the side inputs of every stage, and of the loss at the end."""
        return (*(stage.sides for stage in self.functions), loss_sides(self.loss))

    @cached_property
    def schedule_for(self) -> Callable[[int], Schedule]:
        """The checked schedule for a number of microbatches; each is generated once."""
        made = partial(_schedule_for, self.schedule, self.group.size, self.stages, self.sliced)
        return made if isinstance(self.schedule, Chosen) else lru_cache(maxsize=None)(made)

    @cached_property
    def placement(self) -> Placement:
        """Which ranks hold which stages, whatever the number of microbatches."""
        return self._some_schedule.placement

    @property
    def _some_schedule(self) -> Schedule:
        return self.schedule_for(
            2 * self.group.size if self.microbatches is None else self.microbatches
        )

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The stages on the ranks of this process."""
        ranks = set(self.group.here)
        return tuple(
            s for s in range(self.stages) if not ranks.isdisjoint(self.placement.ranks_of(s))
        )

    @cached_property
    def local(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self.group.here) == self.group.size

    @cached_property
    def claim(self) -> Claim:
        """The groups that a call uses, for the length of the call."""
        return Claim(self.group) if self.copies is None else Claim(self.group, self.copies.group)

    @property
    def device(self) -> torch.device:
        """The device of the first rank of this process."""
        return self.group.device(self.group.here[0])

    def rank_here(self, stage: int) -> int:
        """The first rank of this process that holds a stage."""
        return next(r for r in self.placement.ranks_of(stage) if r in self.group.here)

    def trained(self, stage: int, params: Tree) -> list[bool]:
        """Which leaves of a stage's parameters no pattern of ``frozen`` names."""
        if not self.frozen:
            return [True] * len(tree.leaves(params))
        return [not tree.matches(f"{stage}.{name}", self.frozen) for name in tree.names(params)]

    def check_params(self, params: Sequence[Tree]) -> None:
        """Raise StageError where params is not one entry per stage."""
        if not isinstance(params, (list, tuple)) or len(params) != self.stages:
            raise mistakes.wrong_params(params, self.stages)


#: The values of options that need no check.
DEFAULTS = {
    "sliced": None,
    "reduction": "mean",
    "seed": None,
    "tied": (),
    "outputs": "zeros",
    "accumulate": None,
    "overlap": "weave",
}


def _schedule_for(
    source: Source, ranks: int, stages: int, slices: int | None, microbatches: int
) -> Schedule:
    """Read or generate the schedule, and check it against the pipeline."""
    schedule = schedule_from(source, ranks, microbatches, stages, slices or 1)
    wanted = (ranks, stages, microbatches, slices or schedule.slices)
    if (schedule.ranks, schedule.stages, schedule.microbatches, schedule.slices) != wanted:
        raise mistakes.wrong_schedule(schedule, *wanted)
    return schedule.check()


# ---- one call at a time ----
#: The attribute of a group that holds the thread of its call, set in one step that no other thread
#: interrupts.
_CALLER = "caller"


class Claim:
    """Groups for the length of a ``with`` block; raises GroupError where one of them is in use.

    >>> from fpipe import local
    >>> group = local(2)
    >>> with Claim(group):
    ...     with Claim(group):
    ...         pass
    Traceback (most recent call last):
    ...
    fpipe.errors.GroupError: fpipe.local(2) on cpu is in use by another call of this thread...
    """

    __slots__ = ("groups",)

    def __init__(self, *groups: Group):
        self.groups = groups

    def __enter__(self) -> None:
        caller = (get_ident(),)
        for group in self.groups:
            other = group.__dict__.setdefault(_CALLER, caller)
            if other is not caller:
                for taken in self.groups[: self.groups.index(group)]:
                    del taken.__dict__[_CALLER]
                raise mistakes.in_use(group, other == caller)

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            del group.__dict__[_CALLER]
