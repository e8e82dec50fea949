# SPDX-License-Identifier: Apache-2.0
"""Keeps freed memory in the process for the next step, where the C library is glibc's. Knows nothing else.

glibc returns large blocks to the system as soon as they are freed, and the next step faults every page in again. Its
documented variables (``MALLOC_TRIM_THRESHOLD_``) are read when a process is loaded, which is too late in a forked one.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)


def keep_freed() -> bool:
    """Keep up to 1 GiB of freed memory, in blocks up to 32 MiB; returns whether it was set.

    Settings for malloc in the environment take precedence.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(_TRIM, 1 << 30)) and bool(mallopt(_MMAP, 32 << 20))
