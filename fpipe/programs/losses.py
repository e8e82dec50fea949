# SPDX-License-Identifier: Apache-2.0
"""A loss as a stage without parameters, whose input is the last stage's output and the targets.

Knows stages and programs, no schedules, ranks or microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import tree
from ..errors import StageError
from ..stage import Stage, as_stage, keyword_only
from .stage_programs import Programs


def check_scalar(stage: Stage, loss: Programs) -> None:
    """Raise StageError where the first output of a loss is not one floating number."""
    first = next(iter(loss.outputs.y.tensors), None)
    if first is None or first.shape != ():
        raise StageError(
            f"the loss {stage.label} must return one scalar tensor (or, with has_aux=True, a scalar and anything); "
            f"it returned {'no tensor' if first is None else first}"
        )
    if not first.dtype.is_floating_point:
        raise StageError(f"the loss {stage.label} must be floating, not {first.dtype}; take .float() of it")


@dataclass(frozen=True)
class LossCall:
    """A loss as a stage function of (no parameters, (output, \\*targets)). Equal for the same loss."""

    loss: Callable[..., Any]
    has_aux: bool

    def __call__(self, _: object, x: tuple[Any, ...], **side: Any) -> Any:
        result = self.loss(*x, **side)
        if not self.has_aux:
            return result
        if not isinstance(result, tuple) or len(result) != 2:
            raise StageError(f"with has_aux=True the loss must return (scalar, aux), not {type(result).__name__}")
        return result[0], tree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, result[1])


def loss_stage(loss: Callable[..., Any], has_aux: bool) -> Stage:
    """A loss as a stage without parameters whose input is (output, *targets)."""
    stage = as_stage(loss)
    like = None if stage.like is None else LossCall(stage.like, has_aux)
    return Stage(LossCall(stage.fn, has_aux), name=stage.label, engine=stage.engine, like=like)


def loss_sides(loss: Callable[..., Any] | None) -> tuple[str, ...]:
    """The keyword-only arguments of a loss."""
    return () if loss is None else keyword_only(loss.fn if isinstance(loss, Stage) else loss)
