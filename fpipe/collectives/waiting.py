# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be interrupted, such as a receive of gloo, each waited for with a bound.

This module must not know messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_SLICE = 0.02  #: seconds between two checks


class CallTimeoutError(RuntimeError):
    """A call did not return in time."""


def within(
    seconds: float, function: Callable[[], T], check: Callable[[], object] | None = None
) -> T:
    """The result of a function that runs in a thread of its own. Raises what it raises, or
    CallTimeoutError after so many seconds; then the thread goes on.

    ``check`` is called regularly meanwhile, and may raise an error that ends the wait.

    >>> within(1.0, lambda: 3)
    3
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fpipe-waits", daemon=True).start()
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
