# SPDX-License-Identifier: Apache-2.0
"""Which values flow between the stages of a model, from recordings of its forward.

Stages run the whole forward of a model again, in which the units of other stages return what they
returned there. A value that a unit of this stage or a later one depends on crosses the cut, every
other one may be a blank of the same shape. This module must not know any family of models, nor how
a stage runs.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import StageError
from ._recorder import NONE, RANDOM, Labels, Recording, Value, Visit


class Flow(NamedTuple):
    """What two forwards with inputs of different sizes have in common."""

    visits: list[Visit]
    uses: Labels
    sizes: dict[
        Value | str, tuple[tuple[int, int], ...]
    ]  # of each axis in both forwards, by value or side input
    dtypes: dict[Value, torch.dtype]
    parameters: frozenset[str]  # those that the code between units reads
    draws: list[
        set[int]
    ]  # for each random draw between units in training, the calls that depend on it


def flow_of(model: nn.Module, one: Recording, other: Recording, training: Recording | None) -> Flow:
    """The flow of values of a model.

    Raises:
        StageError: if the forwards run different units.
    """
    runs = [one, other] if training is None else [one, other, training]
    ran = [[(visit.unit, visit.structure) for visit in each.visits] for each in runs]
    if any(each != ran[0] for each in ran):
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: which of its modules run, or what they "
            "return, depends on its "
            "inputs or on whether it trains; write its stages as functions"
        )
    visits = [
        visits[0]._replace(uses=_together(visit.uses for visit in visits))
        for visits in zip(*(each.visits for each in runs), strict=True)
    ]
    both = one.tensors.keys() & other.tensors.keys()
    sizes: dict[Value | str, Any] = {v: _pairs(one.tensors[v], other.tensors[v]) for v in both}
    sizes |= {
        name: _pairs(one.side[name], other.side[name])
        for name in one.side.keys() & other.side.keys()
    }
    dtypes = {value: one.tensors[value].dtype for value in both}
    read = frozenset[str]().union(*(each.parameters for each in runs))
    return Flow(
        visits, _together(each.uses for each in runs), sizes, dtypes, read, _draws(training)
    )


def _together(labels: Iterable[Labels]) -> Labels:
    """All labels but those of random numbers, which each stage draws."""
    return frozenset(
        label for each in labels for label in each if isinstance(label, str) or label.call != RANDOM
    )


def _draws(training: Recording | None) -> list[set[int]]:
    """For each random draw between units, the calls that depend on it; the result counts with the
    last.
    """
    if training is None:
        return []
    draws: dict[Value, set[int]] = {}
    for number, uses in enumerate([*(visit.uses for visit in training.visits), training.uses]):
        for value in uses:
            if isinstance(value, Value) and value.call == RANDOM:
                draws.setdefault(value, set()).add(min(number, len(training.visits) - 1))
    return list(draws.values())


def _pairs(one: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return tuple(zip(one.shape, other.shape, strict=False))


# ---- parts ----
class Part(NamedTuple):
    """The calls that one stage runs, from ``first`` to before ``stop``, and the values that it
    takes and gives.
    """

    first: int
    stop: int
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    parameters: frozenset[str]  # of the code between units


def parts_of(
    model: nn.Module, flow: Flow, inputs: int, bounds: Sequence[int], sides: Sequence[str]
) -> list[Part]:
    """The parts between the calls in ``bounds``, for a model with so many inputs.

    Raises:
        StageError: if several parts depend on the same random numbers.
    """
    if any(len({bisect(bounds, number) for number in calls}) > 1 for calls in flow.draws):
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: the code between its layers draws random "
            "numbers, and several "
            "stages need the same random numbers; cut it in eval mode, or write its stages as "
            "functions"
        )
    takes: list[tuple[Value, ...]] = [()]  # those of each part, from the last to the first
    for first in reversed(bounds):
        takes.append(tuple(sorted(_crossing(flow, inputs, first, takes[-1], sides))))
    takes = [(), *reversed(takes)]
    return [
        Part(
            first,
            stop,
            mine,
            after,
            frozenset(use for use in _uses(flow, first, stop) if isinstance(use, str)),
        )
        for first, stop, mine, after in zip(
            [0, *bounds], [*bounds, len(flow.visits)], takes, takes[1:], strict=False
        )
    ]


def _crossing(
    flow: Flow, inputs: int, first: int, later: Sequence[Value], sides: Sequence[str]
) -> set[Value]:
    """The values from before a call that it and those after it depend on, or of which no blank can
    be built.
    """
    uses = (use for use in _uses(flow, first, len(flow.visits)) if isinstance(use, Value))
    crossing = {value for value in (*later, *uses) if value.call < first}
    others = [Value(-1, leaf) for leaf in range(inputs)]
    others += [
        leaf for visit in flow.visits[:first] for leaf in visit.leaves if isinstance(leaf, Value)
    ]
    for value in others:
        if value not in crossing and blank_sizes(flow, value, crossing, sides) is None:
            crossing.add(value)
    return crossing


def _uses(flow: Flow, first: int, stop: int) -> Labels:
    """What the calls depend on; if the last is among them, the result too."""
    final = flow.uses if stop == len(flow.visits) else NONE
    return final.union(*(visit.uses for visit in flow.visits[first:stop]))


def blank_sizes(
    flow: Flow, value: Value, known: Any, sides: Sequence[str]
) -> tuple[int | tuple[Value | str, int], ...] | None:
    """The size of each axis of a value: a number, or an axis of a known value or side input; None
    if it is unknown.
    """
    result: list[int | tuple[Value | str, int]] = []
    sources = [*sorted(known), *sides]
    for one, other in flow.sizes.get(value, ((0, 1),)):
        if one == other:
            result.append(one)
            continue
        places = (
            (s, axis)
            for s in sources
            for axis, pair in enumerate(flow.sizes.get(s, ()))
            if pair == (one, other)
        )
        source = next(places, None)
        if source is None:
            return None
        result.append(source)
    return tuple(result)
