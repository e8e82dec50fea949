"""Gradients that are not finite: skipping a step on all ranks together, and the loss scale of half precision.

Whether a gradient is finite is one number summed over the pipeline, so that all processes decide alike. The decision
is Python's, and so this waits for the device. Knows no optimizer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree
from . import _foreach as F
from ._base import State, Transform
from ._late import LATE, Late
from ._over import Over, apart, board_device, board_part
from ._places import by_kind, count, places
from .norms import scaled


class SkipState(NamedTuple):
    """``skipped``: steps left out so far; ``in_a_row``: those since the last step that was made."""

    skipped: Tensor
    in_a_row: Tensor


class LossScaleState(NamedTuple):
    """``scale``: what to multiply the next loss by; ``good``: steps since it changed; ``skipped``: steps left out."""

    scale: Tensor
    good: Tensor
    skipped: Tensor


def all_finite(tree: Tree, over: Over | None = None) -> bool:
    """Whether no leaf of any stage holds an infinity or a NaN; the same answer on every process.

    >>> all_finite([torch.ones(2)]), all_finite([torch.ones(2), torch.tensor(float("nan"))])
    (True, False)
    """
    bad = _bad(tree, board_device(tree, over))
    if over is not None:
        bad = over.all_sum(bad)
        several = apart(over)  # then copies do not have the same gradients, and must decide alike
        bad = bad if several is None else several[0].all_reduce(bad)
    return bad.item() == 0


def _bad(tree: Tree, device: torch.device) -> Tensor:
    """How many leaves here are not finite."""
    full = [leaf.detach() for leaf in places(tree).leaves if leaf.numel()]
    (fine,) = by_kind(_fine, full)
    if not fine:
        return torch.zeros((), device=device)
    return (~torch.stack([flag.to(device) for flag in fine])).sum().to(torch.float32)


def _fine(leaves: list[Tensor]) -> list[list[Tensor]]:
    peaks = F.norms(leaves, math.inf)
    return [list(torch.stack(peaks).isfinite().unbind()) if peaks else []]


def skip_nonfinite(*, over: Over | None = None) -> Transform:
    """Leave a step out, on all ranks together, where a gradient of any stage is not finite.

    Put it in a chain before what must not see such gradients: the chain stops here, the states behind it stay as they
    are, and the updates are ``None``, for which :func:`apply_updates` changes nothing. ``state.skipped`` counts.

    >>> from fpipe.transforms import chain, sgd
    >>> tx = chain(skip_nonfinite(), sgd(0.1))
    >>> params = [torch.ones(1)]
    >>> updates, state = tx.update([torch.tensor([float("nan")])], tx.init(params), params)
    >>> updates, state[0].skipped.item()
    (None, 1)
    """

    def init(params: Tree) -> State:
        return SkipState(count(), count())

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        if all_finite(grads, over):
            return grads, SkipState(state.skipped, torch.zeros_like(state.in_a_row))
        return None, SkipState(state.skipped + 1, state.in_a_row + 1)

    def measure(grads: Tree) -> Tensor:
        device = board_device(grads, over)
        return board_part({0: _bad(grads, device)}, 1, device)

    def judge(total: Tensor, state: State) -> State:
        return SkipState(state.skipped, torch.zeros_like(state.in_a_row)) if total[0].item() == 0 else None

    LATE[update] = Late(measure, judge, over)
    return Transform(init, update)


def dynamic_loss_scale(
    init_scale: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    over: Over | None = None,
) -> Transform:
    """Divide gradients by the scale that their loss was multiplied by, skip a step that overflowed, and adapt.

    As ``torch.amp.GradScaler``: ``backoff`` after an overflow, ``growth`` after ``interval`` good steps in a row.
    Pass its scale where the gradients are made: ``value_and_grad(pipe)(params, x, y, loss_scale=state.scale)``.

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

    def init(params: Tree) -> State:
        return LossScaleState(torch.tensor(float(init_scale)), count(), count())

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        if not all_finite(grads, over):
            return None, LossScaleState(state.scale * backoff, torch.zeros_like(state.good), state.skipped + 1)
        at = places(grads)
        with torch.no_grad():
            plain = at.tree(scaled(at.leaves, 1.0 / state.scale.item()))
        good = state.good + 1
        if good.item() < interval:
            return plain, LossScaleState(state.scale, good, state.skipped)
        grown = state.scale * growth
        scale = grown if math.isfinite(grown.item()) else state.scale
        return plain, LossScaleState(scale, torch.zeros_like(good), state.skipped)

    return Transform(init, update)
