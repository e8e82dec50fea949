"""Transforms as a user writes them, with trees of the whole model and no knowledge of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

import fpipe


class Sums(NamedTuple):
    calls: Tensor
    total: Any


def accumulate(k: int) -> fpipe.Transform:
    """One step for every k calls, from the mean of their gradients; no step at the others."""

    def init(params: Any) -> Sums:
        return Sums(torch.zeros((), dtype=torch.int64), tree_map(torch.zeros_like, params))

    def update(grads: Any, state: Sums, params: Any = None) -> tuple[Any, Sums]:
        total = tree_map(torch.add, grads, state.total) if state.calls.item() else grads
        after = Sums((state.calls + 1) % k, total)
        if after.calls.item():
            return None, after
        return tree_map(lambda leaf: leaf / k, total), after

    return fpipe.Transform(init, update)


class Average(NamedTuple):
    average: Any


def average_params(decay: float) -> fpipe.Transform:
    """The exponential moving average of the parameters, in the state; comes last in a chain."""

    def update(updates: Any, state: Average, params: Any) -> tuple[Any, Average]:
        after = fpipe.apply_updates(params, updates)
        mix = lambda old, new: torch.lerp(old, new.detach(), 1 - decay)
        return updates, Average(tree_map(mix, state.average, after))

    def init(params: Any) -> Average:
        return Average(tree_map(lambda leaf: leaf.detach().clone(), params))

    return fpipe.Transform(init, update)
