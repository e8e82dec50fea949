# SPDX-License-Identifier: Apache-2.0
"""Ends this process where a wait in another library does not end.

Such a wait cannot be interrupted from Python. The other ranks of a job see that the process is gone, and its last line
of output states the error. This module must not know groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FpipeError, StalledError

#: Seconds after the time-out of a group at which a wait that has not ended ends the process.
GRACE = 3.0


@contextmanager
def ends(seconds: float, text: str) -> Iterator[None]:
    """End the process if the body takes longer; for rare calls, since it starts a thread."""
    timer = threading.Timer(seconds + GRACE, lambda: give_up(StalledError(text)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def give_up(error: FpipeError) -> None:
    """Print an error and end the process, without the clean-up that would wait for other threads."""
    line = (
        f"{type(error).__module__}.{type(error).__name__}: {error}. The wait cannot be interrupted; this process ends\n"
    )
    os.write(2, line.encode())
    os._exit(1)
