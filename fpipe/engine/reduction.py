# SPDX-License-Identifier: Apache-2.0
"""How the losses of the microbatches become one number: mean, sum, or a weighted mean.

Weights are known before the first backward, so the gradient does not depend on how the batch was
split. Knows microbatches and copies of the pipeline; no stage and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch

from ..errors import BatchError, StageError
from ..stage import keyword_only
from .copies import Copies
from .microbatches import Parts


class Weighted:
    """A reduction that weights each microbatch's loss; see ``weighted``."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn, self.sides = fn, keyword_only(fn)

    def __repr__(self) -> str:
        return "fpipe.weighted(...)"


Reduction: TypeAlias = Literal["mean", "sum"] | Weighted


def weighted(fn: Callable[..., Any]) -> Weighted:
    """Weight each microbatch's mean loss by ``fn(*targets)`` over the sum of all, known before the
    first backward.

    With copies of the pipeline (``dp=``) the sum is over all copies, or with
    ``dp_reduction="mean"`` over each. The loss of a microbatch of weight 0 is not counted, also
    where it is NaN, as a mean over no tokens is. Its gradient is multiplied by 0, as in autograd: a
    loss that divides by its count must divide by 1 where that is 0.

    Args:
        fn: a function of the targets of a microbatch that returns one number, such as a count of
            tokens; its keyword-only arguments are side inputs.

    Returns:
        A value for ``fpipe.pipeline(reduction=)``.

    Raises:
        StageError: if ``fn`` is no function.

    >>> weighted(lambda target: (target >= 0).sum()).fn(torch.tensor([1, -1]))
    tensor(1)
    """
    if not callable(fn):
        raise StageError(
            f"fpipe.weighted takes a function of the targets, not {fn!r}; such as lambda y: (y >= "
            "0).sum()"
        )
    return Weighted(fn)


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


def weights(
    reduction: Reduction,
    targets: Sequence[Parts],
    sides: Mapping[str, Parts],
    number: int,
    copies: Copies | None,
    loss_scale: float | torch.Tensor | None = None,
) -> Weights:
    """The weights of ``number`` microbatches.

    The mean over copies of the pipeline is taken elsewhere. Explicit weights are counted over all
    copies, unless these are averaged.
    """
    if not isinstance(reduction, Weighted):
        return Weights(1.0 / number if reduction == "mean" else 1.0, (), loss_scale)
    named = {name: sides[name] for name in reduction.sides if name in sides}
    counts = [
        _count(
            reduction,
            m,
            [t.tree(m) for t in targets],
            {n: part.tree(m) for n, part in named.items()},
        )
        for m in range(number)
    ]
    exact = [value.detach().reshape(()).to(torch.float64) for value in counts]
    total = torch.stack(exact).sum()
    if copies is not None and not copies.mean:
        total = copies.total(total)
    total = torch.where(total == 0, torch.ones_like(total), total)
    return Weights(None, [value / total for value in exact], loss_scale)


def _count(
    reduction: Weighted, mb: int, targets: Sequence[Any], sides: Mapping[str, Any]
) -> torch.Tensor:
    """The weight of a microbatch before it is divided by the sum of all."""
    try:
        found = reduction.fn(*targets, **sides)
    except Exception as error:
        raise BatchError(
            f"fpipe.weighted's function raised {type(error).__name__} for microbatch {mb}: {error}"
        ) from error
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found
    if isinstance(found, Real):
        return torch.as_tensor(found)
    what = (
        f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
    )
    raise BatchError(
        f"fpipe.weighted's function returned {what} for microbatch {mb}; it must return one "
        "number per "
        "microbatch, such as its count of tokens"
    )
