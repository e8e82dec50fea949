# SPDX-License-Identifier: Apache-2.0
"""How long an operation may take, from shapes alone: what the weave's scheduler plans with where
nothing was measured.

Integers of nanoseconds, the same on every rank that has the same programs, so that all of them plan
alike. Rough on purpose: a weave needs to know what is long and what is short. Knows graphs and
device types; no stages and no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from ...programs.internals import TorchOp, is_collective, mutates, returns_views
from ...programs.operations import Operation, Value, fill
from ...tree import Aval


class Rates(NamedTuple):
    """What a device does: operations and bytes a nanosecond, nanoseconds to start a kernel, and the
    latency and the bytes a nanosecond of a link.
    """

    flops: float
    memory: float
    launch: int
    latency: int
    speed: float


#: By device type. What an accelerator of today does, and what a few cores do.
RATES: dict[str, Rates] = {
    "cpu": Rates(40.0, 8.0, 2_000, 60_000, 0.8),
    "cuda": Rates(200_000.0, 1_500.0, 3_000, 15_000, 100.0),
}


def rates_of(device: str) -> Rates:
    """The rates of a type of device."""
    return RATES.get(device, RATES["cuda"])


@dataclass(frozen=True)
class Collective:
    """One collective that a program starts: the value that it computes, its kind, its communicator,
    its size.
    """

    value: str
    op: str
    members: str
    # of the result; the dtype and the number of axes must be the same on all members, the shape not
    signature: str
    nbytes: int
    device: str  # the type of device of the result
    number: int = 0  # among those of its program

    @property
    def nanoseconds(self) -> int:
        """How long it takes."""
        rates = rates_of(self.device)
        return rates.latency + int(self.nbytes / rates.speed)


def started(one: Operation) -> Collective | None:
    """The collective that an operation starts, if it is a functional collective."""
    if not is_collective(one.target) or waited(one):
        return None
    results = _tensors(one.value)
    nbytes = max(_bytes(results), _bytes(_tensors(one.reads)))
    named = [arg for arg in one.args if isinstance(arg, str) or hasattr(arg, "group_name")]
    communicator = named[-1] if named else "?"
    members = str(getattr(communicator, "group_name", communicator))
    signature = [
        f"{str(aval.dtype).removeprefix('torch.')}[{len(aval.shape)} axes]" for aval in results
    ]
    return Collective(one.name, _name(one), members, ", ".join(signature), nbytes, _device(results))


def waited(one: Operation) -> bool:
    """Whether an operation waits for a collective."""
    return is_collective(one.target) and _name(one) == "wait_tensor"


def nanoseconds(one: Operation) -> int:
    """How long an operation keeps its device busy; to start a collective takes no time here."""
    if _is_free(one):
        return 0
    results = _tensors(one.value)
    rates = rates_of(_device(results))
    computing = _flops(one, results) / rates.flops
    moving = (_bytes(results) + _bytes(_tensors(one.reads))) / rates.memory
    return rates.launch + int(max(computing, moving))


def _is_free(one: Operation) -> bool:
    """Whether an operation computes nothing: a view, an item of a tuple, a collective."""
    if isinstance(one.target, TorchOp) and returns_views(one.target):
        return not mutates(one.target)
    return _name(one) == "getitem" or is_collective(one.target)


def _flops(one: Operation, results: list[Aval]) -> int:
    count = flop_registry.get(getattr(one.target, "overloadpacket", None))
    if count is None:
        return sum(prod(aval.shape) for aval in results)
    shapes = dict(zip(one.inputs, map(_shapes, one.reads), strict=True))
    try:
        args = fill(one.args, shapes)
        return int(count(*args, **fill(one.kwargs, shapes), out_val=_shapes(one.value)))
    except Exception:  # a formula that does not take these arguments: by the size of the result
        if results:
            return 2 * max(prod(results[0].shape), 1)
        return 2


def _shapes(value: Value) -> Any:
    """The shapes of what an operation computes, for formulas that take tensors or shapes."""
    if isinstance(value, Aval):
        return value.shape
    if value:
        return tuple(map(_shapes, value))
    return None


def _name(one: Operation) -> str:
    """The bare name of an operation, without name space and overload."""
    return str(getattr(one.target, "__name__", one.target)).partition(".")[0]


def _tensors(value: Value) -> list[Aval]:
    """The tensors of what an operation computes or reads."""
    if isinstance(value, Aval):
        return [value]
    return [aval for item in value or () for aval in _tensors(item)]


def _bytes(avals: list[Aval]) -> int:
    return sum(prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _device(results: list[Aval]) -> str:
    if results:
        return results[0].device.type
    return "cpu"
