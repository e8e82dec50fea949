# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: one folder per checkpoint, which of them are complete, and which stay.

This module must not know what a checkpoint contains, nor how a run trains.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

from ... import Pipeline
from ...errors import CheckpointError
from ...saving import (
    discard,
    folder_of,
    folders_of,
    groups_of,
    is_complete,
    is_first,
    wait_for_writers,
)

_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,})")


class RunFolder(NamedTuple):
    """Where a run is; without a path it has no checkpoints.

    >>> import fpipe, tempfile, torch
    >>> folder = RunFolder(tempfile.mkdtemp(),
    ...     fpipe.pipeline([torch.mul] * 2, group=fpipe.local(2)))
    >>> folder.of(4).name, folder.complete(), folder.latest()
    ('step-000000004', (), None)
    """

    path: str | os.PathLike[str] | None
    pipe: Pipeline

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return Path(self.path or ".") / f"step-{step:09}"

    def steps(self) -> list[int]:
        """The steps that have a folder, ascending."""
        if self.path is None or not os.path.lexists(self.path):
            return []
        run = Path(self.path)
        if not run.is_dir():
            raise CheckpointError(f"{run} is no folder; give another path= for the run")
        found = (folder.name for folder in run.glob("step-*") if folder.is_dir())
        return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, found) if match)

    def complete(self) -> tuple[int, ...]:
        """The steps that have a complete checkpoint, ascending; with ``tp=``, one of all ranks of a
        stage.
        """
        return tuple(
            step
            for step in self.steps()
            if all(map(is_complete, folders_of(self.of(step), self.pipe)))
        )

    def latest(self) -> int | None:
        """The last complete checkpoint, as the first process sees it; every process calls it before
        a run.
        """
        if self.path is not None:  # a run that failed may have left a save behind
            wait_for_writers(Path(self.path), self.pipe.group.timeout)
        steps = self.complete()
        row = (steps[-1], "") if steps else (-1, self._of_others())
        for axis in groups_of(self.pipe):
            row = axis.gather_objects(row)[0]
        step, others = row
        if others:
            raise CheckpointError(
                f"the run in {self.path} has a checkpoint {others} with another number of ranks a "
                "stage (tp=); continue with that number, or begin a run in another folder"
            )
        if is_first(self.pipe):
            # with ``tp=``, this part of what lacks another part: these steps will be saved again
            for later in self.steps():
                part = folder_of(self.of(later), self.pipe)
                if later > step and part != self.of(later):
                    discard(part)
        return None if step < 0 else step

    def _of_others(self) -> str:
        """A complete checkpoint that was written with another ``tp=``; empty text if there is
        none.
        """
        for step in reversed(self.steps()):
            folder = self.of(step)
            for other in (folder, *sorted(folder.glob("tp-*-of-*"))):
                if other not in folders_of(folder, self.pipe) and is_complete(other):
                    return other.relative_to(folder.parent).as_posix()
        return ""

    def remove_old(self, keep: int, keep_every: int) -> None:
        """Leave so many complete checkpoints, those of multiples of a step, and links to folders
        elsewhere; one process calls it.
        """
        complete = [step for step in self.complete() if not self.of(step).is_symlink()]
        try:
            for step in complete[:-keep]:
                if not keep_every or step % keep_every:
                    for folder in folders_of(self.of(step), self.pipe):
                        if not folder.is_symlink():
                            discard(folder)  # from here on it is incomplete
            for step in set(self.steps()) - set(self.complete()):
                is_old = complete and step < complete[-1]  # a later one may be under way
                if is_old and not self.of(step).is_symlink():
                    shutil.rmtree(self.of(step))
        except OSError as error:
            warnings.warn(f"an old checkpoint stays: {error}; remove it", stacklevel=2)
