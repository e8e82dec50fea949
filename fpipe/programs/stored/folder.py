# SPDX-License-Identifier: Apache-2.0
"""``fpipe.cache``: a folder of traces, shared by the processes and the runs of a job.

A file holds one trace. Its name is a digest of all that the trace depends on, and its first line a
digest of the rest: a file that is damaged or of another version counts as missing. Reading a file
runs no code that it contains. Knows files and traces; no ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..families import Family
from ..signature import Signature
from ..stage_programs import Programs
from .identity import environment, flags, identity
from .records import (
    family_as_data,
    family_from_data,
    programs_as_data,
    programs_from_data,
    signature_as_data,
)
from .text import UnstorableError, to_text

#: The environment variable that names the folder; other processes inherit it.
VARIABLE = "FPIPE_CACHE"
#: Bytes of a file that is read, and files of one kind that are looked at, at most.
MOST, FILES = 1 << 28, 16


def cache(path: str | PathLike[str] | None) -> None:
    """Keep traces in a folder, so that another start of the same program traces nothing.

    The environment variable ``FPIPE_CACHE`` does the same. Traces are found by the code of the
    stage, what it refers to, the versions of the packages that it uses, its options, and the
    shapes; where one of them differs, the stage is traced and the trace is added. Several processes
    may use one folder at the same time. No code is read from it, but who can write to it decides
    what a stage computes: do not use a folder that others can write to. A stage that refers to an
    object without a description, such as an open file, is traced in every run.

    Args:
        path: the folder, which is created; ``None``: traces stay in memory.

    >>> import fpipe, tempfile
    >>> fpipe.cache(tempfile.mkdtemp())
    >>> fpipe.cache(None)
    """
    if path is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = os.path.abspath(path)


@dataclass(frozen=True)
class Entry:
    """The traces of one function with its options, for all sizes of one signature.

    ``tensors`` are those that the function holds; ``label`` names it in messages.
    """

    folder: Path
    tensors: Sequence[torch.Tensor]
    label: str

    def programs(self, signature: Signature) -> Programs | None:
        """The trace of exactly this signature."""

        def build(data):
            return programs_from_data(data, self.tensors, self.label, f"{self.label} {signature}")

        return _read(self.folder / _name(signature), build)

    def families(self) -> Iterator[Family]:
        """The traces for many sizes."""
        for path in sorted(self.folder.glob("sizes-*.json"))[:FILES]:

            def build(data):
                return family_from_data(data, self.tensors, self.label, self.label)

            if (family := _read(path, build)) is not None:
                yield family

    def keep(self, signature: Signature, programs: Programs) -> None:
        """Write the trace of a signature."""
        with suppress(UnstorableError):
            _write(self.folder / _name(signature), programs_as_data(programs, self.tensors))

    def keep_family(self, family: Family) -> None:
        """Write a trace for many sizes."""
        with suppress(UnstorableError):
            _write(
                self.folder / f"sizes-{_name(family.signature)}",
                family_as_data(family, self.tensors),
            )


def entry(
    label: str, fn: Callable[..., Any], options: object, signature: Signature
) -> Entry | None:
    """Where the traces of a function are; ``None`` without a folder, and for what has no
    identity.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    try:
        known, tensors = identity(fn)
        parts = (
            environment(),
            flags(),
            known,
            repr(options),
            [to_text(each) for each in signature.skeleton],
        )
    except UnstorableError:
        return None
    key = _digest(repr(parts))
    return Entry(Path(root, key[:2], key), tensors, label)


def _name(signature: Signature) -> str:
    return f"{_digest(json.dumps(signature_as_data(signature)))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# ---- files ----
def _read(path: Path, build: Callable[[Any], Any]) -> Any:
    """What a file holds; ``None`` where there is none, or a damaged one."""
    try:
        with open(path, "rb") as file:
            head, _, body = file.read(MOST).partition(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(
            f"the trace in {path} cannot be read ({error}); its stage is traced", stacklevel=2
        )
        return None
    try:
        if hashlib.sha256(body).hexdigest().encode() != head:
            raise ValueError("its digest is another one")
        return build(json.loads(body))
    except Exception as error:  # whatever a damaged or forged file causes
        warnings.warn(
            f"the trace in {path} is damaged ({error}); its stage is traced, and the file is "
            "replaced",
            stacklevel=2,
        )
        return None


def _write(path: Path, data: dict[str, Any]) -> None:
    """Write a file as a whole; a folder that cannot be written to is no fault of the program that
    runs.
    """
    body = json.dumps(data, separators=(",", ":")).encode()
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        part.replace(path)
    except OSError as error:
        warnings.warn(
            f"a trace cannot be kept in {path.parent}: {error}; see fpipe.cache", stacklevel=2
        )
    finally:
        with suppress(OSError):
            part.unlink()
