# SPDX-License-Identifier: Apache-2.0
"""Rows of actions for microbatches in slices of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .action import Action, AnyAction, Row, joined
from .unit import Slice


def sliced_rows(rows: Sequence[Row], slices: int) -> tuple[Row, ...]:
    """The rows with each action as one for each slice, in order for F and in reverse for others."""
    return tuple(tuple(cell for action in row for cell in _sliced(action, slices)) for row in rows)


def _sliced(action: AnyAction, slices: int) -> Iterator[AnyAction]:
    """An action as one for each slice. Parts of a fused action may go in different directions."""
    for step in range(slices):
        parts: list[Action] = []
        for part in action.parts:
            at = step if part.op == "F" else slices - 1 - step
            parts.append(part._replace(microbatch=Slice(part.microbatch, at, slices)))
        yield joined(parts)
