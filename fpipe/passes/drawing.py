# SPDX-License-Identifier: Apache-2.0
"""Programs that draw random numbers: each run has a stream of its own, by ``seed=``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ..actions.unit import Slice
from ..lowering.instruction import Instruction, Machine, Registers, RunFn
from ..lowering.instructions import Run
from .streams import drawn


def drawing(
    op: Run,
    run: RunFn,
    ins: Instruction,
    machine: Machine,
) -> Callable[[Registers, list[Any]], Sequence[Any]]:
    """Run a program that draws on the stream of its stage, microbatch and letter."""
    assert ins.action is not None
    place = (op.stage, numbered(ins.action.microbatch, machine.first), op.program.name)
    # a segment goes on with the stream of the one before
    resumes, leaves = op.program.stream or (False, False)

    def draw(r: Registers, inputs: list[Any]) -> Sequence[Any]:
        if r.seed is None:
            return drawn(run, inputs, machine.device, None)[0]
        start = r.streams.pop(place) if resumes else seed_of(r.seed, *place)
        out, state = drawn(run, inputs, machine.device, start, leaves)
        if state is not None:
            r.streams[place] = state
        return out

    return draw


def numbered(microbatch: int, first: int = 0) -> str:
    """A microbatch, or a slice of one, among those of all copies of the pipeline; ``first`` is the
    first one here.

    >>> numbered(3, 8), numbered(Slice(3, 1, of=2), 8)
    ('11', '11.1')
    """
    if isinstance(microbatch, Slice):
        return f"{first + microbatch.microbatch}.{microbatch.slice}"
    return str(first + microbatch)


def seed_of(seed: int, stage: int, microbatch: str, letter: str) -> int:
    """The seed of one run of a program, as the documentation of ``seed=`` states it."""
    text = f"{seed}/{stage}/{microbatch}/{letter}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
