# SPDX-License-Identifier: Apache-2.0
"""``fpipe.weighted``: the losses of the microbatches become a weighted mean.

Weights are known before the first backward, so the gradient does not depend on how the batch was
split. Knows microbatches and copies of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..devices import wide
from ..engine.copies import Copies
from ..engine.microbatches import Weighted
from ..engine.parts import Parts
from ..errors import BatchError, StageError
from ..programs.tensor_state import wrapped


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


def weights_of(
    reduction: Weighted,
    targets: Sequence[Parts],
    sides: Mapping[str, Parts],
    number: int,
    copies: Copies | None,
) -> list[Tensor]:
    """The weights of ``number`` microbatches, over the sum of all.

    They are counted over all copies of the pipeline, unless these are averaged: in float64, on the
    host where their device has no float64.
    """
    counts = []
    for m in range(number):
        side = {name: part.tree(m) for name, part in sides.items()}
        counts.append(count(reduction, m, [target.tree(m) for target in targets], side))
    return shares(counts, copies)


def shares(counts: Sequence[Tensor], copies: Copies | None) -> list[Tensor]:
    """Numbers as parts of their sum; see ``weights_of``."""
    device = counts[0].device
    dtype = wide(device)
    exact = [(one if dtype is torch.float64 else one.cpu()).double() for one in counts]
    total = total_of(exact, copies)
    return [(value / total).to(dtype).to(device) for value in exact]


def total_of(exact: Sequence[Tensor], copies: Copies | None) -> Tensor:
    """The sum of numbers over the copies; 1 where it is 0."""
    total = torch.stack(list(exact)).sum()
    if copies is not None and not copies.mean:
        total = copies.total(total)
    return torch.where(total == 0, torch.ones_like(total), total)


def count(reduction: Weighted, mb: int, targets: Sequence[Any], sides: Mapping[str, Any]) -> Tensor:
    """The weight of a microbatch before it is divided by the sum of all, without axes."""
    try:
        number = reduction.fn(*targets, **sides)
    except Exception as error:
        raise BatchError(
            f"fpipe.weighted's function raised {type(error).__name__} for microbatch {mb}: {error}"
        ) from error
    if isinstance(number, Real) and 0 <= float(number) < float("inf"):
        return torch.as_tensor(number)
    if not isinstance(number, Tensor):
        what = repr(number)
    else:
        what = f"a tensor of shape {list(number.shape)}"
        if number.numel() == 1:
            one = number.detach().reshape(())
            if not one.is_cpu or wrapped(one) or one >= 0:  # a device is not waited for
                return one
            what = f"{one}"
    raise BatchError(
        f"fpipe.weighted's function returned {what} for microbatch {mb}; it must return one number "
        "per microbatch, 0 or more, such as its count of tokens"
    )
