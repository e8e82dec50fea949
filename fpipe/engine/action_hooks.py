# SPDX-License-Identifier: Apache-2.0
"""Functions of the caller that run the actions of a schedule. Knows plans, no pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from ..errors import WeaveError
from ..lowering.instructions import Registers, Run, StepFn
from .execute import WATCH, Executable

#: A function of the text of an action, as "1F0", and of a function that runs it.
ActionHook: TypeAlias = Callable[[str, Callable[[], None]], object]


@contextmanager
def around_actions(hook: ActionHook) -> Iterator[None]:
    """Run each action F, B, I or W of the calls inside through a function.

    Args:
        hook: ``hook(action, run)`` calls ``run()`` once. Parts of fused actions are actions too,
            unless they are woven.

    Raises:
        WeaveError: if the function does not run an action once; the call raises it.

    >>> import torch
    >>> from fpipe import local, pipeline
    >>> pipe, seen = pipeline([torch.mul] * 2, microbatches=1, group=local(2)), []
    >>> with around_actions(lambda action, run: (seen.append(action), run())):
    ...     y = pipe([torch.tensor(2.0)] * 2, torch.ones(1))
    >>> seen
    ['0F0', '1F0']
    """

    def watch(bound: Executable, steps: Sequence[StepFn], first: int) -> Sequence[StepFn]:
        hooked = []
        for step, ins in zip(steps, bound.plan.instructions[first:], strict=False):
            action, op = ins.action, ins.op
            if action is not None and isinstance(op, Run) and not op.program.label:
                of_loss = op.stage != action.stage
                step = step if of_loss else _through(hook, step, str(action))
            hooked.append(step)
        return hooked

    token = WATCH.set(watch)
    try:
        yield
    finally:
        WATCH.reset(token)


def _through(hook: ActionHook, step: StepFn, action: str) -> StepFn:
    def run_step(registers: Registers):
        results = []

        def run() -> None:
            results.append(step(registers))

        hook(action, run)
        if len(results) != 1:
            raise WeaveError(
                f"the function around actions ran {action} {len(results)} times; run it once"
            )
        return results[0]

    return run_step
