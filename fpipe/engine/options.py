# SPDX-License-Identifier: Apache-2.0
"""Options of ``fpipe.pipeline``: their types, those that a pass owns, and a schedule that is still
to be chosen, as a pipeline sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

import torch

from ..actions.product import load_pass
from ..collectives.group import Group
from ..errors import StageError
from ..lowering.plan import Feature
from ..schedule import Schedule
from ..stage import Engine
from .copies import Copies
from .microbatches import Reduction
from .request import Request

#: How fused actions run.
Overlap: TypeAlias = Literal["weave", "sequential"]
Order: TypeAlias = Literal["row", "ready"] | tuple[Literal["ready"], int]


class Options(TypedDict, total=False):
    """The keyword arguments of ``fpipe.pipeline`` on which the type of its result does not
    depend.
    """

    microbatches: int | None
    group: Group | None
    reduction: Reduction
    seed: int | None
    frozen: Sequence[str]
    tied: Sequence[Sequence[str]]
    accumulate: torch.dtype | None
    engine: Engine
    compile: str | None
    overlap: Overlap
    dp: Copies | Group | None
    slices: int | None
    order: Order


@runtime_checkable
class Choice(Protocol):
    """A schedule that is still to be chosen, as ``fpipe.auto`` returns."""

    def bound_to(self, group: Group, stages: int, microbatches: int | None) -> Chosen:
        """What chooses it for a pipeline."""
        ...


@runtime_checkable
class Chosen(Protocol):
    """What chooses the schedule of a pipeline. ``chosen`` is by number of microbatches: the
    schedule, and why.
    """

    chosen: dict[int, tuple[Schedule, str]]

    def __call__(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule to run."""
        ...

    def estimated(
        self,
        microbatches: int,
        plans_of: Callable[[Schedule], Any],
        run: Schedule,
        latency: float,
    ) -> Schedule:
        """Choose from what the programs of all stages are expected to take."""
        ...


#: Options that a pass owns: the name of each, and the pass in ``fpipe.passes``. Its function
#: ``option(value)`` checks a value and returns an ``Option``.
PASSES: dict[str, str] = {"order": "ready.option"}


class Option(Protocol):
    """What a pass makes of an option. Its ``repr`` is what ranks compare."""

    def features(self, request: Request) -> Iterable[Feature]:
        """What it adds to the plans of a call."""
        ...


#: Options of other functions, and where they belong.
_ELSEWHERE = {
    "zero": "; give it to fpipe.copies, as in dp=fpipe.copies(group.dp, zero=1)",
    "has_aux": "; give it to fpipe.value_and_grad(pipe, ...)",
    "each": "; give it to fpipe.value_and_grad(pipe, ...)",
    "ranks": "; give a group, as in group=fpipe.local(4)",
}


def options_of(given: Mapping[str, object]) -> tuple[Option, ...]:
    """The options of passes, checked; StageError for a name that no pass has.

    >>> options_of({"overlop": 1})
    Traceback (most recent call last):
    ...
    fpipe.errors.StageError: pipeline() has no option 'overlop'; did you mean 'overlap'?
    """
    for name in given.keys() - PASSES.keys():
        near = get_close_matches(name, [*Options.__annotations__, "loss", "outputs", "schedule"], 1)
        if near:
            hint = f"; did you mean {near[0]!r}?"
        else:
            hint = _ELSEWHERE.get(name, "; see help(fpipe.pipeline)")
        raise StageError(f"pipeline() has no option {name!r}{hint}")
    return tuple(load_pass(PASSES[name]).option(value) for name, value in given.items())
