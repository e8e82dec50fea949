# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: written with a hash for each tensor, read by ranges, whoever wrote them.

A file is 8 bytes with the length of its header, the header as JSON, and the data of the tensors in
sequence. Files are opened in one folder, by names without a path, and links are not followed. Knows
no checkpoint and no rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..collectives.codec import from_bytes, is_dense, to_bytes
from ..errors import CheckpointError

T = TypeVar("T")
_LENGTH = struct.Struct("<Q")
#: Bytes of a header at most, as in the safetensors package.
MOST_HEADER = 100_000_000
_BLOCK = 8 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
#: Names of dtypes in the files. complex128 has none: it is written as pairs of float64.
_NAMES = """
float64 F64
float32 F32
float16 F16
bfloat16 BF16
int64 I64
int32 I32
int16 I16
int8 I8
uint8 U8
bool BOOL
float8_e4m3fn F8_E4M3
float8_e5m2 F8_E5M2
complex64 C64
uint64 U64
uint32 U32
uint16 U16
float8_e4m3fnuz F8_E4M3FNUZ
float8_e5m2fnuz F8_E5M2FNUZ
"""
NAMES = {getattr(torch, name): code for name, code in map(str.split, _NAMES.strip().splitlines())}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Header(NamedTuple):
    """What a file says of one tensor; ``begin`` and ``end`` are bytes of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Entry(NamedTuple):
    """A tensor to write: its name, dtype and shape, and a function that returns it when it is its
    turn.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """The size of its data."""
        return prod(self.shape) * self.dtype.itemsize


class File(NamedTuple):
    """A file of tensors: its bytes, those before the data, and the hash of these."""

    size: int
    header: int
    sha256: str


# ---- writing ----
def write(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> tuple[File, list[tuple[int, int, str]]]:
    """Write a new file and flush it to the disk; the data of one tensor are in memory at a time.

    Returns:
        The file, and first byte, end and hash of each tensor.
    """
    rows: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        dtype = NAMES.get(entry.dtype, "F64")
        shape = list(entry.shape)
        if entry.dtype is torch.complex128:
            shape.append(2)
        rows[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + entry.bytes]}
        at += entry.bytes
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8 bytes
    head = _LENGTH.pack(len(text)) + text
    tensors = []
    begin = len(head)
    with open(path, "xb") as file:
        file.write(head)
        for entry in entries:
            raw = to_bytes(entry.read())
            if len(raw) != entry.bytes:
                raise CheckpointError(
                    f"{entry.name!r} has {len(raw)} bytes, and its shape {entry.bytes}"
                )
            file.write(raw)
            tensors.append((begin, begin + len(raw), hashlib.sha256(raw).hexdigest()))
            begin += len(raw)
        file.flush()
        os.fsync(file.fileno())
    return File(begin, len(head), hashlib.sha256(head).hexdigest()), tensors


# ---- reading ----
@contextmanager
def opened(folder: Path, name: str) -> Iterator[BufferedReader]:
    """A regular file directly in a folder; CheckpointError for a link, a device, a path, or where
    there is none.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is no name of a file in {folder}; such a checkpoint is not read"
        )
    path = folder / name
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror
        if path.is_symlink():
            why = "a symbolic link, which is not followed"
        raise CheckpointError(f"{path}: {why}; use a complete copy of the checkpoint") from error
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise CheckpointError(f"{path} is not a regular file; such a checkpoint is not read")
        yield file


def size_of(file: BufferedReader) -> int:
    """The bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def header(file: BufferedReader, what: str) -> dict[str, Header]:
    """The tensors of a file by name, in the order of their data.

    Raises CheckpointError for anything that safetensors does not allow: a header that is too long
    or is not JSON, tensors that overlap, leave a gap or do not have the bytes of their shape.
    """
    try:
        length = _LENGTH.unpack(exactly(file, 0, _LENGTH.size))[0]
        if not 2 <= length <= min(MOST_HEADER, size_of(file) - _LENGTH.size):
            raise ValueError(f"a header of {length} bytes in a file of {size_of(file)}")
        rows = json.loads(exactly(file, _LENGTH.size, length), object_pairs_hook=_unique)
        if not isinstance(rows, dict):
            raise ValueError("its header is no object")
        rows.pop("__metadata__", None)
        at = _LENGTH.size + length
        tensors = [(name, _entry(row, at)) for name, row in rows.items()]
        tensors.sort(key=lambda tensor: (tensor[1].begin, tensor[1].end))
        for name, entry in tensors:
            if entry.begin != at:
                raise ValueError(f"{name!r} begins at byte {entry.begin}, not at {at}")
            at = entry.end
        if at != size_of(file):
            raise ValueError(f"its data end at byte {at} of {size_of(file)}")
        return dict(tensors)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{what} is no safetensors file: {error!s:.300}; files of other formats are not read"
        ) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    rows = dict(pairs)
    if len(rows) < len(pairs):
        raise ValueError("a name occurs twice")
    return rows


def _entry(row: Any, start: int) -> Header:
    dtype = DTYPES[row["dtype"]]
    shape = row["shape"]
    begin, end = row["data_offsets"]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape!r} at {begin!r} to {end!r}")
    if prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for {row['dtype']}{shape}")
    return Header(dtype, tuple(shape), start + begin, start + end)


def exactly(file: BufferedReader, begin: int, count: int) -> bytearray:
    """Bytes of a file; ValueError where it is shorter."""
    file.seek(begin)
    if begin + count <= size_of(file):  # no memory for more than there is
        raw = bytearray(count)
        if file.readinto(raw) == count:
            return raw
    raise ValueError(f"it ends before byte {begin + count}")


def hashed(
    file: BufferedReader,
    begin: int,
    end: int,
    low: int = 0,
    high: int = 0,
) -> tuple[bytearray, str]:
    """Bytes ``low`` to ``high`` of those from ``begin`` to ``end``, and the hash of all."""
    digest = hashlib.sha256()
    kept = bytearray(high - low)
    for at in range(0, end - begin, _BLOCK):
        block = exactly(file, begin + at, min(_BLOCK, end - begin - at))
        digest.update(block)
        first = max(low, at)
        last = min(high, at + len(block))
        if first < last:
            kept[first - low : last - low] = block[first - at : last - at]
    return kept, digest.hexdigest()


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    folder: Path
    file: str
    header: Header

    def __call__(self) -> Tensor:
        """Read it."""
        dtype, shape, begin, end = self.header
        with opened(self.folder, self.file) as file:
            return from_bytes(exactly(file, begin, end - begin), dtype, shape)


def stored(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of those in a folder, by name; their data are not read.

    A link that is given as the path is followed, and in a folder of the cache of the Hugging Face
    hub its links to the blobs of the same model. Other links in a folder are not.

    Raises:
        CheckpointError: if there are none, a file is no safetensors file, or two have a tensor of
        one name.
    """
    place = Path(path)
    if place.is_file():
        files = [Path(os.path.realpath(place))]
    else:
        files = [_blob(file) for file in sorted(place.glob("*.safetensors"))]
    if not files:
        raise CheckpointError(
            f"{place} is no safetensors file and no folder of such; formats with pickles are not "
            "read"
        )
    tensors = {}
    for path in files:
        with opened(path.parent, path.name) as file:
            for name, entry in header(file, str(path)).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{name!r} is in {tensors[name].file} and in {path.name}; remove one"
                    )
                tensors[name] = Stored(path.parent, path.name, entry)
    return tensors


def _blob(path: Path) -> Path:
    """The file behind a link in the cache of the hub: ``snapshots/REVISION/FILE`` leads to
    ``blobs``, beside ``snapshots``.
    """
    target = Path(os.path.realpath(path))
    beside = [folder.parent for folder in path.absolute().parents if folder.name == "snapshots"]
    if any(target.parent == Path(os.path.realpath(model / "blobs")) for model in beside):
        return target
    return path


def plain(tensor: Tensor, name: str) -> Tensor:
    """The tensor, if it can be written; CheckpointError for other layouts and for classes with
    tensors inside.
    """
    if not is_dense(tensor) or tensor.dtype not in {*NAMES, torch.complex128}:
        kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}, {tensor.device}"
        raise CheckpointError(
            f"{name}: a tensor ({kind}) that safetensors cannot hold; save a plain dense tensor"
        )
    return tensor


def grouped(entries: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Consecutive entries in lists of at most ``most`` bytes each, or of one entry.

    >>> list(grouped([3, 1, 9, 1], lambda n: n, 4))
    [[3, 1], [9], [1]]
    """
    row: list[T] = []
    held = 0
    for entry in entries:
        if row and held + size(entry) > most:
            yield row
            row = []
            held = 0
        row.append(entry)
        held += size(entry)
    if row:
        yield row
