# SPDX-License-Identifier: Apache-2.0
"""Ends this process where a wait in another library does not end.

Such a wait cannot be interrupted from Python. The other ranks of a job see that the process is
gone, and its last line of output states the error. This module must not know groups.
"""

from __future__ import annotations

import os

from ..errors import FpipeError

#: Seconds after the time-out of a group at which the search for the cause of a wait that has not
#: ended begins.
GRACE = 1.5


def give_up(error: FpipeError) -> None:
    """Print an error and end the process, without the clean-up that would wait for other
    threads.
    """
    line = (
        f"{type(error).__module__}.{type(error).__name__}: {error}. The wait cannot be "
        "interrupted; this process ends\n"
    )
    os.write(2, line.encode())
    os._exit(1)
