# SPDX-License-Identifier: Apache-2.0
"""A store whose calls end in time.

``TCPStore`` applies its time-out to ``wait`` and ``get`` alone: ``set``, ``add`` and ``check`` wait for ever while the
process or the machine of the store is stopped or cut off. Here each call runs on a thread, and the caller waits for at
most ``seconds``. A call that exceeds them is left behind with its connection. This module must not know keys.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from ._store import Store, connection

T = TypeVar("T")


class StoreLostError(RuntimeError):
    """The store did not answer in time, or its process is gone."""


class BoundedStore:
    """The calls of a store that fpipe uses, each with a bound.

    After a call without an answer, further calls fail at once for ``pause`` seconds; then a new connection is tried.

    >>> import torch.distributed as dist
    >>> store = BoundedStore(dist.HashStore(), 5.0)
    >>> store.set("key", b"value"), store.check(["key"]), store.get("key"), store.add("count", 1)
    (None, True, b'value', 1)
    """

    def __init__(self, store: Store, seconds: float, pause: float = 0.0):
        self.seconds, self.pause = seconds, pause
        self._store = store
        self._calls: SimpleQueue[_Call] | None = None
        self._lost_at = float("-inf")

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._run(lambda store: store.set(key, value))  # pyright: ignore[reportArgumentType]  # bytes are accepted

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return self._run(lambda store: store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._run(lambda store: store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return it."""
        return self._run(lambda store: store.add(key, number))

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was set."""
        return self._run(lambda store: store.delete_key(key))

    @property
    def lost(self) -> bool:
        """Whether the last call got no answer."""
        return self._lost_at > float("-inf")

    def _run(self, function: Callable[[Store], T]) -> T:
        if time.monotonic() - self._lost_at < self.pause:
            raise self._error()
        if self._calls is None:
            self._calls = SimpleQueue()
            args = (self._store, timedelta(seconds=self.seconds), self._calls)
            threading.Thread(target=_serve, args=args, name="fpipe-store", daemon=True).start()
            weakref.finalize(self, self._calls.put, _Call(None))
        call = _Call(function)
        self._calls.put(call)
        if not call.done.acquire(timeout=self.seconds):
            self._lost_at = time.monotonic()
            self._calls.put(_Call(None))  # the thread ends if the store ever answers
            self._calls = None
            raise self._error()
        if call.error is not None:
            raise call.error
        self._lost_at = float("-inf")
        return call.result

    def _error(self) -> StoreLostError:
        return StoreLostError(f"the store of the job timed out: no answer within {self.seconds:g} s")


class _Call:
    """A function of the store, and its result; ``done`` is released when there is one. None ends the thread."""

    def __init__(self, function: Callable[[Store], Any] | None):
        self.function = function
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: RuntimeError | None = None


def _serve(store: Store, seconds: timedelta, calls: SimpleQueue[_Call]) -> None:
    """The thread: one connection, calls in their order."""
    connected: Store | None = None
    while (function := (call := calls.get()).function) is not None:
        try:
            connected = connected or connection(store, seconds)
            call.result = function(connected)
        except RuntimeError as error:
            call.error = error
        call.done.release()
