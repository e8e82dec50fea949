# SPDX-License-Identifier: Apache-2.0
"""What this package uses of a pipeline, and how its processes agree. Must not know files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..collectives.group import Group
from ..collectives.setup import MeshGroup
from ..engine.copies import Copies
from ..errors import CheckpointError, FpipeError


class Pipe(Protocol):
    """The part of a pipeline that this package uses."""

    @property
    def config(self) -> Any: ...
    @property
    def cache(self) -> Any: ...
    @property
    def group(self) -> Group: ...
    @property
    def copies(self) -> Copies | None: ...
    @property
    def here(self) -> tuple[int, ...]: ...
    @property
    def stages(self) -> int: ...
    @property
    def tied(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def placement(self) -> Any: ...
    @property
    def parts(self) -> Group | None: ...
    def place(self, params: Sequence[Any]) -> list[Any]: ...
    def shard(self, params: Sequence[Any]) -> list[Any]: ...


def everyone(pipe: Pipe, text: str) -> list[str]:
    """What all processes of all copies passed, without repeats; every process calls this."""
    return _gathered(_with_copies(pipe), [text])


def _gathered(groups: Sequence[Group], rows: list[str]) -> list[str]:
    """What all processes of the groups passed, without repeats."""
    for group in groups:
        rows = [row for part in group.gather_objects(rows) for row in part]
    return list(dict.fromkeys(rows))


def is_first(pipe: Pipe) -> bool:
    """Whether this process is the first of the first copy of a pipeline."""
    return all(0 in group.here for group in _with_copies(pipe))


def _with_copies(pipe: Pipe) -> list[Group]:
    """Groups that together connect all processes of all copies."""
    return [pipe.group] if pipe.copies is None else [pipe.group, pipe.copies.group]


def _sharing(pipe: Pipe) -> Group | None:
    """The processes that share the stages of this one (``tp=``); None if it has them alone."""
    group = pipe.group
    return group.tp if isinstance(group, MeshGroup) and group.tp.size > 1 else None


def axes(pipe: Pipe) -> list[Group]:
    """Groups that together connect all processes: of the pipeline, of its copies, and of those that
    share a stage.
    """
    sharing = _sharing(pipe)
    return _with_copies(pipe) if sharing is None else [*_with_copies(pipe), sharing]


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


def agree(pipe: Pipe, act: Callable[[], Any]) -> Any:
    """The result of an action of every process; CheckpointError on all of them where it failed on
    one.
    """
    result, fault, message = None, None, ""
    try:
        result = act()
    except Exception as error:
        fault = error
        message = (
            str(error)
            if isinstance(error, (FpipeError, OSError))
            else f"{type(error).__name__}: {error}"
        )
    faults = [text for text in _gathered(axes(pipe), [message]) if text]
    if isinstance(fault, CheckpointError):
        raise fault
    if faults:
        raise CheckpointError(faults[0]) from fault
    return result
