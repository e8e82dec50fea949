"""A loss as a stage: one without parameters, whose input is the last stage's output and the targets.

Knows stages and programs; no schedule, rank or microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .. import tree
from ..errors import StageError
from ..stage import Stage, as_stage, keyword_only
from .stage_programs import Programs


def check_scalar(stage: Stage, loss: Programs) -> None:
    """Raise StageError where a loss does not give one floating number."""
    first = loss.y_avals[0] if loss.y_avals else None
    if first is None or first.shape != ():
        got = "no tensor" if first is None else str(first)
        raise StageError(
            f"the loss {stage.label} must return one scalar tensor (or, with has_aux=True, a scalar and anything); "
            f"it returned {got}"
        )
    if not first.dtype.is_floating_point:
        raise StageError(f"the loss {stage.label} must be floating, not {first.dtype}; take .float() of it")


@lru_cache(maxsize=256)
def loss_stage(loss: Callable[..., Any], has_aux: bool) -> Stage:
    """A loss as a stage without parameters whose input is (output, *targets)."""
    own = as_stage(loss)
    like = None if own.like is None else _called(own.like, has_aux)
    return Stage(_called(own.fn, has_aux), name=own.label, engine=own.engine, like=like)


def _called(loss: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    def call(_: Any, x: tuple[Any, ...], **side: Any) -> Any:
        made = loss(*x, **side)
        if not has_aux:
            return made
        if not isinstance(made, tuple) or len(made) != 2:
            raise StageError(f"with has_aux=True the loss must return (scalar, aux), not {type(made).__name__}")
        return made[0], tree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, made[1])

    return call


def loss_sides(loss: Callable[..., Any] | None) -> tuple[str, ...]:
    """The keyword-only arguments of a loss."""
    return () if loss is None else keyword_only(loss.fn if isinstance(loss, Stage) else loss)
