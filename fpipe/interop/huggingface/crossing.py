# SPDX-License-Identifier: Apache-2.0
"""Which values flow between the stages of a model, from recordings of its forward.

A value that a unit of a stage or of a later one depends on crosses the cut before the stage. Every
other one may be a blank of the same shape. This module must not know how a stage runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from ...errors import StageError
from .recording import NONE, RANDOM, Labels, Recording, Value, Visit

#: The size of an axis in two forwards with inputs of different sizes.
Sizes: TypeAlias = tuple[int, int]


class Flow(NamedTuple):
    """What forwards with inputs of different sizes have in common."""

    visits: list[Visit]
    uses: Labels  #: of the result
    sizes: dict[Value | str, tuple[Sizes, ...]]  #: of the axes of values and side inputs
    dtypes: dict[Value, torch.dtype]
    parameters: frozenset[str]  #: those that the code between units reads
    inputs: tuple[str, ...]  #: names of the arguments that the first stage gets
    sides: tuple[str, ...]  #: names of side inputs
    keywords: Mapping[str, bool]  #: further arguments


def flow_of(
    model: nn.Module,
    runs: Sequence[Recording],
    sides: Sequence[str],
    keywords: Mapping[str, bool],
) -> Flow:
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
        calls[0]._replace(uses=NONE.union(*(call.uses for call in calls)))
        for calls in zip(*(run.visits for run in runs), strict=True)
    ]
    one, other = ({**run.tensors, **run.side} for run in runs[:2])
    sizes = {
        source: tuple(zip(tensor.shape, other[source].shape, strict=False))
        for source, tensor in one.items()
    }
    return Flow(
        visits,
        NONE.union(*(run.uses for run in runs)),
        sizes,
        {value: tensor.dtype for value, tensor in runs[0].tensors.items()},
        frozenset[str]().union(*(run.read for run in runs)),
        tuple(runs[0].inputs),
        tuple(sides),
        keywords,
    )


class Part(NamedTuple):
    """The calls that one stage runs, from ``first`` to before ``stop``.

    ``receives`` and ``sends`` are the values that cross the cuts around it.
    """

    first: int
    stop: int
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]


def parts_of(model: nn.Module, flow: Flow, bounds: Sequence[int]) -> list[Part]:
    """Return the parts between the calls in ``bounds``.

    Raises:
        StageError: if several parts depend on the same random numbers.
    """
    parts = list[Part]()
    drawn = set[Value]()
    sends = tuple[Value, ...]()
    stop = len(flow.visits)
    final = flow.uses  # of the last part: the result is in it
    for first in [*reversed(bounds), 0]:
        used = final.union(*(visit.uses for visit in flow.visits[first:stop]))
        draws = {value for value in used if value.call == RANDOM}
        if not drawn.isdisjoint(draws):
            raise StageError(
                f"fpipe cannot split {type(model).__name__}: the code between its layers draws "
                "random numbers, and several stages need the same random numbers; cut it in eval "
                "mode, or write its stages as functions"
            )
        drawn |= draws
        receives = _crossing(flow, first, used.union(sends) - draws)
        parts.append(Part(first, stop, receives, sends))
        sends = receives
        stop = first
        final = NONE
    return parts[::-1]


def _crossing(flow: Flow, first: int, needed: Labels) -> tuple[Value, ...]:
    """Return the values from before a call that it and those after it need.

    They depend on them, or no blank can be built in their place: it has the axes of other values.
    """
    before = [value for value in flow.sizes if isinstance(value, Value) and value.call < first]
    crossing = set(needed.intersection(before))
    sides = (source for source in flow.sizes if isinstance(source, str))
    axis_sizes = {sizes for source in (*crossing, *sides) for sizes in flow.sizes[source]}
    for value in before:
        if not axis_sizes.issuperset(axis for axis in flow.sizes[value] if axis[0] != axis[1]):
            crossing.add(value)
            axis_sizes.update(flow.sizes[value])
    return tuple(sorted(crossing))
