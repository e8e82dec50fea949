# SPDX-License-Identifier: Apache-2.0
"""Waiting for a call that cannot be interrupted, such as a receive of gloo, while something else is
checked.

This module must not know messages.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

_SLICE = 0.02  #: seconds between two checks
_Jobs: TypeAlias = "SimpleQueue[_Task | None]"


class Waiter:
    """A daemon thread that makes such calls, one after another. After :meth:`wait` has raised, the
    call goes on there.

    >>> Waiter().wait(lambda: None, lambda: None, seconds=1.0)
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="fpipe-waiter", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def wait(
        self, job: Callable[[], object], check: Callable[[], object], seconds: float = float("inf")
    ) -> None:
        """Return when ``job`` does; raise what ``job`` or ``check`` raises, and RuntimeError after
        so many seconds.
        """
        end = time.monotonic() + seconds
        task = _Task(job, threading.Lock(), [])
        task.done.acquire()  # at once: nothing else holds it yet
        self._jobs.put(task)
        while not task.done.acquire(timeout=_SLICE):
            check()
            if time.monotonic() > end:
                raise RuntimeError("timed out")
        for error in task.errors:
            raise error


class _Task(NamedTuple):
    """A call; ``done`` is released when it has returned, or raised an error."""

    job: Callable[[], object]
    done: threading.Lock
    errors: list[BaseException]


def _work(jobs: _Jobs) -> None:
    while (
        task := jobs.get()
    ) is not None:  # without a bound: the thread is a daemon that nothing waits for
        try:
            task.job()
        except BaseException as error:
            task.errors.append(error)
        task.done.release()
        del task
