# SPDX-License-Identifier: Apache-2.0
"""``fpipe.debug``: look at every result of every program, and at what a run leaves behind.

The program that computed a NaN is run once more, operation by operation, to name the operation.
Knows programs, instructions and registers; it changes no result of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..engine.execute import DEBUGGING
from ..errors import ActionError, FpipeError
from ..lowering.instruction import Check, Instruction, Registers, RunFn
from ..lowering.instructions import Run
from ..lowering.plan import Plan
from ..programs.operations import Input, fill
from ..programs.program import Program
from .streams import drawn

_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class debug:  # noqa: N801  (a function in all but name, as torch.no_grad is)
    """Check every result for NaN and infinity, and every run for values that it did not free. Slow;
    off by default.

    ``with debug():`` for a while, or ``debug()`` from here on, in this thread. The error names the
    first action whose result is wrong, the operation in it, and whether the NaN was in its inputs.

    Args:
        on: False stops it.

    Raises:
        ActionError: in a call, if a result is NaN or infinite.

    >>> from fpipe import grad, local, pipeline
    >>> pipe = pipeline([lambda p, x: (x * p).log()] * 2, loss=lambda y: y.sum(), microbatches=1,
    ...     group=local(2))
    >>> with debug():
    ...     grad(pipe)([torch.tensor(1.0), torch.tensor(-1.0)], torch.ones(1) * 2)
    Traceback (most recent call last):
    ...
    fpipe.errors.ActionError: 1F0 (the forward of <lambda> (float32[]; float32[1]), microbatch 0)
    made NaN: ...
    """

    def __init__(self, on: bool = True):
        if not isinstance(on, bool):
            raise FpipeError(f"on={on!r:.100}; give True or False")
        self.before = DEBUGGING.get()
        DEBUGGING.set(on)

    def __enter__(self) -> debug:
        return self

    def __exit__(self, *error: object) -> None:
        DEBUGGING.set(self.before)


def check(
    ins: Instruction,
    box: Sequence[object],
    out: Sequence[object],
    random: Tensor | None,
) -> None:
    """Raise ActionError where a program's results, or the gradients that it added to, hold NaN or
    infinity.

    ``box`` are the inputs of the program, ``random`` the state of the random stream before it. An
    infinity that F saves or returns may be intended, as in a mask; in a loss or a gradient it is an
    error.
    """
    assert isinstance(ins.op, Run) and ins.action is not None
    program = ins.op.program
    action = ins.action
    roles = ins.op.owner.roles
    values = dict(zip(program.inputs, box, strict=True))
    added = [name for name in values if name in roles and roles[name].role == "grad"]
    results = dict(zip(program.outputs, out, strict=True))
    for name, value in (*results.items(), *((name, values[name]) for name in added)):
        scalar = isinstance(value, Tensor) and value.dim() == 0
        finite = program.name in "BIW" or (program.name == "F" and scalar)
        wrong = _wrong(value, infinity=finite)
        if wrong:
            wrong_inputs = [n for n in values if n not in added and _wrong(values[n])]
            given = [_meaning(n, roles.get(n)) for n in wrong_inputs]
            raise ActionError(
                f"{action._replace(op=program.name)} (the {_WORDS[program.name]} of "
                f"{program.stage or 'the stage'}, microbatch {action.microbatch}) made {wrong}: "
                f"{_origin(program, values, given, name, random)}"
            )


def _wrong(value: object, infinity: bool = True) -> str:
    """Which of "NaN" and "infinity" a value holds; empty for neither."""
    if not isinstance(value, Tensor) or not tree.is_floating(value):
        return ""
    if bool(value.isnan().any()):
        return "NaN"
    if infinity and bool(value.isinf().any()):
        return "infinity"
    return ""


# ---- which operation it was ----
def _origin(
    program: Program,
    values: Mapping[str, object],
    given: Sequence[str],
    name: str,
    random: Tensor | None,
) -> str:
    """Why a value is wrong: the inputs of the program, or its first operation with a wrong
    result.
    """
    if given:
        return f"it was handed {', '.join(given)} that held it or an infinity already"
    if not program.operations:
        return f"in its value {name!r}"

    def again(box):
        return _first_wrong(program, dict(zip(values, box, strict=True)))

    first, _ = drawn(again, list(values.values()), torch.device("cpu"), random)
    return first or f"in its value {name!r}, and not again when the program ran a second time"


def _first_wrong(program: Program, values: Mapping[str, object]) -> str:
    """The first operation of a program with a wrong result; empty if there is none."""
    env = {**program.constants, **values}
    for number, operation in enumerate(program.operations, 1):
        target = operation.target
        with torch.no_grad():
            value = target(*fill(operation.args, env), **fill(operation.kwargs, env))
        env[operation.name] = value
        items = value if isinstance(value, (tuple, list)) else (value,)
        wrong = next(filter(None, map(_wrong, items)), "")
        if wrong:
            packet = getattr(target, "overloadpacket", target)
            what = getattr(packet, "__name__", str(packet))
            ranges = ", ".join(_range(env[name]) for name in operation.inputs) or "nothing"
            count = len(program.operations)
            return f"first {wrong} in {what} (operation {number} of {count}), given {ranges}"
    return ""


def _range(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    shape = tree.brief(value)
    if not value.numel() or value.is_complex():
        return shape
    low, high = value.aminmax()
    return f"{shape} from {low.item():.3g} to {high.item():.3g}"


def _meaning(name: str, known: Input | None) -> str:
    """A program's name for an input in words."""
    if known is None:
        return f"the saved value {name!r}"
    words = {
        "param": "parameter leaf",
        "x": "input leaf",
        "side": "side input leaf",
        "state": "state leaf",
    }
    return f"{words.get(known.role, 'cotangent')} {known.leaf}"


# ---- what is not freed ----
def check_leaks(plan: Plan, r: Registers) -> None:
    """Raise where, after a whole run, a slot holds neither a fed value nor a result, or a receive
    was never awaited.
    """
    known = {*plan.feeds.values(), *plan.results.values()}
    left = [slot for slot in range(plan.slots) if r.slots[slot] is not None and slot not in known]
    receives = [*r.receives, *r.collectives, *r.streams]
    if left or receives:
        raise FpipeError(
            f"rank {plan.rank} ran its plan and left slots {left} full and receives {receives} "
            "open; this is a mistake of fpipe and not yours: please report it with the schedule"
        )


def checked(run: RunFn, check: Check, ins: Instruction) -> RunFn:
    """A program that calls ``check`` with its inputs and outputs."""
    random = ins.program is not None and ins.program.random

    def checked(box: list[Any]) -> Sequence[Any]:
        args = list(box)
        state = torch.get_rng_state() if random else None
        out = run(box)
        check(ins, args, out, state)
        return out

    return checked
