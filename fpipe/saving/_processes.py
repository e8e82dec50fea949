# SPDX-License-Identifier: Apache-2.0
"""What this package uses of a pipeline, and how its processes agree. Must not know files."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from ..collectives.group import Group
from ..collectives.setup import MeshGroup
from ..errors import CheckpointError, FpipeError

if TYPE_CHECKING:
    from ..engine.pipeline import Pipeline

T = TypeVar("T")
#: A pipeline of any results.
Pipe: TypeAlias = "Pipeline[Any, Any]"
AnyPath: TypeAlias = str | os.PathLike[str]


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
    if sharing is None:
        return _with_copies(pipe)
    return [*_with_copies(pipe), sharing]


def is_first(pipe: Pipe) -> bool:
    """Whether this process is the first of the first copy of a pipeline.

    >>> import fpipe, torch
    >>> is_first(fpipe.pipeline([torch.mul] * 2, group=fpipe.local(2)))
    True
    """
    return all(0 in group.here for group in _with_copies(pipe))


def _with_copies(pipe: Pipe) -> list[Group]:
    if pipe.copies is None:
        return [pipe.group]
    return [pipe.group, pipe.copies.group]


def _sharing(pipe: Pipe) -> Group | None:
    """The processes that share the stages of this one; None if it has them alone."""
    group = pipe.group
    if isinstance(group, MeshGroup) and group.tp.size > 1:
        return group.tp
    return None


# ---- agreement ----
def everyone(pipe: Pipe, value: object) -> list[Any]:
    """What all processes of all copies passed, as JSON, without repeats; every process calls
    this.
    """
    return list(map(json.loads, _gathered(_with_copies(pipe), json.dumps(value))))


def _gathered(groups: Sequence[Group], text: str) -> list[str]:
    rows = [text]
    for group in groups:
        rows = [row for part in group.gather_objects(rows) for row in part]
    return list(dict.fromkeys(rows))


def agree(pipe: Pipe, act: Callable[[], T]) -> T:
    """The result of an action of every process; CheckpointError on all of them where it failed on
    one.
    """
    result = None
    fault = None
    message = ""
    group = pipe.group
    try:
        result = act()
    except Exception as error:
        fault = error
        message = str(error)
        if not isinstance(error, (FpipeError, OSError)):
            message = f"{type(error).__name__}: {error}"
        if len(group.here) < group.size:
            rank = group.global_rank(group.here[0])
            message = f"rank {rank} on {gethostname()}: {message}"
    messages = [text for text in _gathered(groups_of(pipe), message) if text]
    if isinstance(fault, CheckpointError):
        raise fault
    if messages:
        raise CheckpointError(messages[0]) from fault
    return cast(T, result)


def check_unused(
    pipe: Pipe,
    names: Iterable[str],
    used: Iterable[str],
    text: str,
    remedy: str,
    strict: bool,
) -> None:
    """Names of tensors that no process uses are an error; if not ``strict``, a warning on the first
    process. ``text`` is the message, with ``{}`` for such names.
    """
    unused = sorted(set(names).difference(*everyone(pipe, sorted(used))))
    if not unused:
        return
    message = text.format(and_more(list(map(repr, unused))))
    if strict:
        raise CheckpointError(f"{message}; {remedy}, or pass strict=False")
    if is_first(pipe):
        warnings.warn(message, stacklevel=4)


def and_more(texts: Sequence[str]) -> str:
    """The first of some texts, and how many others there are.

    >>> and_more(["a"]), and_more(["a", "b"])
    ('a', 'a (and 1 more)')
    """
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0]} (and {len(texts) - 1} more)"


# ---- folders ----
def folders_of(path: AnyPath, pipe: Pipe) -> list[Path]:
    """The folders of a checkpoint: with ``tp=``, one for each of the processes that share a stage.

    Each has other tensors of the same names.
    """
    sharing = _sharing(pipe)
    folder = Path(path)
    if sharing is None:
        return [folder]
    return [folder / f"tp-{rank}-of-{sharing.size}" for rank in range(sharing.size)]


def folder_of(path: AnyPath, pipe: Pipe) -> Path:
    """Where this process finds or writes its part of a checkpoint."""
    sharing = _sharing(pipe)
    return folders_of(path, pipe)[0 if sharing is None else sharing.here[0]]


def writer_of(folder: Path) -> str:
    """The name of the threads that write a checkpoint."""
    return f"fpipe-save {os.path.abspath(folder)}"


def wait_for_writers(folder: Path, seconds: float = inf) -> None:
    """Return once no thread of this process writes a checkpoint there: ``save(wait=False)`` leaves
    threads behind. Seconds are for each of them.
    """
    for thread in threading.enumerate():
        writes = f"{thread.name}/".startswith(f"{writer_of(folder)}/")
        if writes and thread is not threading.current_thread():
            thread.join(min(seconds, threading.TIMEOUT_MAX))
