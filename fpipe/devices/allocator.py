# SPDX-License-Identifier: Apache-2.0
"""What the C library of a CPU rank does with freed memory."""

from __future__ import annotations

import ctypes
import os
import sys

#: The environment variable that leaves the C library as it is: ``FPIPE_KEEP_FREED=0``.
SWITCH = "FPIPE_KEEP_FREED"
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)


def keep_freed() -> bool:
    """Keep up to 1 GiB of freed memory, in blocks up to 32 MiB, where the C library is glibc's;
    whether it does.

    Without this, glibc returns large blocks to the system as soon as they are freed, and the next
    step faults every page in again. Its documented variables (``MALLOC_TRIM_THRESHOLD_``) are read
    when a process is loaded, which is too late in a forked one. Settings for malloc in the
    environment take precedence.
    """
    if os.environ.get(SWITCH) == "0" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if sys.platform != "linux" or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM, 1 << 30)) and bool(mallopt(_MMAP, 32 << 20))
