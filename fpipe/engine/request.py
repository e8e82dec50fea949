# SPDX-License-Identifier: Apache-2.0
"""``Request``: what the plans of a call depend on, beside the configuration. Knows shapes, no
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Literal, TypeAlias

import torch

from ..schedule import Schedule
from ..stage import keyword_only
from ..tree import AbstractTree

Mode: TypeAlias = Literal["grad", "forward", "vjp"]
#: A kind of microbatch: x, the targets, and the side inputs by stage with those of the loss at the
#: end.
Kind: TypeAlias = tuple[AbstractTree, tuple[AbstractTree, ...], tuple[AbstractTree, ...]]


@dataclass(frozen=True)
class Request:
    """What the plans of a call depend on, beside the configuration.

    ``params[s]`` is ``None`` where stage s is on another process. Microbatch m is of kind
    ``kinds[kind_of[m]]``.
    """

    mode: Mode
    schedule: Schedule
    params: tuple[AbstractTree | None, ...]
    states: tuple[AbstractTree | None, ...]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    wants_dx: bool = False
    layouts: Mapping[int, Any] = field(
        default_factory=dict
    )  # by stage, where the pipeline has copies
    each: bool = False  # outputs, and what the loss returns, go to a function of the caller
    has_aux: bool = False
    debug: bool = False  # results are checked for NaN
    chain: int = 1  # of stages with carries: the slices of a microbatch, whose kinds are in a row


# ---- reductions ----
class Weighted:
    """A reduction that weights each microbatch's loss; see ``fpipe.weighted``."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn, self.sides = fn, keyword_only(fn)

    def __repr__(self) -> str:
        return "fpipe.weighted(...)"


Reduction: TypeAlias = Literal["mean", "sum"] | Weighted


@dataclass(frozen=True)
class Weights:
    """The weight of each microbatch's loss: one number for all, or a tensor each.

    Gradients, not the value, are multiplied by ``loss_scale`` too.
    """

    number: float | None
    each: Sequence[torch.Tensor] = ()
    loss_scale: float | torch.Tensor | None = None

    def scale(self, mb: int, like: torch.Tensor) -> float | torch.Tensor:
        """The factor of a microbatch's loss."""
        return self.number if self.number is not None else self.each[mb].to(like.dtype)

    def sum(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The total of the microbatches' losses: each weighted, then added in order."""
        weighted = [self._weighted(mb, loss) for mb, loss in enumerate(losses)]
        return reduce(lambda total, loss: total + loss.to(total.device), weighted)

    def _weighted(self, mb: int, loss: torch.Tensor) -> torch.Tensor:
        scale = self.scale(mb, loss)
        if not isinstance(scale, torch.Tensor):
            return loss * scale
        return torch.where(scale == 0, 0, loss * scale)  # a mean over nothing is NaN

    def cotangent(self, mb: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The cotangent of a microbatch's loss."""
        weight = self.number if self.number is not None else self.each[mb]
        weight = weight if self.loss_scale is None else weight * self.loss_scale
        return (
            weight.to(device, dtype)
            if isinstance(weight, torch.Tensor)
            else _constant(weight, dtype, device)
        )


@lru_cache(maxsize=256)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype, device=device)
