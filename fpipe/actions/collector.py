# SPDX-License-Identifier: Apache-2.0
"""The garbage collector of Python, paused for what it would visit in vain. Knows no schedule."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector, for what creates many objects and no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
