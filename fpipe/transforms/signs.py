# SPDX-License-Identifier: Apache-2.0
"""Lion: Symbolic Discovery of Optimization Algorithms, Chen et al. 2023 (arXiv:2302.06675).

    update = −lr · (sign(β₁ m + (1 − β₁) g) + decay · p)      m ← β₂ m + (1 − β₂) g

This module must not know ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from . import _foreach as F
from ._base import Transform, Updates
from ._masks import Mask
from ._optimizer import Rate, Step, decay, optimizer
from ._places import Column, by_kind


class LionState(NamedTuple):
    """``step``: number of steps; ``m``: the moving average of the gradients."""

    step: Tensor
    m: Updates


def lion(
    lr: Rate, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 1e-3, *,
    mask: Mask | None = None, dtype: torch.dtype | None = None, donate: bool = False,
) -> Transform:  # fmt: skip
    """Lion, with optax's defaults.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        betas: of the average whose sign is the update, and of the moving average.
        weight_decay: decoupled, times the learning rate.
        mask: which leaves decay (see :func:`weight_decay`).
        dtype: that of the state and of the updates; by default the parameter's.
        donate: write the new state into the memory of the old one, which must not be used again.

    >>> tx = lion(0.1, weight_decay=0.0)
    >>> tx.update([torch.tensor([3.0, -0.2])], tx.init([torch.zeros(2)]))[0]
    [tensor([-0.1000,  0.1000])]
    """
    if not all(0 <= beta < 1 for beta in betas) or weight_decay < 0:
        raise TransformError(f"betas={betas}, weight_decay={weight_decay}; lion needs betas in [0, 1) and decay >= 0")

    def arithmetic(step: Step, ms: Column) -> list[Column]:
        def kernel(ms: Column, gs: Column, ps: Column, on: Column) -> tuple[Column, Column]:
            gs = F.cast_like(gs, ms)
            us = F.mul(F.sign(F.lerp(ms, gs, 1 - betas[0])), -step.rate, inplace=True)
            us = decay(us, ps, on, -step.rate * weight_decay, inplace=True) if any(on) else us
            return us, F.lerp(ms, gs, 1 - betas[1], inplace=donate)

        return by_kind(kernel, ms, step.grads, step.params, step.decays)

    return optimizer("lion", LionState, arithmetic, lr, decay=weight_decay, mask=mask, dtype=dtype, donate=donate)
