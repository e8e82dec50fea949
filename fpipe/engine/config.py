# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline: what ``fpipe.pipeline`` was called with, checked and frozen.

A variant of a pipeline has a ``dataclasses.replace`` of it. Knows stages, schedules and groups; no
plan and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from numbers import Integral
from os import PathLike
from threading import get_ident
from typing import Any, Literal, TypeAlias, get_args

import torch

from .. import tree
from ..actions.product import feature
from ..actions.text import counted
from ..collectives.group import Group
from ..errors import GroupError, StageError, WeaveError
from ..generators import Source, is_path, schedule_from
from ..generators.forward import forwards_alone
from ..programs.signature import loss_sides
from ..schedule import Placement, Schedule
from ..stage import MISSING, Stage
from ..tree import Tree
from .choice import Chosen
from .copies import Copies
from .microbatches import Reduction, Weighted
from .options import Option, Overlap

Outputs: TypeAlias = Literal["zeros", "everywhere", "last"]
Loss: TypeAlias = Callable[..., Any] | Stage

#: Names that a call takes itself, so that no stage can have a side input of that name.
RESERVED = frozenset({"seed", "each", "has_aux", "loss_scale"})


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

    def __post_init__(self) -> None:
        if self.sliced is not None and (type(self.sliced) is not int or self.sliced < 1):
            raise StageError(
                f"slices={self.sliced!r}; give a number of slices of a sequence, 1 or more"
            )
        for index, stage in enumerate(self.functions):
            if stage.carry or stage.initial_carry is not MISSING:
                feature("slices").check_carry(f"stage {index} ({stage.label})", stage)
        if isinstance(self.loss, Stage) and self.loss.carry:
            raise StageError(
                "the loss has carry=True, and only stages have carries; return what it needs "
                "from a stage"
            )
        if self.loss is not None and not callable(self.loss):
            raise StageError(
                f"loss={self.loss!r}; give a function loss(y, *targets) that returns a scalar, or "
                "None"
            )
        if self.reduction not in ("mean", "sum") and not isinstance(self.reduction, Weighted):
            raise StageError(
                f"reduction={self.reduction!r}; give 'mean', 'sum' or fpipe.weighted(fn)"
            )
        if self.outputs not in get_args(Outputs):
            raise StageError(f"outputs={self.outputs!r}; give 'zeros', 'everywhere' or 'last'")
        if self.overlap not in get_args(Overlap):
            raise WeaveError(f"overlap={self.overlap!r}; give 'weave' or 'sequential'")
        if self.accumulate is not None and not getattr(self.accumulate, "is_floating_point", False):
            raise StageError(
                f"accumulate={self.accumulate!r}; give a floating dtype, such as torch.float32"
            )
        check_seed(self.seed)
        if self.tied:
            feature("ties").check_frozen_alike(self.tied, self.frozen)
        if self.capture:
            feature("capture.steps").check(self.group, self.copies is not None)
        for name in {name for names in self.sides for name in names} & RESERVED:
            raise StageError(
                f"{name!r} cannot be a side input, since a call has an argument of that name; "
                "rename it"
            )

    def __repr__(self) -> str:
        name = (
            self.schedule
            if isinstance(self.schedule, str)
            else getattr(self.schedule, "name", "custom")
        )
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
    def forwards_for(self) -> Callable[[int], Schedule]:
        """The schedule of forwards alone for a number of microbatches; one that the caller gave
        keeps its order.
        """
        name = isinstance(self.schedule, str) and not is_path(self.schedule)

        def made(number):
            return (
                forwards_alone(self.schedule_for(number))
                if name
                else self.schedule_for(number).only("F")
            )

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
            got = (
                f"{len(params)} entries"
                if isinstance(params, (list, tuple))
                else f"a {type(params).__name__}"
            )
            raise StageError(
                f"params must be a list with one pytree for each of the {self.stages} stages, in "
                f"stage order; got {got}"
            )


def check_seed(seed: object) -> None:
    """Raise StageError for a seed that is no integer: the text of another value may differ between
    ranks.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise StageError(f"seed={seed!r}; give an integer, such as int(...) of it")


def _schedule_for(
    source: Source, ranks: int, stages: int, slices: int | None, microbatches: int
) -> Schedule:
    """Read or generate the schedule, and check it against the pipeline."""
    if not isinstance(source, (str, PathLike, Schedule)) and not callable(source):
        raise StageError(
            f"schedule={source!r}; give a name, a Schedule, a path to a CSV or a function (ranks, "
            "microbatches)"
        )
    schedule = schedule_from(source, ranks, microbatches, stages, slices or 1)
    if slices not in (None, schedule.slices):
        remedy = (
            f"schedule.sliced({slices})" if schedule.slices == 1 else f"slices={schedule.slices}"
        )
        raise StageError(
            f"slices={slices}, but the schedule has {counted(schedule.slices, 'slice')} a "
            f"microbatch; give {remedy}, "
            "or a name, which is made with as many"
        )
    if schedule.ranks != ranks:
        raise StageError(
            f"the schedule is for {schedule.ranks} ranks, the group has {ranks}; make both agree"
        )
    if schedule.stages != stages:
        raise StageError(
            f"the schedule runs {schedule.stages} stages, the pipeline has {stages}; give as many "
            "stages as it runs, "
            "or make_schedule(..., stages=)"
        )
    if schedule.microbatches != microbatches:
        raise StageError(
            f"the schedule is for {schedule.microbatches} microbatches, but {microbatches} are "
            "run; "
            "say microbatches= as the schedule does, or give a name or a function"
        )
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
                raise _in_use(group, other == caller)

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            del group.__dict__[_CALLER]


def _in_use(group: Group, nested: bool) -> GroupError:
    if nested:
        return GroupError(
            f"{group!r} is in use by another call of this thread, from whose stage, loss or each= "
            "this one comes; run "
            "the inner pipeline on a group of its own, or after the outer call"
        )
    return GroupError(
        f"{group!r} is in use by another thread; give each thread a group of its own, or let the "
        "threads take turns"
    )
