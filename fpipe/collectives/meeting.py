# SPDX-License-Identifier: Apache-2.0
"""How the processes of a job meet: the store that the environment variables of torchrun name, and a
roll call.

The roll call names the ranks that have not come; backends, which connect afterwards, do not. This
module must not know groups.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import GroupError
from ._store import Store, prefixed
from .bounded import BoundedStore, CallTimeoutError, host, within

#: The latest store, by the address at which the processes meet.
_MET: dict[tuple[str | None, ...], Store] = {}
_SHOWN = 8  #: how many missing ranks an error names
#: seconds for the other ranks to read why the meeting failed, where the store ends with this
#: process
_LINGER = 1.0


def meet(seconds: float) -> tuple[Store, int, int]:
    """The store with a prefix for this process group, the rank and the size, of the environment
    variables of torchrun.

    Process groups of one job have the same names after ``destroy_process_group``. With one prefix,
    a backend would read the addresses of the ones before.
    """
    size = variable("WORLD_SIZE", 1)
    rank = variable("RANK", 0, size - 1)
    address = tuple(
        map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    )
    end = time.monotonic() + seconds
    if address not in _MET:
        _MET.clear()
        _MET[address] = _connected(rank, size, seconds, end)
    store = BoundedStore(_MET[address], seconds)
    prefix = f"fpipe/init/{store.add(f'fpipe/init/{rank}', 1)}"
    store.set(f"{prefix}/here/{rank}", "")
    if store.add(f"{prefix}/count", 1) == size:
        store.set(f"{prefix}/end", "")
    if not store.appears(f"{prefix}/end", end):
        missing = [other for other in range(size) if not store.check(f"{prefix}/here/{other}")]
        store.set(f"{prefix}/end", " ".join(map(str, missing)))
    missing = store.get(f"{prefix}/end").decode().split()
    if missing:
        if rank == 0:
            time.sleep(_LINGER)
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise GroupError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing[:_SHOWN])}{more} did "
            f"not come within {seconds:g} s. Look at rank {missing[0]} first; raise timeout= if it "
            "may start so much later"
        )
    return prefixed(prefix, _MET[address]), rank, size


def variable(name: str, least: int, most: int | None = None, default: str = "") -> int:
    """The number in an environment variable; GroupError if there is none."""
    text = os.environ.get(name, default)
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    limit = "" if most is None else f" to {most}"
    raise GroupError(
        f"the environment variable {name} is {text!r}; it must be a number from {least}{limit}. "
        "Launchers such as torchrun set it"
    )


def _connected(rank: int, size: int, seconds: float, end: float) -> Store:
    """A connection to the store, of which rank 0 is the host unless the launcher is. Waits for no
    other rank.

    torch may try for twice its time-out, and for ever if the process of the host is stopped.
    """
    name, number = host()
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise GroupError("the environment variable MASTER_ADDR is not set; give the host of rank 0")
    port = variable("MASTER_PORT", 0, 65535)
    hosts = rank == number

    def connect() -> Store:
        wait = timedelta(seconds=seconds)
        return TCPStore(
            address, port, size, hosts, wait, wait_for_workers=False, multi_tenant=hosts
        )

    try:
        return within(end - time.monotonic(), connect)
    except CallTimeoutError:
        raise GroupError(
            f"the store of the job does not answer within {seconds:g} s. Look at {name}, which "
            "hosts it, first; raise timeout= if it may start so much later"
        ) from None
