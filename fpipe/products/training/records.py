# SPDX-License-Identifier: Apache-2.0
"""What ``fpipe.Loop`` logs of a step, and the file ``log.jsonl``. It must not know pipelines or
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...transforms import Transform
from ...transforms.norms import ClipState

#: What is logged of a step: its number (from 1), loss and seconds, and rate and norm where the
#: transform has them.
Record: TypeAlias = dict[str, Any]
T = TypeVar("T")


def part_of(state: Any, kind: type[T]) -> T | None:
    """The first state of this type among the states of a chain, and of the transforms in it.

    >>> part_of((0, (1.5, 2)), float), part_of((), float)
    (1.5, None)
    """
    if isinstance(state, kind):
        return state
    parts = state if isinstance(state, tuple) else ()
    return next((part for each in parts if (part := part_of(each, kind)) is not None), None)


class Before(NamedTuple):
    """What is known before a step: its learning rate, and the state of the clipping; None where
    there is none.
    """

    rate: float | None
    clipping: ClipState | None

    @classmethod
    def of(cls, tx: Transform, state: Any) -> Before:
        """From the state before the step, which the step may overwrite."""
        return cls(None if tx.rate is None else tx.rate(state), part_of(state, ClipState))

    def figures(self, state: Any) -> Record:
        """The rate, and from the state after the step the norm: none if the step was skipped before
        it was computed.
        """
        clipping = part_of(state, ClipState)
        norm = None if clipping is None or clipping is self.clipping else clipping.norm.item()
        return {
            name: value
            for name, value in (("rate", self.rate), ("norm", norm))
            if value is not None
        }


def log_to(path: Path, step: int) -> Callable[[Record], object]:
    """Appends records to a file, of which the lines up to a step stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = (
        [line for line in path.read_text().splitlines() if _number(line) <= step]
        if path.exists()
        else []
    )
    path.write_text("".join(f"{line}\n" for line in kept))

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
