# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose matrices a Newton-Schulz iteration replaces by nearly orthogonal ones.

Keller Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning
rates by shape are those of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982).

    m ← lerp(m, g, 1 − μ)        u = lerp(g, m, μ) (Nesterov) or m
    X ← u / ‖u‖,  then  X ← a X + (b A + c A²) X  with  A = X Xᵀ,  some times, in bfloat16
    update = −lr · adjust(shape) · X − lr · decay · p

Matrices of one shape go through the iteration together, but only those of one stage, so the bits of
an update do not depend on which stages are on the same rank. A product of several matrices can have
other last bits than one of each, so parameters can differ in the last bits from torch.optim.Muon's.
This module must not know ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import is_floating, leaves, names
from . import foreach as F
from .leaves import Column, Mask, map_kinds
from .optimizer import Rate, Step, optimizer
from .transform import Params, Transform, Updates

Coefficients: TypeAlias = tuple[float, float, float]
Adjust: TypeAlias = Literal["original", "match_rms_adamw"] | None


class MuonState(NamedTuple):
    """``step``: number of steps; ``m``: the moving average of the gradients."""

    step: Tensor
    m: Updates


def muon(
    lr: Rate,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
    adjust: Adjust = "original",
    mask: Mask | None = None,
    donate: bool = False,
) -> Transform:
    """Muon for matrices, with the defaults of torch.optim.Muon; use :func:`partition` to treat
    other leaves otherwise.

    For bfloat16 and float16 parameters, see :func:`master`.

    Args:
        lr: a number, or a function of the step, which counts from 0.
        momentum: the decay of the moving average.
        weight_decay: decoupled, times the learning rate.
        nesterov: whether the update looks one step ahead.
        coefficients, steps, eps: of the Newton-Schulz iteration.
        adjust: how the learning rate depends on the shape.
        mask: which leaves decay (see :func:`weight_decay`).
        donate: write the new state into the memory of the old one, which must not be used again.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if an argument is out of its range; the transform raises it for a leaf that
        is no matrix.

    >>> from fpipe.transforms import adamw, partition
    >>> from optree import tree_map
    >>> kinds = lambda params: tree_map(lambda p: "matrix" if p.ndim == 2 else "other", params)
    >>> tx = partition({"matrix": muon(0.02), "other": adamw(3e-4)}, kinds)
    >>> params = [{"w": torch.eye(2), "b": torch.zeros(2)}]
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates[0]["w"].diagonal().sign()
    tensor([-1., -1.])
    """
    if not 0 <= momentum < 1 or weight_decay < 0 or not 1 <= steps < 100:
        raise TransformError(
            f"momentum={momentum}, weight_decay={weight_decay}, steps={steps}; "
            f"muon needs momentum in [0, 1), weight_decay >= 0 and 1 to 99 steps"
        )
    if adjust not in ("original", "match_rms_adamw", None):
        raise TransformError(f"adjust={adjust!r}; there are 'original', 'match_rms_adamw' and None")

    def orthogonal(matrices: Column) -> Column:
        stack = torch.stack(matrices)
        return list(_newton_schulz(stack, coefficients, steps, eps).to(stack.dtype).unbind())

    def arithmetic(step: Step, ms: Column) -> tuple[Column, Column]:
        gs = F.cast_like(step.grads, ms)
        ms = F.lerp(ms, gs, 1 - momentum, inplace=donate)
        us = F.lerp(gs, ms, momentum) if nesterov else ms
        alike = [(stage, u.shape) for stage, u in zip(step.stages, us, strict=True)]
        rates = [-step.rate * _adjusted(u.shape, adjust) for u in us]
        us = F.mul(map_kinds(orthogonal, us, keys=alike), rates, inplace=True)
        return step.decayed(us), ms

    tx = optimizer(
        "muon",
        MuonState,
        arithmetic,
        lr,
        decay=weight_decay,
        mask=mask,
        donate=donate,
        blocks=False,
    )
    return replace(tx, init=lambda params: tx.init(_checked(params)))


def _newton_schulz(stack: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = stack.size(-2) > stack.size(-1)
    x = stack.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _adjusted(shape: torch.Size, adjust: Adjust) -> float:
    rows, columns = shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def _checked(params: Params) -> Params:
    named = zip(names(params), leaves(params), strict=True)
    wrong = [
        f"{name} {tuple(leaf.shape)}"
        for name, leaf in named
        if is_floating(leaf) and leaf.ndim != 2
    ]
    if wrong:
        raise TransformError(
            f"muon takes matrices, and these are none: {', '.join(wrong)}; use another transform "
            "for them, as in partition({'matrix': muon(...), 'other': adamw(...)}, labels)"
        )
    return params
