# SPDX-License-Identifier: Apache-2.0
"""How long an operation may take, from shapes alone: what the weave's scheduler plans with where nothing was measured.

Integers of nanoseconds, the same on every rank that has the same programs, so that all of them plan alike. Rough on
purpose: a weave needs to know what is long and what is short. Knows graphs and device types; no stages and no ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Rates:
    """What a device does: operations and bytes a nanosecond, bytes a nanosecond over a link, and its latency."""

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
    """What was measured of a communicator: nanoseconds before anything comes, bytes a nanosecond from then on, and how
    long its members compute where the table says 1."""

    latency: int
    speed: float
    pace: float


#: By name. Every member has the same, or none: all of them must plan alike.
LINKS: dict[str, Link] = {}
#: Operations that only look at memory otherwise, or at nothing.
_FREE = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "getitem", "split",
         "detach", "alias", "as_strided", "_unsafe_view", "split_with_sizes", "unbind", "wait_tensor"}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One collective that a program starts: the value that it brings, its kind, its members, what it carries."""

    value: str
    op: str
    members: str
    told: str  # shapes and splits, as every member must say them alike in kind
    nbytes: int
    nanoseconds: int
    device: str  # the type of what it carries
    number: int = 0  # among those of its program


def started(node: fx.Node) -> Collective | None:
    """What a node starts, if it is a functional collective."""
    if _namespace(node) != "_c10d_functional" or name_of(node) == "wait_tensor":
        return None
    value = node.meta.get("val")
    tensors = [value] if isinstance(value, torch.Tensor) else list(_tensors(value))
    given = [u.meta.get("val") for u in node.all_input_nodes]
    nbytes = max(sum(map(_bytes, tensors)), sum(map(_bytes, given)))
    rates = _rates(tensors)
    members = next((_name(a) for a in reversed(node.args) if isinstance(a, str) or hasattr(a, "group_name")), "?")
    # splits may differ from member to member; the kind, the count of axes and the dtype may not
    latency, speed, _ = LINKS.get(members) or Link(rates.latency, rates.link, 1.0)
    told = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{t.dim()} axes]" for t in tensors)
    taken = latency + int(nbytes / speed)
    return Collective(node.name, name_of(node), members, told, nbytes, taken, _kind(tensors))


def pace(device: str) -> float:
    """How long a type of device computes where the table says 1, by one product of matrices.

    Asked of the device that a program runs on: an accelerator may stand idle beside it, or be known to a build of torch
    on a machine that has none.
    """
    side, dtype = (256, torch.float32) if device == "cpu" else (4096, torch.bfloat16)
    x, best = torch.ones(side, side, dtype=dtype, device=device), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(x, x)
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e9 / (2 * side**3 / _rates([x]).flops)


def waited(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return _namespace(node) == "_c10d_functional" and name_of(node) == "wait_tensor"


def nanoseconds(node: fx.Node) -> int:
    """How long an operation keeps its device busy; starting a collective takes no time of its own here."""
    name = name_of(node)
    if name in _FREE or _namespace(node) == "_c10d_functional":
        return 0
    value = node.meta.get("val")
    tensors = list(_tensors(value))
    rates = _rates(tensors)
    moved = sum(map(_bytes, tensors)) + sum(_bytes(u.meta.get("val")) for u in node.all_input_nodes)
    return rates.launch + int(max(_flops(node, value) / rates.flops, moved / rates.memory))


def _flops(node: fx.Node, value: Any) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is None:
        return sum(t.numel() for t in _tensors(value))
    args = fx.map_arg(node.args, lambda used: used.meta.get("val"))
    kwargs = fx.map_arg(node.kwargs, lambda used: used.meta.get("val"))
    try:
        return int(count(*args, **kwargs, out_val=value))
    except Exception:  # a count that does not know these arguments: their size is a fair guess
        return prod((2, *(max(t.numel(), 1) for t in list(_tensors(value))[:1])))


def name_of(node: fx.Node) -> str:
    """The bare name of an operation, without name space and overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _namespace(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "")


def _name(members: Any) -> str:
    return members if isinstance(members, str) else members.group_name


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.dtype.itemsize for t in _tensors(value))


def _kind(tensors: list[torch.Tensor]) -> str:
    return tensors[0].device.type if tensors else "cpu"


def _rates(tensors: list[torch.Tensor]) -> Rates:
    return RATES.get(_kind(tensors), RATES["cuda"])
