# SPDX-License-Identifier: Apache-2.0
"""A thread that continues sends while the rank of this process computes. It knows streams alone."""

from __future__ import annotations

import os
import select
import threading
import weakref

from .stream import Stream


class Progress:
    """Streams with something to send. The thread starts with the first of them, and sleeps without
    one.

    >>> Progress().close()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: set[Stream] = set()
        self._wake: list[int] = []  # the two ends of a pipe, once the thread runs
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end, self._wake)

    def send(self, stream: Stream) -> None:
        """Send what a stream has queued."""
        with self._lock:
            if stream in self._late:
                return
            self._late.add(stream)
            if not self._wake:
                self._wake += os.pipe()
                work = (self._lock, self._late, self._wake[0])
                self._threads.append(
                    threading.Thread(target=_work, args=work, name="fpipe-sockets", daemon=True)
                )
                self._threads[0].start()
        os.write(self._wake[1], b"1")

    def close(self) -> None:
        """End the thread."""
        self._finalizer()
        for thread in self._threads:
            thread.join()


def _end(wake: list[int]) -> None:
    """Close the end that the thread does not read: it ends, and closes the other one."""
    if wake:
        os.close(wake.pop())


def _work(lock: threading.Lock, late: set[Stream], woken: int) -> None:
    while True:
        with lock:
            late -= {stream for stream in late if not stream.queued}
            now = tuple(late)
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        for stream in now:
            poll.register(stream.connection, select.POLLOUT)
        if any(at == woken for at, _ in poll.poll()) and not os.read(woken, 64):
            os.close(woken)
            return
        for stream in now:
            stream.retry()
