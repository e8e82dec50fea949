"""Small parts of many tests: a layer, a loss, bitwise comparison of trees, a counter of
operations.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure and the same bits in every leaf."""
    left, spec = optree.tree_flatten(a, namespace="fpipe")
    right, other = optree.tree_flatten(b, namespace="fpipe")
    return spec == other and all(map(_alike, left, right))


def _alike(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b


class Count(TorchDispatchMode):
    """Counts the calls of one operation."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.times = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func._opname == self.name
        return func(*args, **(kwargs or {}))
