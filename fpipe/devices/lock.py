# SPDX-License-Identifier: Apache-2.0
"""One thread of a process at a time draws random numbers, or traces a function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from ..errors import GroupError

#: Held by the thread that draws, or that traces a function.
_LOCK = RLock()
#: The seconds that a thread waits for it. Programs of two threads that also communicate could wait
#: for each other.
PATIENCE = 600.0


@contextmanager
def exclusive() -> Iterator[None]:
    """The random streams of the process, for this thread alone; other threads wait.

    >>> with exclusive(), exclusive():
    ...     pass
    """
    if not _LOCK.acquire(timeout=PATIENCE):
        raise GroupError(
            f"another thread has drawn random numbers or traced a function for {PATIENCE:g} "
            "seconds, and only one thread of a process can; run pipelines that draw inside "
            "collectives in processes of their own"
        )
    try:
        yield
    finally:
        _LOCK.release()
