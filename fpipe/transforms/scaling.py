# SPDX-License-Identifier: Apache-2.0
"""Small transforms of each leaf: scales, schedules, casts, noise.

This module must not know ranks: noise depends on the stage, not on the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError, check_floating, checked
from . import foreach as F
from .boards import EVERY_LEAF, Over, as_over, copies_of
from .leaves import count, map_kinds, scaled
from .optimizer import rate_at
from .transform import Transform, leafwise, on_leaves, shown


class StepState(NamedTuple):
    """``step``: number of steps."""

    step: Tensor


@checked
def scale(factor: float | Tensor) -> Transform:
    """Multiply by a factor, which may be a tensor that requires a gradient.

    Args:
        factor: a number, or a tensor without axes.

    Raises:
        TransformError: if the number is not finite.

    >>> scale(-0.5).update([torch.ones(1)], ())[0]
    [tensor([-0.5000])]
    """
    if isinstance(factor, (int, float)) and not isfinite(factor):
        raise TransformError(f"factor={factor!r} of scale; give a finite number, such as -0.1")
    made = on_leaves(lambda leaves: scaled(leaves, factor), factor)
    return replace(made, name=f"fpipe.scale({shown(factor)})")


@checked
def scale_by_schedule(schedule: Callable[[int], float]) -> Transform:
    """Multiply by a function of the step.

    Args:
        schedule: a function of the step, an int that counts from 0, such as
            ``fpipe.transforms.warmup_cosine`` returns.

    >>> tx = scale_by_schedule(lambda step: 1.0 / (1 + step))
    >>> _, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]))
    >>> tx.update([torch.ones(1)], state)[0]
    [tensor([0.5000])]
    """

    def step(at, state, params):
        return scaled(at.leaves, rate_at(schedule, state.step, -inf)), StepState(state.step + 1)

    return leafwise(lambda params: StepState(count()), step)


@checked
def cast(dtype: torch.dtype) -> Transform:
    """Convert to another dtype, for instance gradients to float32 before they are summed or
    squared.

    Args:
        dtype: a floating dtype.

    >>> cast(torch.float64).update([torch.ones(1)], ())[0]
    [tensor([1.], dtype=torch.float64)]
    """
    check_floating("dtype", dtype)
    return on_leaves(lambda leaves: F.cast(leaves, dtype))


@checked
def add_noise(
    eta: float, gamma: float = 0.55, *, seed: int = 0, over: Over | None = None
) -> Transform:
    """Add normal noise of variance ``eta / t ** gamma`` at step t = 1, 2, ...

    The noise of a stage depends on (seed, step, stage) alone: it is the same for any number of
    ranks and on all replicas. That of tied parameters depends on the name of the first copy in
    place of the stage.

    Args:
        eta: the variance at the first step.
        gamma: how fast the variance falls; 0 keeps it constant.
        seed: of the noise.
        over: the pipeline, needed where its copies hold shards (``zero=``), of which each gets
            different noise, and where parameters are tied, whose copies get the same.

    Raises:
        TransformError: if an argument is out of its range.

    >>> tx = add_noise(0.01, seed=3)
    >>> first, _ = tx.update([torch.zeros(2)], tx.init([torch.zeros(2)]))
    >>> again, _ = tx.update([torch.zeros(2)], tx.init([torch.zeros(2)]))
    >>> torch.equal(first[0], again[0]), first[0].abs().max().item() > 0
    (True, True)
    """
    if not eta >= 0:
        raise TransformError(f"eta={eta}; a variance is 0 at least")
    copies, differing = copies_of(as_over(over))
    tied = {name: group[0] for group in getattr(over, "tied", ()) for name in group}
    shard = f"/{copies.here[0]}" if copies is not None and differing == EVERY_LEAF else ""

    def step(at, state, params):
        t = int(state.step.item()) + 1
        std = (eta / t**gamma) ** 0.5

        def kernel(gs, keys):
            place = keys[0][0]
            noise = _normal(gs, f"{seed}/{t}/{tied.get(place, place)}{shard}")
            return map_kinds(partial(F.add, alpha=std), gs, noise)

        names = at.names(range(len(at.leaves)))
        keys = [
            (name if name in tied else stage, leaf.device, leaf.dtype)
            for name, stage, leaf in zip(names, at.stages(), at.leaves, strict=True)
        ]
        return map_kinds(kernel, at.leaves, keys, keys=keys), StepState(state.step + 1)

    return leafwise(lambda params: StepState(count()), step)


def _normal(leaves: list[Tensor], text: str) -> list[Tensor]:
    """Standard normal noise for leaves of one device and dtype; the seed is a hash of the text."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    device = leaves[0].device
    sizes = [leaf.numel() for leaf in leaves]
    generator = torch.Generator(device).manual_seed(seed)
    flat = torch.randn(sum(sizes), generator=generator, dtype=leaves[0].dtype, device=device)
    draws = []
    for draw, leaf in zip(flat.split(sizes), leaves, strict=True):
        noise = draw.view(leaf.shape)
        mesh = F.mesh_of(leaf)  # whose members all have the same draws
        draws.append(type(leaf).from_local(noise, mesh) if mesh else noise)  # type: ignore[attr-defined]
    return draws
