# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline: the arguments of ``fpipe.pipeline``, frozen, and what follows
from them.

A variant of a pipeline has a ``dataclasses.replace`` of the configuration. Knows stages, schedules
and groups; no plan and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import get_ident
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch

from .. import tree
from ..collectives.group import Group
from ..errors import GroupError, StageError
from ..generators import ScheduleSource, schedule_from
from ..programs.signature import loss_sides
from ..schedule import Placement, Schedule
from ..stage import MISSING, Stage
from ..tree import Tree
from . import mistakes
from .copies import Copies
from .microbatches import Reduction
from .options import Chosen, Option, Overlap

#: What ranks without the last stage return where there is no loss.
Outputs: TypeAlias = Literal["zeros", "everywhere", "last"]
#: A function of the output of the last stage and of targets, or a stage of one.
Loss: TypeAlias = Callable[..., Any] | Stage


@dataclass(frozen=True, eq=False, repr=False)
class Config:
    """Everything that a pipeline is built from."""

    functions: tuple[Stage, ...]
    schedule: ScheduleSource  # a name, a Schedule, the path of a CSV file or a function
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
    requested_slices: int | None = None  # None: as many as the schedule has
    capture: bool = False
    more: tuple[Option, ...] = ()  # the options of passes

    def __repr__(self) -> str:
        return f"<fpipe pipeline: {self.title}, {self.group!r}>"

    @property
    def title(self) -> str:
        """The number of stages and the schedule, as text."""
        schedule = self.schedule
        name = schedule if isinstance(schedule, str) else getattr(schedule, "name", "custom")
        if self.choice is not None:
            name = "auto"
        return f"{self.stages} stages, schedule {name}"

    # ---- what follows from the arguments ----
    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.functions)

    @cached_property
    def pipeline_id(self) -> object:
        """A key for caches that no other pipeline has, and that keeps nothing of this one alive."""
        return object()

    @cached_property
    def choice(self) -> Chosen | None:
        """The schedule, where it is an automatic choice. To ask a protocol takes long, so each call
        reads this.
        """
        return self.schedule if isinstance(self.schedule, Chosen) else None

    @cached_property
    def needs_no_check(self) -> bool:
        """Whether no argument needs a check: the schedule is a name, the loss a function, and
        options have their defaults.
        """
        named = isinstance(self.schedule, str)
        plain_loss = self.loss is None or isinstance(self.loss, FunctionType)
        carries = any(stage.carry or stage.initial_carry is not MISSING for stage in self.functions)
        defaults = all(getattr(self, name) == getattr(Config, name) for name in CHECKED)
        return named and plain_loss and defaults and not carries and not any(self.sides)

    @cached_property
    def stateful(self) -> bool:
        """Whether a stage carries state."""
        return any(stage.state for stage in self.functions)

    @cached_property
    def carries(self) -> bool:
        """Whether a stage passes a carry from slice to slice."""
        return any(stage.carry for stage in self.functions)

    @cached_property
    def slices(self) -> int:
        """The number of slices of a microbatch: ``slices=``, or that of the schedule."""
        if self.requested_slices is not None:
            return self.requested_slices
        return self._any_schedule.slices

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """The names of the side inputs of every stage, and of the loss at the end."""
        return (*(stage.sides for stage in self.functions), loss_sides(self.loss))

    @cached_property
    def schedule_for(self) -> Callable[[int], Schedule]:
        """Returns the checked schedule for a number of microbatches, and generates each once.

        An automatic choice may change, so its schedules are not cached.
        """
        generate = partial(
            _schedule_for, self.schedule, self.group.size, self.stages, self.requested_slices
        )
        if self.choice is not None:
            return generate
        return lru_cache(maxsize=None)(generate)

    @cached_property
    def placement(self) -> Placement:
        """Which ranks hold which stages. It is the same for any number of microbatches."""
        return self._any_schedule.placement

    @property
    def _any_schedule(self) -> Schedule:
        """The schedule for the pipeline's number of microbatches or, without one, for some number
        that every schedule takes.
        """
        number = 2 * self.group.size if self.microbatches is None else self.microbatches
        return self.schedule_for(number)

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

    def claim(self) -> AbstractContextManager[None]:
        """Keeps other calls from the groups of this pipeline while a call runs."""
        if self.copies is None:
            return claimed(self.group)
        return claimed(self.group, self.copies.group)

    @property
    def device(self) -> torch.device:
        """The device of the first rank of this process."""
        return self.group.device(self.group.here[0])

    def rank_here(self, stage: int) -> int:
        """The first rank of this process that holds a stage."""
        return next(r for r in self.placement.ranks_of(stage) if r in self.group.here)

    def trained(self, stage: int, params: Tree) -> list[bool]:
        """Whether each leaf of a stage's parameters is trained: no pattern of ``frozen`` matches
        its name.
        """
        if not self.frozen:
            return [True] * len(tree.leaves(params))
        return [not tree.matches(f"{stage}.{name}", self.frozen) for name in tree.names(params)]

    def check_params(self, params: Sequence[Tree]) -> None:
        """Raise StageError unless params has one entry for each stage."""
        is_list = isinstance(params, (list, tuple))
        if not is_list or len(params) != self.stages:
            got = f"{len(params)} entries" if is_list else f"a {type(params).__name__}"
            raise StageError(
                f"params must be a list with one pytree for each of the {self.stages} stages, in "
                f"stage order; got {got}"
            )


#: Options whose defaults need no check.
CHECKED = ("requested_slices", "reduction", "seed", "tied", "outputs", "accumulate", "overlap")


def _schedule_for(
    source: ScheduleSource, ranks: int, stages: int, slices: int | None, microbatches: int
) -> Schedule:
    """Read or generate the schedule, and check it against the pipeline."""
    schedule = schedule_from(source, ranks, microbatches, stages, slices or 1)
    expected = (ranks, stages, microbatches, slices or schedule.slices)
    sizes = (schedule.ranks, schedule.stages, schedule.microbatches, schedule.slices)
    if sizes != expected:
        raise mistakes.wrong_schedule(schedule, *expected)
    return schedule.check()


# ---- one call at a time ----
#: The attribute of a group that identifies the thread whose call uses it.
_CALLER = "caller"


@contextmanager
def claimed(*groups: Group) -> Iterator[None]:
    """Reserve groups for the length of a ``with`` block.

    Raises GroupError where one of them is in use.

    >>> from fpipe import local
    >>> group = local(2)
    >>> with claimed(group), claimed(group):
    ...     pass
    Traceback (most recent call last):
    ...
    fpipe.errors.GroupError: fpipe.local(2) on cpu is in use by another call of this thread...
    """
    caller = (get_ident(),)  # equal in all calls of a thread, and identical in this one alone
    reserved: list[Group] = []
    try:
        for group in groups:
            # ``setdefault`` is one step that no other thread interrupts.
            user = group.__dict__.setdefault(_CALLER, caller)
            if user is not caller:
                who = "another thread; give each thread a group of its own, or let the threads "
                who += "take turns"
                if user == caller:
                    who = (
                        "another call of this thread, from whose stage, loss or each= this one "
                        "comes; run the inner pipeline on a group of its own, or after the outer "
                        "call"
                    )
                raise GroupError(f"{group!r} is in use by {who}")
            reserved.append(group)
        yield
    finally:
        for group in reserved:
            del group.__dict__[_CALLER]
