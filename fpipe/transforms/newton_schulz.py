"""Muon: momentum whose matrices are made nearly orthogonal by a Newton-Schulz iteration.

Keller Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning rates by shape are
those of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982).

    m ← lerp(m, g, 1 − μ)        u = lerp(g, m, μ) (Nesterov) or m
    X ← u / ‖u‖,  then  X ← a X + (b A + c A²) X  with  A = X Xᵀ,  some times, in bfloat16
    update = −lr · adjust(shape) · X − lr · decay · p

Matrices of one shape go through the iteration together, but only those of one stage: so the bits of an update do not
depend on which stages live on the same rank. Knows no ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, is_floating, leaves, names
from . import _foreach as F
from ._base import State, Transform
from ._labels import Mask, flags
from ._late import donating
from ._over import stages_here
from ._places import Column, by_kind, count, places, recording, zeros
from .scaling import Rate, decay, rate_at, weights_of

Coefficients = tuple[float, float, float]


class MuonState(NamedTuple):
    """``step``: steps made; ``m``: the moving average of the gradients."""

    step: Tensor
    m: Tree


def muon(
    lr: Rate,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
    adjust: Literal["original", "match_rms_adamw"] | None = "original",
    mask: Mask | None = None,
    donate: bool = False,
) -> Transform:
    """Muon for matrices, with the defaults of torch.optim.Muon; give other leaves to another transform.

    ``lr`` is a number or a function of the step, which counts from 0; ``mask`` says which leaves decay;
    ``donate=True`` writes the new state into the memory of the old one.

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

    def init(params: Tree) -> State:
        _check(params)
        return MuonState(count(), zeros(params))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        weights: Column = weights_of(at, params, "muon with weight decay") if weight_decay else [None] * len(at.leaves)
        on = flags(at, mask, params) if weight_decay else [False] * len(at.leaves)
        rate = rate_at(lr, state.step)

        def finish(us: Column, rates: Column, ps: Column, on: Column) -> list[Column]:
            us = F.mul(us, rates, own=True)
            return [decay(us, ps, on, -rate * weight_decay, own=True) if any(on) else us]

        with recording(at.leaves):
            average = partial(_averaged, momentum=momentum, nesterov=nesterov, donate=donate)
            ms, us = by_kind(average, at.of(state.m, "the state"), at.leaves)
            us = _orthogonal(at.tree(us), coefficients, steps, eps)
            rates = [-rate * _adjusted(u.shape, adjust) for u in us]
            us = by_kind(finish, us, rates, weights, on)[0]
        return at.tree(us), MuonState(state.step + 1, at.tree(ms, base=state.m))

    donating(update, donate=donate)
    return Transform(init, update)


def _averaged(ms: Column, gs: Column, *, momentum: float, nesterov: bool, donate: bool) -> tuple[Column, Column]:
    gs = F.cast_like(gs, ms)
    ms = F.lerp(ms, gs, 1 - momentum, own=donate)
    return ms, F.lerp(gs, ms, momentum) if nesterov else ms


def _orthogonal(tree: Tree, coefficients: Coefficients, steps: int, eps: float) -> list[Tensor]:
    """The leaves of a tree, made nearly orthogonal stage by stage and shape by shape."""
    done: list[Tensor] = []
    for stage in stages_here(tree, None).values():
        matrices: list[Tensor] = leaves(stage)
        alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[int]] = {}
        for index, matrix in enumerate(matrices):
            alike.setdefault((matrix.device, matrix.dtype, matrix.shape), []).append(index)
        after = list(matrices)
        for indices in alike.values():
            stack = _newton_schulz(torch.stack([matrices[i] for i in indices]), coefficients, steps, eps)
            for index, matrix in zip(indices, stack.to(matrices[indices[0]].dtype).unbind(), strict=True):
                after[index] = matrix
        done += after
    return done


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


def _adjusted(shape: torch.Size, adjust: str | None) -> float:
    rows, columns = shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def _check(params: Tree) -> None:
    named = zip(names(params), leaves(params), strict=True)
    wrong = [f"{name} {tuple(leaf.shape)}" for name, leaf in named if is_floating(leaf) and leaf.ndim != 2]
    if wrong:
        raise TransformError(
            f"muon takes matrices, and these are none: {', '.join(wrong)}; give them to another transform, "
            f"as in partition({{'matrix': muon(...), 'other': adamw(...)}}, labels)"
        )
