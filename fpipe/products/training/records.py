# SPDX-License-Identifier: Apache-2.0
"""What ``fpipe.Loop`` logs of a step, and the file ``log.jsonl``. It must not know pipelines or
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ... import Transform
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
    """Appends records to a file, of which the lines up to a step stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lines = path.read_text().splitlines()
    else:
        lines = []
    path.write_text("".join(f"{line}\n" for line in lines if _number(line) <= step))

    def log(record: Record) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    return log


def _number(line: str) -> float:
    """The step of a line of a log; infinite for one that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
