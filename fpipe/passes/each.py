# SPDX-License-Identifier: Apache-2.0
"""``each=``: a function of the caller gets the outputs of each microbatch, and what the loss
returned, as soon as they are computed. They are no results of the plan then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..actions.action import Action
from ..lowering.builder import Builder, outputs_of
from ..lowering.instructions import Instruction, Machine, Op, Registers, StepFn
from ..lowering.keys import Key
from ..lowering.plan import Feature


@dataclass(frozen=True)
class Each(Feature):
    """Emits EACH after the last forward of a microbatch."""

    def start(self, builder: Builder) -> Feature:
        return _OnRank(builder)


class _OnRank(Feature):
    def __init__(self, builder: Builder):
        self.builder = builder

    def after(self, action: Action) -> None:
        builder, (stage, op, mb) = self.builder, action
        if op != "F" or stage != builder.job.stages - 1:
            return
        kind = builder.job.kind(mb)
        values = list(outputs_of(kind, mb))
        builder.fetch(values)
        if kind.loss is not None:
            names = (*kind.loss.ys, kind.loss.extra)
            values += [builder.key(kind.loss, stage + 1, mb, name) for name in names if name]
        builder.out.append(Instruction(PassOn(), action, tuple(values)))

    def results(self, keys: Iterable[Key]) -> Iterator[Key]:
        """Of a loss the first value stays a result: the total needs it."""
        builder, passed = self.builder, set[Key]()
        for mb in range(builder.job.schedule.units):
            kind = builder.job.kind(mb)
            if builder.job.schedule.placement.path(mb)[-1] == builder.rank:
                rest = () if kind.loss is None else builder.of_loss(kind.loss, mb)[1:]
                passed.update(outputs_of(kind, mb) if kind.loss is None else rest)
        return (key for key in keys if key not in passed)


@dataclass(frozen=True, slots=True)
class PassOn(Op):
    """EACH: pass what is read to the caller's function."""

    kind = "EACH"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        assert ins.action is not None
        reads, frees, note = ins.reads, ins.frees, machine.group.notes(machine.rank)
        mb, text = ins.action.microbatch, f"each= after {ins.action}"

        def step(r: Registers) -> None:
            tensors = [r.slots[i] for i in reads]
            for i in frees:
                r.slots[i] = None
            note(text)
            assert r.each is not None
            r.each(mb, tensors)

        return step
