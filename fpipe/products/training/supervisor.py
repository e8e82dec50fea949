# SPDX-License-Identifier: Apache-2.0
"""Several copies of a pipeline, each a job of its own: one that fails is started again, and the
others go on.

The launcher holds the store that the copies share and says which of them are lost; what they do
about it is in ``quorum.py``. This module must not know how processes are started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

from ...collectives import BoundedStore
from ...errors import LaunchError
from . import outcome
from .quorum import ADDRESS, COPIES, COPY

T = TypeVar("T")


#: Starts the ranks of one copy with these variables, and calls back at its first failure: the
#: results by rank.
Start: TypeAlias = Callable[[dict[str, str], Callable[[], None]], list[T]]


def supervise(
    start: Start[T], copies: int, restarts: int, address: str = "127.0.0.1"
) -> list[list[T] | None]:
    """Run each copy in a thread, and again as long as no other has ended and it may be restarted.

    Args:
        start: runs one copy.
        copies: how many.
        restarts: of each copy.
        address: where the store of the copies listens.

    Returns:
        The results by copy; ``None`` for a copy that was lost for good.

    Raises:
        Exception: the first one, if all copies were lost.
    """
    if copies < 1 or restarts < 0:
        raise LaunchError(
            f"copies={copies}, restarts={restarts}; give at least one copy, and restarts from 0"
        )
    tcp_store = outcome.store(address)
    store = BoundedStore(tcp_store, 60.0)
    lock, ended = threading.Lock(), threading.Event()
    results: list[list[T] | None] = [None] * copies
    errors: list[Exception] = []

    def lost(copy: int) -> None:
        """Say that a copy is lost, as often as it was started until now."""
        with lock:
            store.set(f"dead/{copy}", str(store.add(f"starts/{copy}", 0)))

    def run(copy: int) -> None:
        where = f"{tcp_store.host}:{tcp_store.port}"
        more = {ADDRESS: where, COPY: str(copy), COPIES: str(copies)}
        for _ in range(restarts + 1):
            try:
                results[copy] = start(more, partial(lost, copy))
            except Exception as error:  # of the user's function, or of the processes
                lost(copy)
                errors.append(error)
                if ended.is_set():
                    return
            else:
                ended.set()
                return

    threads = [
        threading.Thread(target=run, args=(copy,), name=f"fpipe-copy-{copy}", daemon=True)
        for copy in range(copies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not ended.is_set():
        raise errors[0]
    return results
