# SPDX-License-Identifier: Apache-2.0
"""The key-value store of torch.distributed, and the only uses of its private names in this
package.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

Store: TypeAlias = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # the documentation names it so


#: The store of the default process group.
default_store = _get_default_store


def prefixed(prefix: str, store: Store) -> Store:
    """The same store, in which every key has a prefix."""
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def connection(store: Store, timeout: timedelta) -> Store:
    """A separate connection to the same store with a separate time-out; the store itself if it has
    no connections.
    """
    with suppress(RuntimeError):  # a store in memory
        store = getattr(store, "clone", lambda: store)()
        store.set_timeout(timeout)
    return store


def set_timeout(pg: dist.ProcessGroup, seconds: float) -> None:
    """The time-out of a process group for operations that are started from now on."""
    # public since torch 2.15, where the private one warns
    public = getattr(distributed_c10d, "set_timeout", None)
    (public or distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), pg)


def resolved(name: Any) -> dist.ProcessGroup:
    """The process group of this name."""
    return _resolve_process_group(name)


def name_of(pg: dist.ProcessGroup) -> str:
    """The name of a process group; empty for one that torch.distributed did not create."""
    try:
        return pg.group_name
    except RuntimeError:
        return ""


def members(name: str) -> list[int]:
    """The global ranks of a process group."""
    return dist.get_process_group_ranks(resolved(name))


def backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """device type -> backend, of text such as ``"cpu:gloo,cuda:nccl"``."""
    return dict(part.split(":") for part in dist.get_backend_config(pg).split(","))
