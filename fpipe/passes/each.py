# SPDX-License-Identifier: Apache-2.0
"""``each=``: a function of the caller gets the outputs of each microbatch, and what the loss
returned, as soon as they are computed. They are no results of the plan then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..actions.action import Action
from ..engine.outputs import RunResults
from ..engine.prepare import Prepared
from ..errors import StageError
from ..lowering.builder import Builder, outputs_of
from ..lowering.instruction import Instruction, Machine, Opcode, StepFn
from ..lowering.instructions import step_of
from ..lowering.keys import Key
from ..lowering.plan import Feature
from ..programs.tensor_state import versions


class Each(Feature):
    """Emits EACH after the last forward of a microbatch."""

    def after(self, action: Action) -> None:
        builder: Builder = self.builder
        (stage, op, mb) = action
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
        builder: Builder = self.builder
        passed = set[Key]()
        schedule = builder.job.schedule
        for mb in range(schedule.units):
            kind = builder.job.kind(mb)
            if schedule.placement.path(mb)[-1] != builder.rank:
                continue
            if kind.loss is None:
                passed.update(outputs_of(kind, mb))
            else:
                passed.update(builder.of_loss(kind.loss, mb)[1:])
        return (key for key in keys if key not in passed)


_PASS_ON = """
values = [{reads}]
{free}
note(text)
r.each(mb, values)
"""


@dataclass(frozen=True, slots=True)
class PassOn(Opcode):
    """EACH: pass what is read to the caller's function."""

    kind = "EACH"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        assert ins.action is not None
        note = machine.group.notes(machine.rank)
        text = f"each= after {ins.action}"
        return step_of(_PASS_ON, ins, note=note, text=text, mb=ins.action.microbatch)


# ---- the caller's function ----
def caller(results: RunResults) -> Callable[[int, list[Any]], None]:
    """What EACH calls: it passes a microbatch's output, and what the loss returned, to the
    function of the caller, whose result is entered into ``results``. No reference is kept.
    """
    call = results.call
    fn = call.each
    assert fn is not None

    def each(mb: int, values: list[Any]) -> None:
        before = versions(values)
        arguments = _arguments(results.prepared, mb, results.apart(values, set()))
        results.returned[int(mb)] = fn(mb, *arguments)
        if call.mode == "grad" and versions(values) != before:
            raise StageError(
                "it wrote into the output or the loss, which the backward needs; change a copy"
            )
        values.clear()

    return each


def _arguments(prepared: Prepared, mb: int, values: Sequence[Any]) -> tuple[Any, ...]:
    """The output of a microbatch and, with a loss, what that returned."""
    output = prepared.output(mb)
    loss = prepared.loss[prepared.request.kind_of[mb]]
    count = len(output.avals)
    y = output.fill(values[:count])
    rest = values[count:]
    if loss is None:
        return (y,)
    if loss.extra is not None:
        return y, tuple(rest)
    return y, loss.outputs.y.fill(rest)


def in_order(results: RunResults) -> list[Any] | None:
    """What ``each`` returned, in microbatch order, where it was called; with outputs="everywhere",
    on every rank.
    """
    returned = results.returned
    config = results.config
    if config.outputs == "everywhere" and not config.local:
        parts = config.group.gather_objects(returned)
        returned = {mb: value for part in parts for mb, value in part.items()}
    if returned:
        return [returned.get(mb) for mb in range(results.units)]
    return None
