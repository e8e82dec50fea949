# SPDX-License-Identifier: Apache-2.0
"""What ``fpipe.Loop`` logs of a step, and the file ``log.jsonl``. It must not know pipelines or
checkpoints.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from errno import ELOOP, ENOSPC
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ... import Transform
from ...actions import write_bytes
from ...transforms import ClipState

#: What is logged of a step: its number (from 1), loss and seconds, and rate and norm where the
#: transform has them.
Record: TypeAlias = dict[str, Any]
T = TypeVar("T")


def part_of(state: object, kind: type[T]) -> T | None:
    """The first state of this type among the states of a chain, and of the transforms in it.

    >>> part_of((0, (1.5, 2)), float), part_of((), float)
    (1.5, None)
    """
    if isinstance(state, kind):
        return state
    parts = state if isinstance(state, tuple) else ()
    return next((part for each in parts if (part := part_of(each, kind)) is not None), None)


def figures(tx: Transform, state: object) -> Callable[[object], Record]:
    """Rate and norm of a step that begins with a state, which it may overwrite.

    Returns:
        A function of the state after the step. There is no norm if the step was skipped before it
        was computed.
    """
    before = part_of(state, ClipState)
    record = {} if tx.rate is None else {"rate": tx.rate(state)}

    def after(state: object) -> Record:
        clipping = part_of(state, ClipState)
        if clipping is None or clipping is before:
            return record
        return {**record, "norm": clipping.norm.item()}

    return after


def log_to(path: Path, step: int) -> Callable[[Record], object]:
    """Appends records to a file, of which the lines up to a step stay. A file that cannot be
    written is warned of once; a link is not followed.
    """
    warn = cache(partial(warnings.warn, stacklevel=2))

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            warn(f"{path} is not written: {error.strerror}; training goes on without the log")

    def append(line: bytes) -> None:
        with _opened(path, "a") as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(line) < len(line):  # the disk is full
                file.truncate(size)
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    attempt(lambda: _repair(path, step))
    return lambda record: attempt(lambda: append(json.dumps(record).encode() + b"\n"))


def _repair(path: Path, step: int) -> None:
    """Leave the lines up to a step; whenever it ends, these are in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, "a+") as file:
        file.seek(0)
        before = file.read()
    after = b"".join(line + b"\n" for line in before.split(b"\n") if _stays(line, step))
    if after != before:
        write_bytes(path, after)


def _opened(path: Path, mode: str) -> FileIO:
    """A file here, not one that a link leads to."""
    if path.is_symlink():
        raise OSError(ELOOP, "a symbolic link, which is not followed")
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    return FileIO(path, mode, opener=lambda name, how: os.open(name, how | flags, 0o666))


def _stays(line: bytes, step: int) -> bool:
    """Whether a line of a log is a record of a step up to this one; not where it was cut off."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
