# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite: leaving a step out on all ranks together, and the loss scale of
half precision.

Whether gradients are finite is one number, summed over the pipeline, so that all processes decide
alike. The decision is made in Python and therefore waits for the device. This module must not know
optimizers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError, checked
from . import foreach as F
from .boards import EVERY_LEAF, Over, as_over, board_device, check_whole, copies_of
from .leaves import count, map_kinds, places, scaled
from .transform import State, Transform, Updates


class SkipState(NamedTuple):
    """``skipped``: number of steps left out; ``in_a_row``: those since the last step that was
    not.
    """

    skipped: Tensor
    in_a_row: Tensor


class LossScaleState(NamedTuple):
    """``scale``: the factor of the next loss; ``good``: steps since it changed; ``skipped``: steps
    left out.
    """

    scale: Tensor
    good: Tensor
    skipped: Tensor


def all_finite(tree: Updates, over: Over | None = None) -> bool:
    """Whether no leaf of any stage has an infinity or a NaN; the same answer on every process.

    >>> all_finite([torch.ones(2)]), all_finite([torch.ones(2), torch.tensor(float("nan"))])
    (True, False)
    """
    check_whole(tree, over)
    device = board_device(tree, over)
    nonempty = [leaf.detach() for leaf in places(tree).leaves if leaf.numel()]
    fine = map_kinds(
        lambda leaves: list(torch.stack(F.norms(leaves, math.inf)).isfinite().unbind()), nonempty
    )
    bad = torch.zeros((), device=device)
    if fine:
        bad += (~torch.stack([flag.to(device) for flag in fine])).sum()
    if over is not None:
        bad = over.all_sum(bad)
        group, differing = copies_of(over)
        if group is not None and differing != EVERY_LEAF:  # all_sum adds up shards
            bad = group.all_reduce(bad)  # copies whose gradients differ have to decide alike
    return bad.item() == 0


@checked
def skip_nonfinite(*, over: Over | None = None) -> Transform:
    """Leave a step out, on all ranks together, if a gradient of any stage is not finite.

    In a chain it comes before the transforms that must not see such gradients: the chain stops,
    their states do not change, and the updates are ``None``, with which :func:`apply_updates`
    changes nothing. ``state.skipped`` counts.

    Args:
        over: the pipeline, over whose stages one such gradient counts for all.

    >>> from fpipe.transforms import chain, sgd
    >>> tx = chain(skip_nonfinite(), sgd(0.1))
    >>> params = [torch.ones(1)]
    >>> updates, state = tx.update([torch.tensor([float("nan")])], tx.init(params), params)
    >>> updates, state[0].skipped.item()
    (None, 1)
    """
    over = as_over(over)

    def update(grads, state, params=None) -> tuple[Updates, State]:
        if all_finite(grads, over):
            return grads, SkipState(state.skipped, torch.zeros_like(state.in_a_row))
        return None, SkipState(state.skipped + 1, state.in_a_row + 1)

    return Transform(lambda params: SkipState(count(), count()), update)


@checked
def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    over: Over | None = None,
) -> Transform:
    """Divide gradients by the scale of their loss, leave out a step that overflowed, and adapt the
    scale.

    As ``torch.amp.GradScaler``. Pass the scale to the loss:
    ``value_and_grad(pipe)(params, x, y, loss_scale=s.scale)``.

    Args:
        init_scale: the first scale.
        growth: the factor after ``interval`` good steps in a row.
        backoff: the factor after an overflow.
        interval: how many good steps come before the scale grows.
        over: the pipeline, over whose stages one overflow counts for all.

    Raises:
        TransformError: if an argument is out of its range.

    >>> from fpipe.transforms import chain, sgd
    >>> tx = chain(dynamic_loss_scale(4.0), sgd(1.0))
    >>> params = [torch.zeros(1)]
    >>> state = tx.init(params)
    >>> updates, state = tx.update([torch.ones(1) * state[0].scale], state, params)
    >>> updates, state[0].scale.item()
    ([tensor([-1.])], 4.0)
    >>> updates, state = tx.update([torch.tensor([float("inf")])], state, params)
    >>> updates, state[0].scale.item()
    (None, 2.0)
    """
    if not (init_scale > 0 and growth >= 1 and 0 < backoff <= 1 and interval >= 1):
        raise TransformError(
            f"init_scale={init_scale}, growth={growth}, backoff={backoff}, interval={interval}; "
            f"a loss scale needs init_scale > 0, growth >= 1, 0 < backoff <= 1 and interval >= 1"
        )

    over = as_over(over)

    def update(grads, state, params=None) -> tuple[Updates, State]:
        scale = state.scale
        zero = torch.zeros_like(state.good)
        if not all_finite(grads, over):
            return None, LossScaleState(scale * backoff, zero, state.skipped + 1)
        at = places(grads)
        good = state.good + 1
        with torch.no_grad():
            unscaled = at.tree(scaled(at.leaves, 1.0 / scale.item()))
        if good.item() >= interval:
            good = zero
            grown = scale * growth
            if math.isfinite(grown.item()):
                scale = grown
        return unscaled, LossScaleState(scale, good, state.skipped)

    return Transform(
        lambda params: LossScaleState(torch.tensor(float(init_scale)), count(), count()), update
    )
