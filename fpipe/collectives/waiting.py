# SPDX-License-Identifier: Apache-2.0
"""Waiting for a call that cannot be interrupted, such as a receive of gloo, while something else is checked.

This module must not know messages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from queue import SimpleQueue
from typing import TypeAlias

_SLICE = 0.02  #: seconds between two checks
_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], object], Future[None]] | None]"


class Waiter:
    """A daemon thread that makes such calls, one after another. After a check has raised, the call goes on there.

    >>> Waiter().wait(lambda: None, lambda: None)
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="fpipe-waiter", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def wait(self, job: Callable[[], object], check: Callable[[], object]) -> None:
        """Return, or raise, when ``job`` or ``check`` does."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        while True:
            try:
                done.result(_SLICE)
                return
            except NotYet:
                if done.done():  # raised by the job
                    raise
            check()


def _work(jobs: _Jobs) -> None:
    while (task := jobs.get()) is not None:  # without a bound: the thread is a daemon that nothing waits for
        job, done = task
        try:
            job()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del job, done, task
