# SPDX-License-Identifier: Apache-2.0
"""Several copies of a pipeline, each a job of its own: one that fails is started again, and the
others go on.

This module holds the store that the copies share and says which of them are lost; what they do
about it is in ``collectives/quorum.py``. It must not know how processes are started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ...collectives.bounded import BoundedStore
from ...errors import LaunchError
from . import outcome
from .quorum import ADDRESS, COPIES, COPY

#: Starts the ranks of one copy with these variables, and calls back at its first failure: the
#: results by rank.
Start = Callable[[dict[str, str], Callable[[], None]], list[Any]]


class Supervisor:
    """The copies of a job, each in a thread of its own."""

    def __init__(self, start: Start, copies: int, restarts: int, address: str = "127.0.0.1"):
        if copies < 1 or restarts < 0:
            raise LaunchError(
                f"copies={copies}, restarts={restarts}; give at least one copy, and restarts from 0"
            )
        self._start, self._copies, self._restarts = start, copies, restarts
        self._tcp = outcome.store(address)
        self._store = BoundedStore(self._tcp, 60.0)
        self._lock = threading.Lock()
        self._results: list[list[Any] | None] = [None] * copies
        self._errors: list[Exception] = []
        self._ended = threading.Event()  # a copy has a result

    def run(self) -> list[list[Any] | None]:
        """The results by copy; ``None`` for a copy that was lost for good. Raises the first error
        if all were.
        """
        threads = [
            threading.Thread(
                target=self._supervise, args=(copy,), name=f"fpipe-copy-{copy}", daemon=True
            )
            for copy in range(self._copies)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self._ended.is_set():
            raise self._errors[0]
        return self._results

    def _supervise(self, copy: int) -> None:
        """Run a copy, and again as long as others have not ended and it may be restarted."""
        address = f"{self._tcp.host}:{self._tcp.port}"
        known = {ADDRESS: address, COPY: str(copy), COPIES: str(self._copies)}
        for _ in range(self._restarts + 1):
            try:
                result = self._start(known, partial(self._lost, copy))
            except Exception as error:  # of the user's function, or of the processes
                self._lost(copy)
                with self._lock:
                    self._errors.append(error)
                if self._ended.is_set():
                    return
                continue
            with self._lock:
                self._results[copy] = result
            self._ended.set()
            return

    def _lost(self, copy: int) -> None:
        """Say that a copy is lost, as often as it was started until now."""
        with self._lock:
            key = f"starts/{copy}"
            self._store.set(f"dead/{copy}", str(self._store.add(key, 0)))
