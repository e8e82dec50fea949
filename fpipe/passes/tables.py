# SPDX-License-Identifier: Apache-2.0
"""Tensors that a stage function keeps from a run without data: in an ``lru_cache``, a dictionary or
an attribute.

A helper with a cache, for rotary tables or masks, first runs while its stage is traced, so what it
keeps has no data. What it computed without any input of the stage is computed again with data, and
takes the place of what it kept, which is then a constant of the trace, as where the cache was
filled before. Knows operations, no programs or schedules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils import swap_tensors

from ..errors import TraceError
from ..programs.internals import (
    Args,
    Around,
    Fake,
    Kwargs,
    Steps,
    TorchOp,
    fake_inputs,
    is_fake,
    quiet,
    tensors_in,
    without_autocast,
    written,
)
from ..programs.signature import Signature, call
from ..stage import Stage
from .blocks.outside import outside
from .explain import EAGERLY, where
from .sizes.replacing import replaced


class _Place(NamedTuple):
    """Stands for a tensor that a step returned."""

    number: int


class _Step(NamedTuple):
    """An operation to run again, with the places of the tensors that it returns."""

    op: TorchOp
    args: Args
    kwargs: Kwargs
    returns: tuple[int, ...]


def settle(steps: Steps) -> None:
    """Give data to the tensors of steps that outlive their function; ``steps`` is emptied."""
    again, kept = _without_inputs(steps)
    steps.clear()
    if all(tensor() is None for tensor in kept.values()):
        return
    with outside(), without_autocast(), torch.no_grad(), torch.inference_mode(False):
        values: dict[int, Tensor] = {}
        for op, args, kwargs, returns in again:
            args, kwargs = replaced((args, kwargs), _Place, lambda place: values[place.number])
            values.update(zip(returns, tensors_in([op(*args, **kwargs)]), strict=True))
        for number in list(kept):
            tensor = kept.pop(number)()
            if tensor is not None and number in values:
                _give(tensor, values[number])


def _without_inputs(steps: Steps) -> tuple[list[_Step], dict[int, ref[Tensor]]]:
    """The steps that need no input, and what they returned, by place."""
    places: dict[int, int] = {}  # by identity of a tensor that ``steps`` keeps alive
    tensors: dict[int, ref[Tensor]] = {}
    again: list[_Step] = []
    for op, args, kwargs, result in steps:
        given = tensors_in((*args, *kwargs.values()))
        random = torch.Tag.nondeterministic_seeded in op.tags
        if random or any(is_fake(each) and id(each) not in places for each in given):
            for tensor in tensors_in(written(op, args, kwargs)):
                places.pop(id(tensor), None)
            continue
        placed_args = _placed(args, places)  # before its results have places
        placed_kwargs = _placed(kwargs, places)
        returns = []
        for tensor in tensors_in([result]):
            returns.append(places.setdefault(id(tensor), len(tensors)))
            tensors[returns[-1]] = ref(tensor)
        again.append(_Step(op, placed_args, placed_kwargs, tuple(returns)))
    valid = set(places.values())
    return again, {number: tensor for number, tensor in tensors.items() if number in valid}


def _placed(value: Any, places: dict[int, int]) -> Any:
    """A value with places for tensors without data, and numbers for symbolic sizes."""
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
        value = replaced(value, kind, lambda symbol: symbol.node.hint)
    return replaced(value, Tensor, lambda t: _Place(places[id(t)]) if is_fake(t) else t)


def _give(tensor: Tensor, value: Tensor) -> None:
    """Make a tensor without data one with data, wherever it is kept."""
    if is_fake(tensor):  # its mode, whose run is over, refers to it weakly
        tensor.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    try:
        swap_tensors(tensor, value.clone())
    except RuntimeError:  # something else refers to it: a trace that uses it is refused
        return


def refuse(stage: Stage, signature: Signature, captured: Iterable[object]) -> None:
    """Raise TraceError where a trace captured a tensor without data."""
    modes = [value.fake_mode for value in captured if is_fake(value)]
    if not any(isinstance(mode, Fake) for mode in modes):
        return
    raise TraceError(
        f"stage {stage.label} uses a tensor without data{_use(stage, signature)}: its function "
        "kept it, in a cache, an attribute or a variable, when it ran to be traced, and its "
        "values need an input of the stage or random numbers. Remove what it kept; return it "
        "instead, pass it as an argument, compute it before the first call, or "
        f"{EAGERLY}"
    )


class _UsedError(Exception):
    """Raised at the operation that uses a tensor of another mode."""


def _use(stage: Stage, signature: Signature) -> str:
    """The line where a stage uses a tensor that an earlier run left behind."""
    mode = Fake()

    def run(op: TorchOp, args: Args, kwargs: Kwargs) -> object:
        for tensor in tensors_in((*args, *kwargs.values())):
            if is_fake(tensor) and tensor.fake_mode is not mode:
                raise _UsedError
        return op(*args, **kwargs)

    try:
        with quiet(), mode, Around(run):
            call(stage, signature, fake_inputs(signature), False)
    except Exception as error:
        return where(error)
    return ""
