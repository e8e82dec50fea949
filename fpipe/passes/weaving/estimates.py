# SPDX-License-Identifier: Apache-2.0
"""How long an operation may take, from shapes alone: what the weave's scheduler plans with where
nothing was measured.

Integers of nanoseconds, the same on every rank that has the same programs, so that all of them plan
alike. Rough on purpose: a weave needs to know what is long and what is short. Knows graphs and
device types; no stages and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch.utils.flop_counter import flop_registry

from ...programs.internals import Op, mutates, returns_views
from ...programs.operations import Operation, Value, fill
from ...tree import Aval


@dataclass(frozen=True)
class Rates:
    """What a device does: operations and bytes a nanosecond, bytes a nanosecond over a link, and
    its latency.
    """

    flops: float = 40.0
    memory: float = 8.0
    link: float = 0.8
    latency: int = 60_000
    launch: int = 2_000


#: By device type. What an accelerator of today does, and what a few cores do.
RATES: dict[str, Rates] = {
    "cpu": Rates(),
    "cuda": Rates(flops=200_000.0, memory=1_500.0, link=100.0, latency=15_000, launch=3_000),
}


class Link(NamedTuple):
    """What was measured of a communicator: its latency in nanoseconds, its bytes a nanosecond."""

    latency: int
    speed: float


#: By name of the communicator. All its members have the same entry, or none: they must plan alike.
LINKS: dict[str, Link] = {}


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
        """How long it takes, by what was measured of its communicator or by the table."""
        rates = _rates(self.device)
        latency, speed = LINKS.get(self.members) or Link(rates.latency, rates.link)
        return latency + int(self.nbytes / speed)


def started(one: Operation) -> Collective | None:
    """The collective that an operation starts, if it is a functional collective."""
    if _namespace(one) != "_c10d_functional" or _name(one) == "wait_tensor":
        return None
    results = list(_tensors(one.value))
    nbytes = max(sum(map(_bytes, results)), _bytes_read(one))
    members = next(
        (a for a in reversed(one.args) if isinstance(a, str) or hasattr(a, "group_name")), "?"
    )
    members = str(getattr(members, "group_name", members))
    signature = ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{len(t.shape)} axes]" for t in results
    )
    return Collective(one.name, _name(one), members, signature, nbytes, _device(results))


def waited(one: Operation) -> bool:
    """Whether an operation waits for a collective."""
    return _namespace(one) == "_c10d_functional" and _name(one) == "wait_tensor"


def nanoseconds(one: Operation) -> int:
    """How long an operation keeps its device busy; to start a collective takes no time here."""
    if _free(one):
        return 0
    results = list(_tensors(one.value))
    rates = _rates(_device(results))
    moved = sum(map(_bytes, results)) + _bytes_read(one)
    return rates.launch + int(max(_flops(one, results) / rates.flops, moved / rates.memory))


def _free(one: Operation) -> bool:
    """Whether an operation computes nothing: a view, an item of a tuple, a collective."""
    if isinstance(one.target, Op) and returns_views(one.target):
        return not mutates(one.target)
    return _name(one) == "getitem" or _namespace(one) == "_c10d_functional"


def _flops(one: Operation, results: list[Aval]) -> int:
    count = flop_registry.get(getattr(one.target, "overloadpacket", None))
    if count is None:
        return sum(prod(each.shape) for each in results)
    shapes = dict(zip(one.inputs, map(_shapes, one.reads), strict=True))
    try:
        return int(
            count(*fill(one.args, shapes), **fill(one.kwargs, shapes), out_val=_shapes(one.value))
        )
    except (
        Exception
    ):  # a formula that does not take these arguments: the size of the result is a fair guess
        return 2 * max(prod(results[0].shape), 1) if results else 2


def _shapes(value: Value) -> Any:
    """The shapes of what an operation computes, for formulas that take tensors or shapes."""
    return value.shape if isinstance(value, Aval) else tuple(map(_shapes, value)) if value else None


def _name(one: Operation) -> str:
    """The bare name of an operation, without name space and overload."""
    return str(getattr(one.target, "__name__", one.target)).partition(".")[0]


def _namespace(one: Operation) -> str:
    return getattr(one.target, "namespace", "")


def _tensors(value: Value) -> Iterator[Aval]:
    """The tensors of what an operation computes."""
    if isinstance(value, Aval):
        yield value
    elif value is not None:
        for item in value:
            yield from _tensors(item)


def _bytes(aval: Aval) -> int:
    return prod(aval.shape) * aval.dtype.itemsize


def _bytes_read(one: Operation) -> int:
    return sum(_bytes(each) for value in one.reads for each in _tensors(value))


def _device(results: list[Aval]) -> str:
    return results[0].device.type if results else "cpu"


def _rates(device: str) -> Rates:
    return RATES.get(device, RATES["cuda"])
