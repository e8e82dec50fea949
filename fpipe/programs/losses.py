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
from ..tree import Aval
from .signature import Apart


def check_scalar(label: str, first: Aval | torch.Tensor | None) -> None:
    """Raise StageError where ``first``, the first tensor that a loss returned, is not one floating
    number.
    """
    if isinstance(first, torch.Tensor):
        first = Aval.like(first)
    if first is None or first.shape != ():
        raise StageError(
            f"the loss {label} must return one scalar tensor (or, with has_aux=True, a scalar and "
            "anything); "
            f"it returned {'no tensor' if first is None else first}"
        )
    if not first.dtype.is_floating_point:
        raise StageError(
            f"the loss {label} must be floating, not {first.dtype}; take .float() of it"
        )


def with_aux(result: Any) -> tuple[Any, Any]:
    """What a loss returned with has_aux=True: the scalar and everything else."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StageError(
            f"with has_aux=True the loss must return (scalar, aux), not {type(result).__name__}"
        )
    return result


@dataclass(frozen=True)
class LossCall:
    """A loss as a stage function of (no parameters, (output, \\*targets)). Equal for the same loss.

    ``apart``: what it returns beside the scalar is no output of the stage, and may be anything.
    """

    loss: Callable[..., Any]
    has_aux: bool
    apart: bool = False

    def __call__(self, _: object, x: tuple[Any, ...], **side: Any) -> Any:
        result = self.loss(*x, **side)
        if not self.has_aux:
            return result
        scalar, aux = with_aux(result)
        aux = tree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, aux)
        return Apart(scalar, aux) if self.apart else (scalar, aux)


def loss_stage(loss: Callable[..., Any], has_aux: bool, each: bool = False) -> Stage:
    """A loss as a stage without parameters whose input is (output, *targets).

    ``each``: its second value goes to a function of the caller; on autograd it may then be
    anything.
    """
    stage = as_stage(loss)
    apart = has_aux and each and stage.engine == "eager"
    like = None if stage.like is None else LossCall(stage.like, has_aux, apart)
    return Stage(
        LossCall(stage.fn, has_aux, apart),
        name=stage.label,
        engine=stage.engine,
        like=like,
        dynamic=stage.dynamic,
    )


def loss_sides(loss: Callable[..., Any] | None) -> tuple[str, ...]:
    """The keyword-only arguments of a loss."""
    return () if loss is None else keyword_only(loss.fn if isinstance(loss, Stage) else loss)
