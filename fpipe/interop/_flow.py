# SPDX-License-Identifier: Apache-2.0
"""Which values flow between the stages of a model, from recordings of its forward.

Stages run the whole forward of a model again, in which the units of other stages return what they returned there. A
value that a unit of this stage or a later one depends on crosses the cut, every other one may be a blank of the same
shape. This module must not know any family of models, nor how a stage runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import StageError
from ._recorder import NONE, Labels, Recording, Value, Visit


class Flow(NamedTuple):
    """What two forwards with inputs of different sizes have in common."""

    visits: list[Visit]
    uses: Labels
    sizes: dict[Value | str, tuple[tuple[int, int], ...]]  # of each axis in both forwards, by value or side input
    dtypes: dict[Value, torch.dtype]


def flow_of(model: nn.Module, one: Recording, other: Recording) -> Flow:
    """The flow of values of a model.

    Raises:
        StageError: if the two forwards run different units.
    """
    if [(v.unit, v.structure) for v in one.visits] != [(v.unit, v.structure) for v in other.visits]:
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: which of its modules run depends on its inputs; "
            "write its stages as functions"
        )
    visits = [a._replace(uses=a.uses | b.uses) for a, b in zip(one.visits, other.visits, strict=True)]
    both = one.tensors.keys() & other.tensors.keys()
    sizes: dict[Value | str, Any] = {v: _pairs(one.tensors[v], other.tensors[v]) for v in both}
    sizes |= {name: _pairs(one.side[name], other.side[name]) for name in one.side.keys() & other.side.keys()}
    dtypes = {value: one.tensors[value].dtype for value in both}
    return Flow(visits, one.uses | other.uses, sizes, dtypes)


def _pairs(one: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return tuple(zip(one.shape, other.shape, strict=False))


# ---- parts -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The calls that one stage runs, from ``first`` to before ``stop``, and the values that it takes and gives."""

    first: int
    stop: int
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    parameters: frozenset[str]  # of the code between units


def parts_of(flow: Flow, inputs: int, bounds: Sequence[int], sides: Sequence[str], later: bool) -> list[Part]:
    """The parts between the calls in ``bounds``. ``later``: a stage needs blanks for the units after it, too."""
    takes: list[tuple[Value, ...]] = [()]  # those of each part, from the last to the first
    stops = [*bounds, len(flow.visits)]
    needed: set[Value] = set()
    for first in reversed(bounds):
        crossing = {v for v in needed if v.call < first}
        crossing |= {v for v in _uses(flow, first, len(flow.visits)) if isinstance(v, Value) and v.call < first}
        end = len(flow.visits) if later else first
        everything = [Value(-1, leaf) for leaf in range(inputs)]
        everything += [leaf for visit in flow.visits[:end] for leaf in visit.leaves if isinstance(leaf, Value)]
        for value in everything:
            if value.call < first and value not in crossing and not blank_sizes(flow, value, crossing, sides):
                crossing.add(value)
        needed = crossing
        takes.append(tuple(sorted(crossing)))
    takes = [(), *reversed(takes[1:]), ()]
    firsts = [0, *bounds]
    return [
        Part(first, stop, mine, after, frozenset(use for use in _uses(flow, first, stop) if isinstance(use, str)))
        for first, stop, mine, after in zip(firsts, stops, takes[:-1], takes[1:], strict=True)
    ]


def _uses(flow: Flow, first: int, stop: int) -> Labels:
    """What the calls depend on; if the last is among them, the result too."""
    final = flow.uses if stop == len(flow.visits) else NONE
    return final.union(*(visit.uses for visit in flow.visits[first:stop]))


def blank_sizes(
    flow: Flow, value: Value, known: Any, sides: Sequence[str]
) -> tuple[int | tuple[Value | str, int], ...] | None:
    """The size of each axis of a value: a number, or an axis of a known value or side input; None if it is unknown."""
    result: list[int | tuple[Value | str, int]] = []
    sources = [*sorted(known), *sides]
    for one, other in flow.sizes.get(value, ((0, 1),)):
        if one == other:
            result.append(one)
            continue
        places = ((s, axis) for s in sources for axis, pair in enumerate(flow.sizes.get(s, ())) if pair == (one, other))
        source = next(places, None)
        if source is None:
            return None
        result.append(source)
    return tuple(result)
