# SPDX-License-Identifier: Apache-2.0
"""Functions of the caller that run the actions of a schedule, as ``register_custom_function``
registers them.

They decide when an action runs and what happens around it; ``ctx.run(action)`` runs it. Knows
actions and steps; no modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...engine.execute import WATCH, Executable
from ...engine.steps import StepFn
from ...errors import WeaveError
from .orders import Action, ComputationType

#: A function of an action and its context.
CustomFunction: TypeAlias = Callable[[Any, "Context"], object]


@dataclass
class Context:
    """What a custom function gets: the schedule, the microbatches of this rank, and ``run``, which
    runs an action.
    """

    schedule_ref: Any
    arg_mbs: list[Any] | None
    kwarg_mbs: list[Any] | None
    target_mbs: list[Any] | None
    losses: list[Any] | None
    run: Callable[[Any], Any]


def overlapped(
    custom: Mapping[ComputationType, CustomFunction], context: Callable[..., Context]
) -> Any:
    """How fused actions run: by the function for them, else one part after the other, so that each
    is an action.
    """
    function = custom.get(ComputationType("OVERLAP_F_B"))
    if function is None:
        return "sequential"

    def both(first: Any, second: Any) -> tuple[Any, Any]:
        parts = {str(part.action): part for part in (first, second)}
        results: dict[str, Any] = {}

        def run(action: Any) -> None:
            if str(action) not in parts or str(action) in results:
                raise WeaveError(f"ctx.run({action}): run each of {', '.join(parts)} once")
            results[str(action)] = parts[str(action)]()

        subs: Any = tuple(map(Action.from_str, parts))
        function(Action(-1, ComputationType("OVERLAP_F_B"), None, subs), context(run))
        if len(results) != 2:
            raise WeaveError(
                f"the custom function ran {list(results)} of {', '.join(parts)}; run both with "
                "ctx.run"
            )
        return results[str(first.action)], results[str(second.action)]

    return both


@contextmanager
def watched(
    custom: Mapping[ComputationType, CustomFunction], context: Callable[..., Context]
) -> Iterator[None]:
    """Run the actions of a step through the functions that are registered for them."""
    single = {kind.value: fn for kind, fn in custom.items() if kind.value in ("F", "B", "I", "W")}
    if not single:
        yield
        return

    def watch(bound: Executable, steps: Sequence[StepFn], first: int) -> Sequence[StepFn]:
        out = []
        for step, ins in zip(steps, bound.plan.instructions[first:], strict=False):
            action, program = ins.action, ins.program
            runs = (
                action is not None
                and program is not None
                and ins.stage == action.stage
                and not program.label
            )
            fn = single.get(action.op) if action is not None and runs else None
            out.append(
                step if fn is None else _through(fn, step, Action.from_str(str(action)), context)
            )
        return out

    token = WATCH.set(watch)
    try:
        yield
    finally:
        WATCH.reset(token)


def _through(
    fn: CustomFunction, step: StepFn, action: Any, context: Callable[..., Context]
) -> StepFn:
    def run_step(r: Any) -> Any:
        results: list[Any] = []
        fn(action, context(lambda _: results.append(step(r))))
        if len(results) != 1:
            raise WeaveError(
                f"the custom function ran {action} {len(results)} times; call ctx.run(action) once"
            )
        return results[0]

    return run_step
