# SPDX-License-Identifier: Apache-2.0
"""Calls that end in time: of a function that cannot be interrupted, and of the store of a job.

``TCPStore`` applies its time-out to ``wait`` and ``get`` alone: ``set``, ``add`` and ``check`` wait
for ever while the process or the machine of the store is stopped or cut off. Here each call runs on
a thread, and the caller waits for at most ``seconds``. A call that exceeds them is left behind with
its connection. This module must not know keys.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ._store import Store, connection, default_store, prefixed

T = TypeVar("T")
#: seconds between the first two looks for a key; each further pause is twice as long, at most _LAST
_FIRST = 0.0005
_LAST = 0.02
#: seconds that the store has for an answer, also where less is left: it may be busy
_SHORTEST = 1.0
_CHECKED = 0.02  #: seconds between two checks of a call


class CallTimeoutError(RuntimeError):
    """A call did not return in time."""


def in_thread(function: Callable[[], T], name: str, *, daemon: bool) -> Future[T]:
    """What a function returns or raises that runs in a thread of its own."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


def within(
    seconds: float, function: Callable[[], T], check: Callable[[], object] | None = None
) -> T:
    """The result of a function that runs in a thread of its own. Raises what it raises, or
    CallTimeoutError after so many seconds; then the thread goes on.

    ``check`` is called regularly meanwhile, and may raise an error that ends the wait.

    >>> within(1.0, lambda: 3)
    3
    """
    future = in_thread(function, "fpipe-waits", daemon=True)
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            return future.result(left if check is None else min(left, _CHECKED))
        except TimeoutError:
            if future.done():  # just now, or the function raised it
                return future.result()
        if check is not None:
            check()
        if time.monotonic() >= end:
            raise CallTimeoutError("timed out")


class StoreLostError(RuntimeError):
    """The store did not answer in time, or its process is gone."""


def of_group(pg: dist.ProcessGroup, seconds: float) -> tuple[BoundedStore, int]:
    """A prefix of the default store: the same for all ranks of a process group, different for every
    other group.

    It contains how often this rank asked for a group of these ranks, which is returned too. The
    store holds that count, so it is right also for a process that was restarted while the store
    kept running.
    """
    store = BoundedStore(default_store(), seconds)
    name = f"fpipe/group/{'-'.join(map(str, dist.get_process_group_ranks(pg)))}"
    nth = store.add(f"{name}/{pg.rank()}", 1)
    return store.prefixed(f"{name}/{nth}"), nth


def host() -> tuple[str, int | None]:
    """Who hosts the store of the job, as text, and its global rank if it is a rank."""
    address = (
        f"{os.environ.get('MASTER_ADDR', 'an unknown host')}:{os.environ.get('MASTER_PORT', '?')}"
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher at {address}", None
    return f"rank 0 at {address}", 0


class BoundedStore:
    """The calls of a store that fpipe uses, each with a bound.

    After a call without an answer, further calls fail at once for ``pause`` seconds; then a new
    connection is tried.

    >>> import torch.distributed as dist
    >>> store = BoundedStore(dist.HashStore(), 5.0)
    >>> store.set("key", b"value"), store.check("key"), store.get("key"), store.add("count", 1)
    (None, True, b'value', 1)
    """

    def __init__(self, store: Store, seconds: float, pause: float = 0.0):
        self.raw = store
        self.seconds = seconds
        self.pause = pause
        self._connection: Store | None = None
        self._lost_at = float("-inf")

    def prefixed(self, prefix: str) -> BoundedStore:
        """The same store, over the same connection, in which every key has a prefix."""
        store = BoundedStore(prefixed(prefix, self.raw), self.seconds, self.pause)
        if self._connection is not None:
            store._connection = prefixed(prefix, self._connection)
        return store

    def connect(self) -> None:
        """Open the connection now: a name server may take seconds to answer, which a call with a
        short bound does not have.
        """
        self._run(lambda _: None)

    def set(self, key: str, value: Any) -> None:
        """Store a value, text or bytes."""
        self._run(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return self._run(lambda store: store.get(key))

    def check(self, key: str) -> bool:
        """Whether a key is set."""
        return self._run(lambda store: store.check([key]))

    def appears(self, key: str, end: float, until: float = float("inf")) -> bool:
        """Wait until a key is set, at most until ``end`` of ``time.monotonic``; whether it is.

        A wait in parts ends at ``until``, and the store has until ``end`` for each answer. It
        polls: a blocking wait of the store prints warnings if it ends without a result.
        """
        wait = _FIRST
        while not self._run(
            lambda store: store.check([key]), max(_SHORTEST, end - time.monotonic())
        ):
            if time.monotonic() >= min(end, until):
                return False
            time.sleep(wait)
            wait = min(2 * wait, _LAST)
        return True

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return it."""
        return self._run(lambda store: store.add(key, number))

    def delete(self, *keys: str) -> None:
        """Delete keys, with one bound for all."""
        self._run(lambda store: [store.delete_key(key) for key in keys])

    @property
    def lost(self) -> bool:
        """Whether the last call got no answer."""
        return self._lost_at > float("-inf")

    def _run(self, function: Callable[[Store], T], seconds: float = float("inf")) -> T:
        """The result of a call that has the bound of the store, or fewer ``seconds``."""
        if time.monotonic() - self._lost_at < self.pause:
            raise _no_answer(self.seconds)
        seconds = min(seconds, self.seconds)
        try:
            store, result = within(seconds, lambda: self._call(function))
        except CallTimeoutError:  # its thread ends with the call, and so does the connection
            self._lost_at = time.monotonic()
            self._connection = None
            raise _no_answer(seconds) from None
        self._lost_at = float("-inf")
        self._connection = store
        return result

    def _call(self, function: Callable[[Store], T]) -> tuple[Store, T]:
        """The connection and the result of a call, in the thread of the call."""
        store = self._connection or connection(self.raw, timedelta(seconds=self.seconds))
        return store, function(store)


def _no_answer(seconds: float) -> StoreLostError:
    return StoreLostError(f"the store of the job timed out: no answer within {seconds:.3g} s")
