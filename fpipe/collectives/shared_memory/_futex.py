"""Sleeping until a word of shared memory changes, and waking who sleeps: the futex of Linux, reached through ctypes.

Counters of a mailbox are written after the bytes that they announce and read before them, in this order: x86-64 keeps
it without a fence, other processors do not. So this answers for x86-64 Linux alone, and ``AVAILABLE`` says so. What it
does not keep, a write before a later read of another word, needs :func:`fence`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from typing import Any

_SYS_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 2**31 - 1

AVAILABLE = (
    sys.platform == "linux"
    and platform.machine() in ("x86_64", "AMD64")
    and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
)


class _Span(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _entry() -> Any:
    found = ctypes.CDLL(None).syscall
    # restype and the address are 64 bits wide; what is left out of a call is not read by the operation.
    found.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    found.restype = ctypes.c_long
    return found


_syscall: Any = _entry() if AVAILABLE else None


_lock = threading.Lock()


def fence() -> None:
    """Let what was written before be seen by others before anything is read after: taking a lock does that."""
    _lock.acquire()
    _lock.release()


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at an address."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None)


def sleep(address: int, seen: int, seconds: float) -> None:
    """Sleep while the word at an address is what was seen, and no longer than some seconds; may wake for nothing."""
    whole = int(seconds)
    span = _Span(whole, int((seconds - whole) * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT, seen, ctypes.addressof(span))
