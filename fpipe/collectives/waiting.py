# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be interrupted, such as a receive of gloo, each waited for with a bound.

This module must not know messages.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_SLICE = 0.02  #: seconds between two checks


class CallTimeoutError(RuntimeError):
    """A call did not return in time."""


class CallThread:
    """A daemon thread that makes calls, one after another.

    A call that was waited for in vain goes on there. The thread ends after it, once this object is
    dropped.

    >>> CallThread("example").call(lambda: 3, seconds=1.0)
    3
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def call(
        self,
        function: Callable[[], T],
        seconds: float,
        check: Callable[[], object] | None = None,
    ) -> T:
        """The result of a function. Raises what it raises, or CallTimeoutError after so many
        seconds.

        ``check`` is called regularly meanwhile, and may raise an error that ends the wait.
        """
        future: Future[T] = Future()
        self._jobs.put((future, function))
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                return future.result(left if check is None else min(left, _SLICE))
            except TimeoutError:
                if future.done():  # just now, or the function raised it
                    return future.result()
            if check is not None:
                check()
            if time.monotonic() >= end:
                raise CallTimeoutError("timed out")


def _work(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (job := jobs.get()) is not None:  # without a bound: nothing waits for this daemon
        future, function = job
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del job, future, function
