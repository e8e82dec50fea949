# SPDX-License-Identifier: Apache-2.0
"""The loss is sent as soon as all of it is computed, where sends complete at once. All ranks would
wait for the last stage at the end of a step otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lowering.builder import Builder
from ..lowering.instruction import Instruction, Machine, Op, Registers, StepFn
from ..lowering.instructions import Send
from ..lowering.plan import Feature


@dataclass(frozen=True)
class EarlyLoss(Feature):
    """Emits LOSS on the rank that computes the whole loss."""

    def start(self, builder: Builder) -> Feature:
        return _OnRank(builder)


class _OnRank(Feature):
    def __init__(self, builder: Builder):
        self.builder = builder

    def finish(self) -> None:
        """The next values that other ranks compute with are sent first: they wait for those."""
        job = self.builder.job
        out = self.builder.out
        rank = self.builder.rank
        if job.scalar_ranks() != [rank]:
            return
        keys = tuple(scalar.key for scalar in job.scalars(rank))
        writing = (n for n, ins in enumerate(out) if not set(keys).isdisjoint(ins.writes))
        last = max(writing, default=-1)
        if last >= 0 and out[last].program is not None:
            sends = (n for n in range(last + 1, len(out)) if isinstance(out[n].op, Send))
            out.insert(next(sends, last) + 1, Instruction(SendLoss(), reads=keys))


@dataclass(frozen=True, slots=True)
class SendLoss(Op):
    """LOSS: send the loss, whose parts are read, to the other ranks."""

    kind = "LOSS"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        return _send_loss


def _send_loss(r: Registers) -> None:
    assert r.send_loss is not None
    r.loss = r.send_loss()
