# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: structures, leaves with the places of their data, files and hashes;
checked JSON.

It is written last, under its final name at once, and begins with the hash of the rest: a folder
with a manifest is a complete checkpoint, and a folder without one is none. This module must not
know pipelines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from .. import __version__
from ..actions import progress
from ..collectives.codec import DTYPES, MOST_LEVELS, Nodes
from ..errors import CheckpointError
from ._processes import AnyPath
from .files import File, exactly, hashed, opened, size_of

NAME = "manifest.json"
#: The number of this layout of manifests and files.
FORMAT = 1
#: Bytes of a manifest at most.
MOST = 1 << 30
_MOST_DEPTH = 3 * MOST_LEVELS + 9
_START = b'{"sha256": "'
_BETWEEN = b'",\n"manifest": '
_END = b"}\n"
_HASH = re.compile(r"[0-9a-f]{64}")


class Piece(NamedTuple):
    """Elements ``first`` to ``last`` of a flat leaf: in which file, at which bytes, with which
    hash.
    """

    first: int
    last: int
    file: str
    begin: int
    end: int
    sha256: str

    def read(self, folder: Path, key: str, low: int = 0, high: int = 0) -> bytearray:
        """Bytes ``low`` to ``high`` of its data, all of which are compared with their hash."""
        with opened(folder, self.file) as file:
            part, digest = hashed(file, self.begin, self.end, low, high)
        if digest != self.sha256:
            raise damaged(folder / self.file, f"the data of {key!r}")
        return part


class Leaf(NamedTuple):
    """A tensor: dtype and shape, whether it was on the host, and its pieces, in order."""

    dtype: str
    shape: tuple[int, ...]
    host: bool
    pieces: tuple[Piece, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Of its data."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    ``trees`` are the structures of what was saved, by name. Structures of parameters are in
    ``stages``, by the name of the stage, and in ``layers``, by list of blocks and number. ``slots``
    has what a tree like the parameters holds for each of them, by the path of that tree.
    """

    trees: Nodes
    leaves: Mapping[str, Leaf]
    stages: Nodes
    layers: Mapping[str, Nodes]
    slots: Mapping[str, Nodes]
    files: Mapping[str, File]
    fpipe: str = __version__
    format: int = FORMAT

    @cached_property
    def digest(self) -> str:
        """The hash of its text."""
        return hashlib.sha256(self._text()).hexdigest()

    def _text(self) -> bytes:
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(rows, indent=0, ensure_ascii=False).encode()

    def write(self, folder: Path) -> None:
        """Write it into a folder whose files are complete."""
        part = folder / f".{secrets.token_hex(8)}.part"
        with open(part, "xb") as file:
            file.write(_START + self.digest.encode() + _BETWEEN + self._text() + _END)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(folder)
        part.rename(folder / NAME)
        flush_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; CheckpointError where the checkpoint is incomplete or the
        manifest damaged.
        """
        if not is_complete(folder):
            why = "is no folder"
            if folder.is_dir():
                why = "has no manifest, so it was not completed"
            inside = sorted(file.parent.name for file in folder.glob(f"*/{NAME}"))
            other = f", such as {folder / inside[-1]}" if inside else ""
            raise CheckpointError(f"{folder} {why}; load a complete checkpoint{other}")
        with opened(folder, NAME) as file:
            try:
                if size_of(file) > MOST:
                    raise ValueError(f"{size_of(file)} bytes, at most {MOST}")
                return cls.parse(bytes(exactly(file, 0, size_of(file))))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{folder / NAME} is damaged or no manifest of fpipe: {error!s:.300}; load "
                    "another checkpoint"
                ) from error

    @classmethod
    def parse(cls, raw: bytes) -> Manifest:
        """The manifest from its bytes; ValueError and the like for all that ``write`` would not
        write.
        """
        text = raw.partition(_BETWEEN)[2].removesuffix(_END)
        if raw != _START + hashlib.sha256(text).hexdigest().encode() + _BETWEEN + text + _END:
            raise ValueError("its hash is another one")
        rows = json.loads(text)
        if rows.get("format") != FORMAT:
            raise ValueError(
                f"its format is {rows.get('format')!r}, and fpipe {__version__} reads {FORMAT}"
            )
        for nodes in (
            rows["trees"],
            rows["stages"],
            *rows["layers"].values(),
            *rows["slots"].values(),
        ):
            if not all(isinstance(node, list) for node in nodes.values()):
                raise ValueError("a structure is no list")
            _check_levels(list(nodes.values()), _MOST_DEPTH)
        rows["files"] = {name: File(*row) for name, row in rows["files"].items()}
        rows["leaves"] = {
            key: Leaf(dtype, tuple(shape), host, tuple(Piece(*piece) for piece in pieces))
            for key, (dtype, shape, host, pieces) in rows["leaves"].items()
        }
        manifest = cls(**rows)
        manifest.check()
        assert manifest.digest  # ValueError for text that is not Unicode
        return manifest

    def check(self) -> None:
        """Raise ValueError unless the pieces of each leaf are all of its elements, each within its
        file.
        """
        for key, leaf in self.leaves.items():
            is_shape = all(type(n) is int and n >= 0 for n in leaf.shape)
            if not is_shape or not isinstance(leaf.host, bool):
                raise ValueError(f"{key!r} has the shape {leaf.shape}")
            at = 0
            for piece in leaf.pieces:
                file = self.files[piece.file]
                elements = piece.last - piece.first
                size = piece.end - piece.begin
                if piece.first != at or elements * leaf.torch_dtype.itemsize != size:
                    raise ValueError(f"{key!r} has a gap at element {at}")
                inside = file.header <= piece.begin <= piece.end <= file.size
                if not inside or not _HASH.fullmatch(piece.sha256):
                    raise ValueError(f"{key!r} has data outside of {piece.file!r}")
                at = piece.last
            if at != prod(leaf.shape):
                raise ValueError(f"{key!r} has {at} of {prod(leaf.shape)} elements")

    # ---- the files ----
    def check_file(self, folder: Path, name: str) -> None:
        """Raise CheckpointError where size or header of a file are others than when it was
        written.
        """
        row = self.files[name]
        with opened(folder, name) as file:
            if size_of(file) != row.size or hashed(file, 0, row.header)[1] != row.sha256:
                raise damaged(folder / name, "its size or header")

    def faults(self, folder: Path) -> Iterator[str]:
        """What differs between the files and the manifest; every byte is read."""
        for name in self.files:
            try:
                self.check_file(folder, name)
            except CheckpointError as error:
                yield str(error)
        with progress(f"verifying {folder}") as track:
            for key, leaf in track(list(self.leaves.items())):
                for piece in leaf.pieces:
                    try:
                        piece.read(folder, key)
                    except (CheckpointError, ValueError) as error:
                        yield f"{key!r}: {error}"


def _check_levels(value: object, most: int) -> None:
    """Raise ValueError where JSON has more levels than ``write`` writes."""
    if most < 0:
        raise ValueError(f"more than {_MOST_DEPTH} levels")
    for part in value if isinstance(value, list) else ():
        _check_levels(part, most - 1)


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for data whose hash is another one."""
    return CheckpointError(
        f"{path} is damaged: {what} is not what was written; load another checkpoint"
    )


def flush_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_complete(folder: AnyPath) -> bool:
    """Whether a folder holds a complete checkpoint."""
    return (Path(folder) / NAME).is_file()


def discard(folder: AnyPath) -> None:
    """Make a checkpoint incomplete, if it is complete: the next one may be written there."""
    (Path(folder) / NAME).unlink(missing_ok=True)
