# SPDX-License-Identifier: Apache-2.0
"""``fpipe.save``: a copy on the host now, files behind the next steps, and the manifest last.

Each process writes its tensors and then the list of them, as a file; the first process waits for
all lists, compares tied leaves, and writes the manifest. Processes do not communicate while they
write. Must not know how files are read.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait as futures_wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from ..actions import progress, write_bytes
from ..collectives.bounded import in_thread
from ..collectives.codec import to_bytes
from ..errors import CheckpointError
from ..tree import Tree
from ._processes import AnyPath, Pipe, agree, everyone, folder_of, is_first, writer_of
from .collect import Facts, Place, collect, merged
from .files import File, grouped, write
from .leaf_names import Names
from .manifest import Leaf, Manifest, Piece, flush_folder, is_complete

#: Bytes of a file of tensors at most, but for a larger tensor.
MOST_FILE = 2 << 30
_POLL = 0.02
_SEEN = 5.0  #: seconds until a file of another process is seen
_LAST = 2.0  #: seconds for the lists of other processes after the program has ended
_OURS = re.compile(
    r"[0-9]{5}-[0-9]{5}\.safetensors|[0-9]{5}\.[0-9a-f]{16}\.json|\.[0-9a-f]{16}\.part"
)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written; ``wait`` returns once it is complete."""

    path: Path
    pipe: Pipe
    written: Future[None]
    completed: Future[None] | None

    def wait(self) -> None:
        """Return once the checkpoint is complete; every process calls it.

        Raises:
            CheckpointError: on every process, if one could not write its part, or tied leaves
            differ.
        """
        completed = self.completed
        try:
            agree(self.pipe, self.written.result)
        except CheckpointError:
            if completed is not None:  # it reads lists that the next save to this folder removes
                futures_wait([completed], timeout=_LAST)
            raise
        agree(self.pipe, lambda: None if completed is None else completed.result())


def save(
    path: AnyPath,
    pipe: Pipe,
    *,
    params: Sequence[Tree] | None = None,
    wait: bool = True,
    **more: Tree,
) -> Saving:
    """Write a checkpoint that any other layout of the same model can load; every process calls it.

    ``params`` and trees like them are stored by the names of leaves in the model: those of a module
    that was cut by ``from_module`` or ``interop``, and for functions ``Stage(fn, name=...)`` and
    ``Stage(fn, layers=...)``. A stage without these is called by its number, so that a checkpoint
    can only be loaded with the same cut. Everything else, such as the step, must be equal on all
    processes.

    Args:
        path: a new folder, on a file system that all processes share.
        pipe: the pipeline that has the stages of ``params``.
        params: the parameters, one tree per stage; parts of them with ``zero=``.
        wait: with False, the call returns when tensors are copied to the host, and files are
            written behind the next steps; call ``wait()`` on the result before the next checkpoint,
            and at the end. ``load`` of the same folder waits too.
        more: trees by name: states of transforms, numbers, text.

    Returns:
        A ``Saving``; with ``wait=True`` it is complete.

    Raises:
        CheckpointError: on every process, if the trees cannot be saved, or the folder has something
        else.

    >>> import tempfile, torch, fpipe
    >>> stages = [fpipe.Stage(lambda p, x: x @ p["w"], name=name) for name in ("first", "last")]
    >>> pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    >>> folder = tempfile.mkdtemp() + "/checkpoint"
    >>> _ = fpipe.save(folder, pipe, params=[{"w": torch.eye(2)}, {"w": torch.ones(2)}], step=3)
    >>> params, step = fpipe.load(folder, pipe, "params", "step")
    >>> params[1], step
    ({'w': tensor([1., 1.])}, 3)
    """
    if params is None and not more:
        raise CheckpointError(f"save({path}) has nothing to save; give params=params, step=step")
    folder = folder_of(path, pipe)
    holding = agree(pipe, lambda: collect(Names(pipe), params, more))
    rows = everyone(pipe, holding.facts)
    facts = agree(pipe, lambda: merged(rows))
    copy = 0 if pipe.copies is None else pipe.copies.part
    number = copy * pipe.group.size + pipe.group.here[0]  # among the processes of all copies
    processes = sorted(everyone(pipe, [number, str(folder.absolute()), secrets.token_hex(8)]))
    _, first_folder, token = processes[0]  # the token is in the names of files of this checkpoint
    mark = folder / f".{token}.part"
    agree(pipe, lambda: _prepare(folder, mark) if is_first(pipe) else None)
    agree(pipe, lambda: _see(mark, first_folder))
    if is_first(pipe):
        mark.unlink(missing_ok=True)
    numbers = [number for number, *_ in processes]
    job = _Job(folder, token, number, numbers, pipe.group.timeout, shown=wait and number == 0)
    places = holding.places
    if not wait:
        places = [p._replace(tensor=p.tensor.detach().to("cpu", copy=True)) for p in places]
    # the end of the program, and a load of the folder, wait for such threads
    start = partial(in_thread, name=writer_of(folder), daemon=False)
    written = start(lambda: job.write(places))
    completed = start(lambda: job.complete(facts, written)) if is_first(pipe) else None
    saving = Saving(folder, pipe, written, completed)
    if wait:
        saving.wait()
    return saving


# ---- the folder ----
def _prepare(folder: Path, mark: Path) -> None:
    """An empty folder but for a mark, by which the other processes see that theirs is the same:
    what an incomplete checkpoint left there is removed.
    """
    if is_complete(folder):
        raise CheckpointError(
            f"{folder} has a complete checkpoint; save to another folder, or remove it first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(file.name for file in folder.iterdir() if not _OURS.fullmatch(file.name))
    if others:
        raise CheckpointError(
            f"{folder} has other files, such as {others[0]!r}; save to a new folder"
        )
    for file in folder.iterdir():
        file.unlink()
    mark.touch()


def _see(mark: Path, first_folder: str) -> None:
    """Wait for the mark of the first process; CheckpointError where it has another folder."""
    end = time.monotonic() + _SEEN
    while not mark.exists():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{first_folder} and {mark.parent} here are two folders; give one path, on a file "
                "system that all processes share"
            )
        time.sleep(_POLL)


# ---- threads ----
@dataclass(frozen=True)
class _Job:
    """What the threads of a process do for one checkpoint."""

    folder: Path
    token: str
    number: int
    numbers: Sequence[int]
    timeout: float
    shown: bool

    def write(self, places: Sequence[Place]) -> None:
        """Write the tensors of this process, and then the list of them."""
        mine = [place for place in places if place.write]
        groups = list(grouped(mine, lambda place: place.entry.bytes, MOST_FILE))
        files = dict[str, File]()
        pieces = list[object]()
        try:
            with progress(f"saving {self.folder}") if self.shown else nullcontext(iter) as track:
                for number, group in enumerate(track(groups)):
                    name = f"{self.number:05}-{number:05}.safetensors"
                    files[name], found = write(self.folder / name, [p.entry for p in group])
                    for place, where in zip(group, found, strict=True):
                        pieces.append([place.key, place.first, place.last, name, *where])
            # all places of a leaf hold the same; parts that begin and end elsewhere are not
            # compared
            hashes = [
                [p.key, p.first, p.last, p.where, sha256(to_bytes(p.tensor)).hexdigest()]
                for p in places
                if p.repeated
            ]
            self._list([files, pieces, hashes])
        except Exception as error:
            self._list(f"{type(error).__name__}: {error}")
            raise

    def _list(self, content: object) -> None:
        write_bytes(self._list_of(self.number), json.dumps(content).encode())

    def _list_of(self, number: int) -> Path:
        return self.folder / f"{number:05}.{self.token}.json"

    def complete(self, facts: Facts, written: Future[None]) -> None:
        """Wait for the lists of all processes and write the manifest."""
        lists = [self._list_of(number) for number in self.numbers]
        self._wait_for(lists, written)
        files = dict[str, File]()
        pieces = dict[str, list[Piece]]()
        seen = dict[object, tuple[str, str]]()
        for path in lists:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, str):
                raise CheckpointError(
                    f"a process could not write its part of {self.folder}: {content}"
                )
            files |= {name: File(*file) for name, file in content[0].items()}
            for key, *piece in content[1]:
                pieces.setdefault(key, []).append(Piece(*piece))
            for key, first, last, where, digest in content[2]:
                other, before = seen.setdefault((key, first, last), (where, digest))
                if before != digest:
                    raise CheckpointError(
                        f"{key!r} has different values on {other} and {where}, and is one "
                        "parameter; no checkpoint was written: apply the same updates to tied "
                        "leaves and to all ranks of a stage"
                    )
        leaves = {
            key: Leaf(dtype, tuple(shape), host, tuple(sorted(pieces.get(key, []))))
            for key, (dtype, shape, host, _) in sorted(facts.pop("leaves").items())
        }
        manifest = Manifest(leaves=leaves, files=files, **facts)
        manifest.check()
        flush_folder(self.folder)
        manifest.write(self.folder)
        for path in lists:
            path.unlink()

    def _wait_for(self, lists: Sequence[Path], written: Future[None]) -> None:
        until = time.monotonic() + self.timeout * 10
        while missing := [path for path in lists if not path.exists()]:
            if written.done():
                written.result()  # raises where not even the list could be written
            if not threading.main_thread().is_alive():  # a process may have failed
                until = min(until, time.monotonic() + _LAST)
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{missing[0]} did not appear; its process ended, or does not see this folder"
                )
            time.sleep(_POLL)
