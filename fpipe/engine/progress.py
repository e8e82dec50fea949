# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal that shows which stage is being traced, if that takes long. Knows no
stages or programs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer

#: Seconds before the line appears.
DELAY = 1.0
_ERASE = "\r\x1b[2K"


@contextmanager
def shown_late(what: str) -> Iterator[Callable[[str], None]]:
    """Show ``what`` and the latest note on stderr once this takes long, if stderr is a terminal.

    >>> with shown_late("tracing") as note:
    ...     note("stage 1 of 2")
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    latest, lock, late = [""], Lock(), [False]

    def show() -> None:
        sys.stderr.write(f"{_ERASE}fpipe: {what} {latest[0]} ...")
        sys.stderr.flush()

    def begin() -> None:
        with lock:
            late[0] = True
            show()

    def note(text: str) -> None:
        with lock:
            latest[0] = text
            if late[0]:
                show()

    timer = Timer(DELAY, begin)
    timer.daemon = True
    timer.start()
    try:
        yield note
    finally:
        timer.cancel()
        with lock:
            if late[0]:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
