# SPDX-License-Identifier: Apache-2.0
"""Functions of the caller that run the actions of a schedule: ``register_custom_function``.

They decide when an action runs and what happens around it; ``ctx.run(action)`` runs it. This module
must not know modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from ...engine import around_actions
from ...errors import WeaveError
from ...tree import Tree
from .orders import Action, ComputationType, action_of


@dataclass(frozen=True)
class Context:
    """What a custom function gets beside its action; ``run`` runs an action."""

    schedule_ref: object
    arg_mbs: list[Any]
    kwarg_mbs: list[Any]
    target_mbs: list[Any] | None
    losses: list[Tensor] | None
    run: Callable[[Action], None]


#: A function of an action and its context.
CustomFunction: TypeAlias = Callable[[Action, Context], object]
CustomFunctions: TypeAlias = Mapping[ComputationType, CustomFunction]
#: From the function that runs an action to a context.
NewContext: TypeAlias = Callable[[Callable[[Action], None]], Context]


class _Part(Protocol):
    """A part of a fused action."""

    action: object

    def __call__(self) -> object: ...


def overlap_of(custom: CustomFunctions, context: NewContext) -> Tree:
    """Return how fused actions run: by the function for them, else one part after the other.

    So each part is an action.
    """
    function = custom.get(ComputationType("OVERLAP_F_B"))
    if function is None:
        return "sequential" if custom else "weave"

    def both(first: _Part, second: _Part) -> tuple[object, object]:
        parts = {str(part.action): part for part in (first, second)}
        results = dict[str, object]()

        def run(action: Action) -> None:
            if str(action) not in parts or str(action) in results:
                raise WeaveError(f"ctx.run({action}): run each of {', '.join(parts)} once")
            results[str(action)] = parts[str(action)]()

        subs = tuple(map(action_of, parts))
        function(Action(-1, ComputationType("OVERLAP_F_B"), None, subs), context(run))
        if len(results) != 2:
            raise WeaveError(
                f"the custom function ran {list(results)} of {', '.join(parts)}; run both with "
                "ctx.run"
            )
        return results[str(first.action)], results[str(second.action)]

    return both


def hooked(custom: CustomFunctions, context: NewContext) -> AbstractContextManager[None]:
    """Return a context in which actions run through the functions that are registered for them."""
    functions = {kind.value: fn for kind, fn in custom.items() if kind.value != "OVERLAP_F_B"}
    if not functions:
        return nullcontext()

    def hook(text: str, run: Callable[[], None]) -> None:
        action = action_of(text)
        function = functions.get(action.computation_type.value)
        if function is None:
            run()
        else:
            function(action, context(lambda _: run()))

    return around_actions(hook)
