# SPDX-License-Identifier: Apache-2.0
"""What this package uses of a pipeline, and how its processes agree. Must not know files."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..collectives.group import Group
from ..collectives.setup import MeshGroup
from ..errors import CheckpointError, FpipeError

if TYPE_CHECKING:
    from ..engine.pipeline import Pipeline

T = TypeVar("T")
#: A pipeline of any results.
Pipe: TypeAlias = "Pipeline[Any, Any]"


# ---- groups of processes ----
def groups_of(pipe: Pipe) -> list[Group]:
    """Groups that together connect all processes: of the pipeline, of its copies, and of those that
    share a stage (``tp=``).

    >>> import fpipe, torch
    >>> pipe = fpipe.pipeline([torch.mul] * 2, group=fpipe.local(2))
    >>> groups_of(pipe) == [pipe.group]
    True
    """
    sharing = _sharing(pipe)
    return _with_copies(pipe) if sharing is None else [*_with_copies(pipe), sharing]


def is_first(pipe: Pipe) -> bool:
    """Whether this process is the first of the first copy of a pipeline.

    >>> import fpipe, torch
    >>> is_first(fpipe.pipeline([torch.mul] * 2, group=fpipe.local(2)))
    True
    """
    return all(0 in group.here for group in _with_copies(pipe))


def _with_copies(pipe: Pipe) -> list[Group]:
    return [pipe.group] if pipe.copies is None else [pipe.group, pipe.copies.group]


def _sharing(pipe: Pipe) -> Group | None:
    """The processes that share the stages of this one; None if it has them alone."""
    group = pipe.group
    return group.tp if isinstance(group, MeshGroup) and group.tp.size > 1 else None


# ---- agreement ----
def everyone(pipe: Pipe, text: str) -> list[str]:
    """What all processes of all copies passed, without repeats; every process calls this."""
    return _gathered(_with_copies(pipe), text)


def _gathered(groups: Sequence[Group], text: str) -> list[str]:
    rows = [text]
    for group in groups:
        rows = [row for part in group.gather_objects(rows) for row in part]
    return list(dict.fromkeys(rows))


def agree(pipe: Pipe, act: Callable[[], T]) -> T:
    """The result of an action of every process; CheckpointError on all of them where it failed on
    one.
    """
    fault: Exception | None = None
    message = ""
    result: Any = None
    try:
        result = act()
    except Exception as error:
        fault, message = error, f"{type(error).__name__}: {error}"
        if isinstance(error, (FpipeError, OSError)):
            message = str(error)
    faults = [text for text in _gathered(groups_of(pipe), message) if text]
    if isinstance(fault, CheckpointError):
        raise fault
    if faults:
        raise CheckpointError(faults[0]) from fault
    return result


def check_unused(
    pipe: Pipe,
    there: Iterable[str],
    taken: Iterable[str],
    text: Callable[[str], str],
    remedy: str | None,
) -> None:
    """Names of tensors that no process takes are an error.

    ``text`` is the message for such names. Without a remedy it is a warning on the first process.
    """
    rows = everyone(pipe, json.dumps(sorted(taken)))
    unused = sorted(set(there).difference(*map(json.loads, rows)))
    if not unused:
        return
    more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
    message = text(f"{unused[0]!r}{more}")
    if remedy is not None:
        raise CheckpointError(f"{message}; {remedy}, or pass strict=False")
    if is_first(pipe):
        warnings.warn(message, stacklevel=3)


# ---- folders ----
def folders_of(path: str | os.PathLike[str], pipe: Pipe) -> list[Path]:
    """The folders of a checkpoint: with ``tp=``, one for each of the processes that share a stage.

    Each has other tensors of the same names.
    """
    sharing, folder = _sharing(pipe), Path(path)
    if sharing is None:
        return [folder]
    return [folder / f"tp-{rank}-of-{sharing.size}" for rank in range(sharing.size)]


def folder_of(path: str | os.PathLike[str], pipe: Pipe) -> Path:
    """Where this process finds or writes its part of a checkpoint."""
    sharing = _sharing(pipe)
    return folders_of(path, pipe)[0 if sharing is None else sharing.here[0]]


def writer_of(folder: Path) -> str:
    """The name of the threads that write a checkpoint."""
    return f"fpipe-save {os.path.abspath(folder)}"


def wait_for_writers(folder: Path) -> None:
    """Return once no thread of this process writes this checkpoint: ``save(wait=False)`` leaves
    threads behind.
    """
    for thread in threading.enumerate():
        if thread.name == writer_of(folder) and thread is not threading.current_thread():
            thread.join()
