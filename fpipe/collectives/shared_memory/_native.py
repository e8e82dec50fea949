# SPDX-License-Identifier: Apache-2.0
"""The calls of Linux: memory files, limits, and with ctypes addresses, copies, and the futex (sleep
until a word of memory changes).

The counters of a lane are written after the bytes that they announce, and read before them. x86-64
keeps that order without a fence; other processors do not, so ``AVAILABLE`` is true on x86-64 Linux
alone. A write before a later read of another word is not kept in order: that needs :func:`fence`.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import struct
import sys
import threading
from typing import Any

MEMORY_FILE = "fpipe"
_SYS_FUTEX = 202
_WAIT = 0
_WAKE = 1
_ALL = 2**31 - 1

AVAILABLE = (
    sys.platform == "linux"
    and platform.machine() in ("x86_64", "AMD64")
    and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
)

# Reading memory that another process cut off would end this one by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if AVAILABLE else 0

#: Copy bytes: (address of the destination, of the source, number of bytes).
copy = ctypes.memmove


def memory_file(size: int) -> int:
    """A file without a name in memory, for this user alone, whose size no process can change."""
    file = os.memfd_create(MEMORY_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(file, 0o600)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def check_memory_file(file: int, size: int) -> None:
    """Raise OSError unless a file is one of :func:`memory_file`, of this user and of this size."""
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_size != size:
        raise PermissionError(f"a memory file of user {status.st_uid} and {status.st_size} bytes")
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:  # other files raise OSError
        raise PermissionError("a memory file that can become shorter")


def address_space() -> float:
    """The bytes of address space that this process may use: the limit that ``ulimit -v`` sets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return float("inf")
    return soft


def address(memory: mmap.mmap, offset: int = 0) -> int:
    """The address of a byte of mapped memory, valid as long as the mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))


def _entry() -> Any:
    function = ctypes.CDLL(None).syscall
    # restype and the address are 64 bits wide; the two operations do not read the arguments left
    # out.
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_long
    return function


_syscall: Any = _entry() if AVAILABLE else None
_lock = threading.Lock()


def fence() -> None:
    """Make earlier writes visible to other processors before later reads: taking a lock does
    that.
    """
    _lock.acquire()  # held for an instant only
    _lock.release()


def wake(word: int) -> None:
    """Wake all processes that sleep on the word at an address."""
    _syscall(_SYS_FUTEX, word, _WAKE, _ALL, None)


def sleep(word: int, value: int, seconds: float) -> None:
    """Sleep while the word at an address holds a value, at most some seconds; may return
    earlier.
    """
    whole = int(seconds)
    timespec = struct.pack("ll", whole, int((seconds - whole) * 1e9))
    _syscall(_SYS_FUTEX, word, _WAIT, value, timespec)
