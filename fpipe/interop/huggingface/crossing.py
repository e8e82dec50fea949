# SPDX-License-Identifier: Apache-2.0
"""Which values flow between the stages of a model, from recordings of its forward.

A value that a unit of a stage or of a later one depends on crosses the cut before the stage. Every
other one may be a blank of the same shape. This module must not know how a stage runs.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import StageError
from .recording import INPUT, NONE, RANDOM, Labels, Recording, Value, Visit

#: A value, or a side input by name.
Source: TypeAlias = Value | str
#: The size of an axis: a number, or an axis of something else.
Size: TypeAlias = int | tuple[Source, int]


class Flow(NamedTuple):
    """What forwards with inputs of different sizes have in common."""

    visits: list[Visit]
    uses: Labels  #: of the result
    sizes: dict[Source, tuple[tuple[int, int], ...]]  #: of each axis in two forwards
    dtypes: dict[Value, torch.dtype]
    parameters: frozenset[str]  #: those that the code between units reads
    draws: list[set[int]]  #: for each draw between units in training, the calls that depend on it

    def used(self, first: int, stop: int) -> Labels:
        """Return what calls depend on; if the last is among them, the result too."""
        final = self.uses if stop == len(self.visits) else NONE
        return final.union(*(visit.uses for visit in self.visits[first:stop]))

    def blank_sizes(self, value: Value, known: Collection[Source]) -> list[Size] | None:
        """Return the size of each axis of a value; None if known values and side inputs do not
        tell.
        """
        result = list[Size]()
        for pair in self.sizes.get(value, ((0, 1),)):
            sources = (
                (source, axis)
                for source in known
                for axis, other in enumerate(self.sizes.get(source, ()))
                if other == pair
            )
            size = pair[0] if pair[0] == pair[1] else next(sources, None)
            if size is None:
                return None
            result.append(size)
        return result


def flow_of(model: nn.Module, runs: Sequence[Recording]) -> Flow:
    """Return the flow of values of a model, from two forwards, and perhaps one in training.

    Raises:
        StageError: if the forwards run different units.
    """
    ran = [[(visit.unit, visit.structure) for visit in run.visits] for run in runs]
    if any(calls != ran[0] for calls in ran):
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: which of its modules run, or what they "
            "return, depends on its inputs or on whether it trains; write its stages as functions"
        )
    visits = [
        calls[0]._replace(uses=_without_draws(call.uses for call in calls))
        for calls in zip(*(run.visits for run in runs), strict=True)
    ]
    one, other = ({**run.tensors, **run.side} for run in runs[:2])
    sizes = {
        source: tuple(zip(one[source].shape, other[source].shape, strict=False))
        for source in one.keys() & other.keys()
    }
    draws = dict[Value, set[int]]()
    for run in runs[2:]:
        for number, uses in enumerate([*(visit.uses for visit in run.visits), run.uses]):
            for label in uses:
                if isinstance(label, Value) and label.call == RANDOM:
                    draws.setdefault(label, set()).add(min(number, len(visits) - 1))
    return Flow(
        visits,
        _without_draws(run.uses for run in runs),
        sizes,
        {value: tensor.dtype for value, tensor in runs[0].tensors.items()},
        frozenset[str]().union(*(run.parameters for run in runs)),
        list(draws.values()),
    )


def _without_draws(labels: Iterable[Labels]) -> Labels:
    every = NONE.union(*labels)
    return frozenset(label for label in every if isinstance(label, str) or label.call != RANDOM)


class Part(NamedTuple):
    """The calls that one stage runs, from ``first`` to before ``stop``.

    ``receives`` and ``sends`` are the values that cross the cuts around it.
    """

    first: int
    stop: int
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    parameters: frozenset[str]  #: of the code between units


def parts_of(
    model: nn.Module, flow: Flow, inputs: int, bounds: Sequence[int], sides: Sequence[str]
) -> list[Part]:
    """Return the parts between the calls in ``bounds``, for a model with so many inputs.

    Raises:
        StageError: if several parts depend on the same random numbers.
    """
    if any(len({bisect(bounds, number) for number in calls}) > 1 for calls in flow.draws):
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: the code between its layers draws random "
            "numbers, and several stages need the same random numbers; cut it in eval mode, or "
            "write its stages as functions"
        )
    parts = list[Part]()
    sends, stop = tuple[Value, ...](), len(flow.visits)
    for first in [*reversed(bounds), 0]:
        receives = tuple(sorted(_crossing(flow, inputs, first, sends, sides))) if first else ()
        parameters = frozenset(use for use in flow.used(first, stop) if isinstance(use, str))
        parts.append(Part(first, stop, receives, sends, parameters))
        sends, stop = receives, first
    return parts[::-1]


def _crossing(
    flow: Flow, inputs: int, first: int, later: Sequence[Value], sides: Sequence[str]
) -> set[Value]:
    """Return the values from before a call that it and those after it need.

    They depend on them, or no blank can be built in their place.
    """
    uses = (use for use in flow.used(first, len(flow.visits)) if isinstance(use, Value))
    crossing = {value for value in (*later, *uses) if value.call < first}
    before = [Value(INPUT, leaf) for leaf in range(inputs)]
    before += [value for visit in flow.visits[:first] for value in visit.values]
    for value in before:
        if value not in crossing and flow.blank_sizes(value, [*sorted(crossing), *sides]) is None:
            crossing.add(value)
    return crossing
