# SPDX-License-Identifier: Apache-2.0
"""The key-value store of torch.distributed, and the only uses of its private names in this
package.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

from ..errors import GroupError
from .codec import MOST_BYTES, decode, encode

Store: TypeAlias = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # the documentation names it so


def default_store() -> Store:
    """The store of the default process group."""
    return _get_default_store()


def prefixed(prefix: str, store: Store) -> Store:
    """The same store, in which every key has a prefix."""
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def connection(store: Store, timeout: timedelta) -> Store:
    """A separate connection to the same store with a separate time-out; the store itself if it has
    no connections.
    """
    clone = getattr(store, "clone", None)
    try:
        store = store if clone is None else clone()
        store.set_timeout(timeout)
    except (RuntimeError, NotImplementedError):  # a store in memory
        pass
    return store


def set_timeout(pg: dist.ProcessGroup, seconds: float) -> None:
    """The time-out of a process group for operations that are started from now on."""
    # public since torch 2.15, where the private one warns
    public = getattr(distributed_c10d, "set_timeout", None)
    (public or distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), pg)


def _resolved(name: Any) -> dist.ProcessGroup:
    return _resolve_process_group(name)


def name_of(pg: dist.ProcessGroup) -> str:
    """The name of a process group; empty for one that torch.distributed did not create."""
    try:
        return pg.group_name
    except RuntimeError:
        return ""


def members(name: str) -> list[int]:
    """The global ranks of a process group."""
    return dist.get_process_group_ranks(_resolved(name))


def gather_members(name: str, obj: object) -> list[Any] | None:
    """The object of every member of a process group, by rank; None if there is no other member, or
    a fake backend.

    Objects are data, as those of a ``Rendezvous``.
    """
    pg = _resolved(name)
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        return None
    device = _device(pg)
    mine = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(pg.size())]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=pg)
    counts = [int(size) for size in sizes]
    if min(counts) <= 0 or max(counts) > MOST_BYTES:
        raise GroupError(
            f"the members of group {name} announced {counts} bytes; all must run the same program"
        )
    rows = [torch.empty(max(counts), dtype=torch.uint8, device=device) for _ in counts]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, max(counts) - len(mine))), group=pg)
    return [decode(bytes(row[:count].tolist())) for row, count in zip(rows, counts, strict=True)]


def _device(pg: dist.ProcessGroup) -> torch.device:
    """A device whose tensors a process group carries: the CPU if it can."""
    types = list(backends(pg))
    return (
        torch.device("cpu")
        if "cpu" in types
        else torch.device(types[0], torch.accelerator.current_device_index())
    )


def backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """device type -> backend, of ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""
    config = dist.get_backend_config(pg)
    pairs = [part.split(":") for part in config.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        return dict.fromkeys(dist.Backend.backend_capability.get(config, ["cpu"]), config)
    return dict(pairs)


_TIMED = 4  #: exchanges that are timed together


def time_members(name: str, nbytes: int, device: str) -> float:
    """Seconds that one exchange of so many bytes takes between all members of a process group; all
    must call this.

    The average of several exchanges without a pause, as in a step: over one connection the two
    directions may or may not take turns.
    """
    pg = _resolved(name)
    sent = torch.zeros(max(1, nbytes // 4 // pg.size()) * pg.size(), device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=pg)  # the first one opens connections
    best = float("inf")
    for _ in range(2):  # the better of two: the first may contain a pause of one member
        dist.barrier(group=pg)
        start = time.perf_counter()
        for _ in range(_TIMED):
            dist.all_to_all_single(received, sent, group=pg)
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, (time.perf_counter() - start) / _TIMED)
    return best
