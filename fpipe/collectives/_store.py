"""The key-value store of torch.distributed, as far as fpipe uses it; the one file that reaches into its privates."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

Store: TypeAlias = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # the documentation names it so


def default_store() -> Store:
    """The store that the default process group met in."""
    return _get_default_store()


def of_group(pg: dist.ProcessGroup, purpose: str) -> Store:
    """A corner of the default store for one process group: the same for its ranks, another for every other group.

    Each rank counts how often it came here with these ranks. The count is kept in the store, and so is right also for
    a process that was started anew beside an old store.
    """
    store = default_store()
    name = f"fpipe/{purpose}/{'-'.join(map(str, dist.get_process_group_ranks(pg)))}"
    nth = store.add(f"{name}/{pg.rank()}", 1)
    prefixed = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    return prefixed(f"{name}/{nth}", store)


def own(store: Store, patience: timedelta) -> Store:
    """A connection of its own to the same store, where that can be had, with a time-out of its own."""
    clone = getattr(store, "clone", None)
    try:
        store = store if clone is None else clone()
        store.set_timeout(patience)
    except (RuntimeError, NotImplementedError):  # stores in memory have no connection to double
        pass
    return store


def tell_members(name: str, obj: Any) -> list[Any] | None:
    """What every member of the process group called ``name`` said, by rank; None where there is nobody to ask."""
    pg = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]  # a name is a str
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        return None
    said: list[Any] = [None] * pg.size()
    dist.all_gather_object(said, obj, group=pg)
    return said


_ROW = 4  #: exchanges that are timed together


def time_members(name: str, nbytes: int, device: str) -> float:
    """Seconds that an exchange of so many bytes takes between all members of a process group, who all call this.

    One of several in a row, as in a step: over one connection two directions may take turns, or not, by chance.
    """
    pg = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
    given = torch.zeros(max(1, nbytes // 4 // pg.size()) * pg.size(), device=device)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=pg)  # the first makes connections
    found = float("inf")
    for _ in range(2):  # the better row: all members share a moment in which one of them was not running
        dist.barrier(group=pg)
        start = time.perf_counter()
        for _ in range(_ROW):
            dist.all_to_all_single(taken, given, group=pg)
        if device != "cpu":
            torch.accelerator.synchronize()
        found = min(found, (time.perf_counter() - start) / _ROW)
    return found
