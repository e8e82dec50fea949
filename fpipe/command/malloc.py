"""Freed memory stays with the process for its next step, where the C library is glibc's. Knows nothing else.

A step frees what the next one takes again. glibc hands large pieces back to the system as soon as they are free, and
every page of them is then made anew: thousands of faults a step, some hundredths of its time on a CPU.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_KEPT, _MAPPED = 1 << 30, 32 << 20  # bytes kept at most; from how many on a piece is still the system's (glibc's most)


def keep_freed() -> bool:
    """Have this process keep what it frees; whether all of it was granted. Who set the like in the environment is
    obeyed."""
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM, _KEPT)) and bool(mallopt(_MAP, _MAPPED))
