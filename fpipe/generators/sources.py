# SPDX-License-Identifier: Apache-2.0
"""From what a schedule can be made, and how one is read from a file."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from ..actions import Track
from ..actions.text import parse_csv, parse_rows
from ..schedule import Schedule, read_text

#: The names of the catalogue, for completion in editors; a registered name is any text.
Name: TypeAlias = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "ZBV",
    "DualPipeV",
    "Eager1F1B",
    "Overlapped1F1B",
    "ZBH1",
    "ZBH2",
    "ZB1P",
    "ZB2P",
    "VHalf",
    "VMin",
    "DualPipe",
    "Chimera",
    "Hanayo",
    "Seq1F1B",
    "SeqZBH1",
    "auto",
]
Source: TypeAlias = Name | str | PathLike[str] | Schedule | Callable[[int, int], Schedule]


def read_schedule(path: str | PathLike[str], track: Track = iter) -> Schedule:
    """The schedule in a text file: CSV, or the text of ``str(schedule)``.

    ``track`` yields the lines, and may show how many were read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plan.txt")
    >>> _ = file.write_text("[0F0, 0B0]")
    >>> read_schedule(file)
    Schedule(plan, ranks=1, microbatches=1, stages=1)
    """
    text = read_text(path)
    if text[:4096].lstrip(" \t\r\n").startswith("["):
        parse = parse_rows
    else:
        parse = parse_csv
    return Schedule(parse(text, track), name=Path(path).stem)
