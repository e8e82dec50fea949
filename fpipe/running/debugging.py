# SPDX-License-Identifier: Apache-2.0
"""``fpipe.debug``: look at every result of every program, and at what a run leaves behind.

The program that computed a NaN is run once more, operation by operation, to name the operation. Knows programs,
instructions and registers; it changes no result of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..errors import ActionError, FpipeError
from ..plans.plan import Instruction, Plan
from ..programs.program import Program
from .registers import Registers

_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class _Flag:
    on = False


class debug:  # noqa: N801  (a function in all but name, as torch.no_grad is)
    """Check every result for NaN and infinity, and every run for values that it did not free. Slow; off by default.

    ``with debug():`` for a while, or ``debug()`` from here on, or ``debug(False)`` to stop. The error names the first
    action whose result is wrong, the operation in it, and whether the NaN was in its inputs.

    >>> from fpipe import grad, local, pipeline
    >>> pipe = pipeline([lambda p, x: (x * p).log()] * 2, loss=lambda y: y.sum(), microbatches=1, group=local(2))
    >>> with debug():
    ...     grad(pipe)([torch.tensor(1.0), torch.tensor(-1.0)], torch.ones(1) * 2)
    Traceback (most recent call last):
    ...
    fpipe.errors.ActionError: 1F0 (the forward of <lambda> (float32[]; float32[1]), microbatch 0) made NaN: ...
    """

    def __init__(self, on: bool = True):
        self.before, _Flag.on = _Flag.on, on

    def __enter__(self) -> debug:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _Flag.on = self.before


def debugging() -> bool:
    """Whether ``debug`` is on."""
    return _Flag.on


def check(ins: Instruction, box: Sequence[Any], out: Sequence[Any], random: torch.Tensor | None) -> None:
    """Raise ActionError where a program's results, or the gradients that it added to, hold NaN or infinity.

    ``box`` are the inputs of the program, ``random`` the state of the random stream before it. An infinity that F
    saves or returns may be intended, as in a mask; in a loss or a gradient it is an error.
    """
    program = ins.program
    assert program is not None and ins.action is not None
    added = [(name, value) for name, value in zip(program.inputs, box, strict=True) if _gradient(name)]
    for name, value in (*zip(program.outputs, out, strict=True), *added):
        found = _nan(value) or (_infinity(value) if _must_be_finite(program, value) else "")
        if found:
            action = ins.action
            raise ActionError(
                f"{action._replace(op=program.name)} (the {_WORDS[program.name]} of {program.stage or 'the stage'}, "
                f"microbatch {action.microbatch}) made {found}: {_origin(program, box, name, random)}"
            )


def _gradient(name: str) -> bool:
    return name[:1] == "g" and name[1:].isdigit()


def _must_be_finite(program: Program, value: Any) -> bool:
    return program.name in "BIW" or (program.name == "F" and isinstance(value, torch.Tensor) and value.dim() == 0)


def _nan(value: Any) -> str:
    return "NaN" if _floating(value) and bool(value.isnan().any()) else ""


def _infinity(value: Any) -> str:
    return "infinity" if _floating(value) and bool(value.isinf().any()) else ""


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


# ---- which operation it was -----------------------------------------------------------------------------------------
def _origin(program: Program, box: Sequence[Any], name: str, random: torch.Tensor | None) -> str:
    """Why a value is wrong: the inputs of the program, or its first operation with a wrong result."""
    pairs = [(n, value) for n, value in zip(program.inputs, box, strict=True) if not _gradient(n)]
    given = [n for n, value in pairs if _nan(value) or _infinity(value)]
    if given:
        return f"it was handed {', '.join(map(_meaning, given))} that held it or an infinity already"
    if not program.nodes:
        return f"in its value {name!r}"
    before = torch.get_rng_state()
    if random is not None:
        torch.set_rng_state(random)
    try:
        for index, (node, given, value) in enumerate(_values(program, box)):
            items = value if isinstance(value, (tuple, list)) else (value,)
            found = next((word for item in items if (word := _nan(item) or _infinity(item))), "")
            if found:
                what = getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))
                inputs = ", ".join(map(_range, given)) or "nothing"
                return f"first {found} in {what} (operation {index + 1} of {len(program.nodes)}), given {inputs}"
    finally:
        torch.set_rng_state(before)
    return f"in its value {name!r}, and not again when the program was gone through a second time"


def _values(program: Program, box: Sequence[Any]) -> Iterator[tuple[fx.Node, list[Any], Any]]:
    """Run a program once more, and yield each operation with its inputs and its value."""
    env = dict(program.constants) | dict(zip(program.inputs, box, strict=True))
    with torch.no_grad():
        for node in program.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), lambda used: env[used.name])
            assert callable(node.target)
            env[node.name] = node.target(*args, **kwargs)
            yield node, [env[used.name] for used in node.all_input_nodes], env[node.name]


def _range(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not value.numel() or value.is_complex():
        return shape
    low, high = value.aminmax()
    return f"{shape} from {low.item():.3g} to {high.item():.3g}"


def _meaning(name: str) -> str:
    """A program's name for an input in words."""
    letter, digits = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    words = {"p": "parameter leaf", "x": "input leaf", "k": "side input leaf", "t": "state leaf", "dy": "cotangent"}
    return f"{words[letter]} {digits}" if letter in words and digits else f"the saved value {name!r}"


# ---- what is not freed --------------------------------------------------------------------------------------------
def check_leaks(plan: Plan, r: Registers) -> None:
    """Raise where, after a whole run, a slot holds neither a fed value nor a result, or a receive was never awaited."""
    known = {*plan.feeds.values(), *plan.results.values()}
    left = [slot for slot in range(plan.slots) if r.slots[slot] is not None and slot not in known]
    receives = [*r.receives, *r.collectives, *r.streams]
    if left or receives:
        raise FpipeError(
            f"rank {plan.rank} ran its plan and left slots {left} full and receives {receives} open; this is a "
            "mistake of fpipe and not yours: please report it with the schedule"
        )
