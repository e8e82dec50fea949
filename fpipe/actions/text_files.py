# SPDX-License-Identifier: Apache-2.0
"""Reads files that others wrote, up to a size, and writes whole files.

A written file is complete or not there. A symbolic link to a file is not followed: in a folder that
others may write to, it could lead to any file of the user. This module must not know schedules.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from os import PathLike
from pathlib import Path

from ..errors import ScheduleError

#: The folders of links to the streams of a process, such as /dev/stdout, which may be files.
_STREAMS = Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")


def read_bytes(path: str | PathLike[str], most: int) -> bytes:
    """The bytes of a file; ValueError if it has more than ``most``. No more than these are read.

    A pipe into which nobody writes is empty: to wait for a writer may have no end.
    """
    at_once = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, how: os.open(name, how | at_once)) as file:
        if at_once:
            os.set_blocking(file.fileno(), True)
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has more than {most} bytes, and no larger file is read")
    return raw


def write_bytes(path: str | PathLike[str], content: bytes) -> None:
    """Write a file, in place of an existing one, or write to a device or pipe.

    OSError for a symbolic link to a file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "file")
    >>> write_bytes(path, b"text"); path.read_bytes()
    b'text'
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        _write_to_stream(path, content)
        return
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
        if path.exists():
            part.chmod(path.stat().st_mode & 0o7777)
        part.replace(path)
    except OSError as error:  # the user knows no other name than the path
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            part.unlink()


def _write_to_stream(path: Path, content: bytes) -> None:
    """Write to a device or a pipe. The opened file is checked, because a link can change between
    the check of a path and its opening.
    """
    refused = OSError(
        errno.ELOOP, "it is a symbolic link to a file, which is not followed", str(path)
    )
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        raise refused from None
    with os.fdopen(opened, "wb") as stream:
        if stat.S_ISREG(os.fstat(opened).st_mode) and path.parent not in _STREAMS:
            raise refused
        stream.write(content)


#: The most bytes of a file of actions, which are about eight million actions.
MOST_BYTES = 64 << 20


def read_text(path: str | PathLike[str]) -> str:
    """The text of a file of actions, of at most ``MOST_BYTES``."""
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{path} is not text (byte {error.start}); give a CSV of actions"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: too large, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(
            f"cannot read {str(path)!r}: {reason}; give the path of a CSV file"
        ) from error
