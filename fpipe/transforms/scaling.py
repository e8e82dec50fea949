"""Small transforms of each leaf: scales, schedules, casts, decay, noise.

Each is what its name says on every leaf that is there. Knows no ranks: noise is drawn for a stage, not for a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree
from . import _foreach as F
from ._base import State, Transform, stateless
from ._labels import Mask, flags
from ._over import Over, stages_here
from ._places import Column, Places, by_kind, count, places, recording
from .norms import scaled

#: a number, or a function of the number of steps made before this one
Rate = float | Callable[[int], float]


class StepState(NamedTuple):
    """``step``: steps made."""

    step: Tensor


def rate_at(rate: Rate, steps: Tensor) -> float:
    """What a rate is at this step.

    >>> rate_at(0.5, torch.tensor(7)), rate_at(lambda step: 0.1 * step, torch.tensor(2))
    (0.5, 0.2)
    """
    return float(rate(int(steps.item()))) if callable(rate) else rate


def scale(factor: float | Tensor) -> Transform:
    """Times a number, or a tensor of no axes (which may require a gradient).

    >>> scale(-0.5).update([torch.ones(1)], ())[0]
    [tensor([-0.5000])]
    """

    def update(grads: Tree, params: Tree) -> Tree:
        at = places(grads)
        with recording(at.leaves, [factor]):
            return at.tree(scaled(at.leaves, factor))

    return stateless(update)


def scale_by_schedule(schedule: Callable[[int], float]) -> Transform:
    """Times a function of the step, which counts from 0.

    >>> tx = scale_by_schedule(lambda step: 1.0 / (1 + step))
    >>> _, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]))
    >>> tx.update([torch.ones(1)], state)[0]
    [tensor([0.5000])]
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        with recording(at.leaves):
            after = at.tree(scaled(at.leaves, rate_at(schedule, state.step)))
        return after, StepState(state.step + 1)

    return Transform(lambda params: StepState(count()), update)


def cast(dtype: torch.dtype) -> Transform:
    """In another dtype, for instance gradients in float32 before they are added up or squared.

    >>> cast(torch.float64).update([torch.ones(1)], ())[0]
    [tensor([1.], dtype=torch.float64)]
    """

    def update(grads: Tree, params: Tree) -> Tree:
        at = places(grads)
        with recording(at.leaves):
            return at.tree(F.cast(at.leaves, dtype))

    return stateless(update)


def weight_decay(rate: float, mask: Mask | None = None) -> Transform:
    """Plus ``rate`` times the parameter: before an optimizer an L2 penalty, before a ``scale`` a decoupled decay.

    ``mask`` says which leaves: patterns of names such as ``["*.w"]``, a tree of bools, or a function of the parameters.

    >>> params = [{"b": torch.ones(1), "w": torch.ones(1)}]
    >>> grads = [{"b": torch.zeros(1), "w": torch.zeros(1)}]
    >>> weight_decay(0.1, ["*.w"]).update(grads, (), params)[0]
    [{'b': tensor([0.]), 'w': tensor([0.1000])}]
    """

    def update(grads: Tree, params: Tree) -> Tree:
        at = places(grads)
        weights, chosen = weights_of(at, params, "weight_decay"), flags(at, mask, params)
        with recording(at.leaves):
            after = by_kind(lambda gs, ps, on: [decay(gs, ps, on, rate)], at.leaves, weights, chosen)[0]
        return at.tree(after)

    return stateless(update)


def weights_of(at: Places, params: Tree, who: str) -> Column:
    """The parameters at the places of the gradients, which this transform cannot do without."""
    if params is None:
        raise TransformError(f"{who} needs the parameters; call tx.update(grads, state, params)")
    return at.of(params, "params")


def decay(xs: Column, params: Column, on: Column, rate: float, *, own: bool = False) -> Column:
    """``x + rate * param`` where it is on, and x itself elsewhere."""
    if all(on):
        return F.add(xs, params, rate, own=own)
    moved = iter(F.add(_where(xs, on), _where(params, on), rate, own=own))
    return [next(moved) if flag else x for x, flag in zip(xs, on, strict=True)]


def decayed(params: Column, on: Column, rate: float, others: Column) -> Column:
    """``rate * param`` where it is on, and zeros elsewhere, in the dtype of the others."""
    moved = iter(F.mul(F.cast(_where(params, on), others[0].dtype), rate))
    return [next(moved) if flag else torch.zeros_like(x) for x, flag in zip(others, on, strict=True)]


def _where(column: Column, on: Column) -> Column:
    return [x for x, flag in zip(column, on, strict=True) if flag]


def add_noise(eta: float, gamma: float = 0.55, *, seed: int = 0, over: Over | None = None) -> Transform:
    """Plus normal noise of variance ``eta / t ** gamma`` at step t = 1, 2, ...; ``gamma=0`` keeps it as it is.

    Drawn for each stage from (seed, step, stage) alone: the same noise for any number of ranks, and on all replicas.
    Where copies of a pipeline hold parts (``zero=``), pass ``over=pipe``, and each part gets noise of its own.

    >>> tx = add_noise(0.01, seed=3)
    >>> first, _ = tx.update([torch.zeros(2)], tx.init([torch.zeros(2)]))
    >>> again, _ = tx.update([torch.zeros(2)], tx.init([torch.zeros(2)]))
    >>> torch.equal(first[0], again[0]), first[0].abs().max().item() > 0
    (True, True)
    """
    if eta < 0:
        raise TransformError(f"eta={eta}; a variance is 0 at least")

    parts = getattr(over, "parts", None)
    which = "" if parts is None else f"/{parts.here[0]}"

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        step = int(state.step.item()) + 1
        std = (eta / step**gamma) ** 0.5
        stages = stages_here(grads, None).items()
        noise = [draw for stage, part in stages for draw in _drawn(part, f"{seed}/{step}/{stage}{which}")]
        with recording(at.leaves):
            after = by_kind(lambda gs, ns: [F.add(gs, ns, std)], at.leaves, noise)[0]
        return at.tree(after), StepState(state.step + 1)

    return Transform(lambda params: StepState(count()), update)


def _drawn(part: Tree, word: str) -> list[Tensor]:
    """Standard normal noise for the leaves of a stage, one draw a dtype."""
    key = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "big")

    def kernel(leaves: list[Tensor]) -> list[list[Tensor]]:
        if not leaves:
            return [[]]
        like = leaves[0]
        generator = torch.Generator(like.device).manual_seed(key)
        sizes = [leaf.numel() for leaf in leaves]
        flat = torch.randn(sum(sizes), generator=generator, dtype=like.dtype, device=like.device)
        return [[draw.view(leaf.shape) for draw, leaf in zip(flat.split(sizes), leaves, strict=True)]]

    return by_kind(kernel, places(part).leaves)[0]
