"""Any torch optimizer as a transform: its step is made on copies, and what it did to them is the update.

Knows nothing of what the optimizer does, only that it keeps what it remembers by parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, is_floating, tree_map
from . import _foreach as F
from ._base import State, Transform
from ._places import by_kind, places
from .scaling import weights_of


class TorchState(NamedTuple):
    """``memory``: where the parameters have a leaf, the dict of what the optimizer keeps of it."""

    memory: Tree


def from_torch(optimizer: type[torch.optim.Optimizer], **options: Any) -> Transform:
    """A transform from a torch optimizer class and its options.

    Every leaf is in one parameter group; use :func:`partition` for several. The class must need no closure and keep
    its state by parameter, as all of torch's but LBFGS do. Costs a copy of parameters and state at each step.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> params = [torch.ones(1), None]
    >>> tx.update(params, tx.init(params), params)[0]
    [tensor([-0.5000]), None]
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TransformError(
            f"{optimizer!r} is not a class of torch optimizers; write from_torch(torch.optim.AdamW, lr=3e-4)"
        )
    if issubclass(optimizer, torch.optim.LBFGS):
        raise TransformError("LBFGS calls the loss again within a step; from_torch takes optimizers without a closure")

    def init(params: Tree) -> State:
        return TorchState(tree_map(lambda leaf: {} if is_floating(leaf) else None, params))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        if not at.leaves:
            return grads, state
        before = [leaf.detach() for leaf in weights_of(at, params, "from_torch")]
        memories = at.of(state.memory, "the state")
        with torch.no_grad():
            after = by_kind(lambda ps: [F.copies(ps)], before)[0]
        for leaf, gradient in zip(after, at.leaves, strict=True):
            leaf.grad = gradient.detach().to(leaf.dtype)
        made = optimizer(after, **options)
        for leaf, memory in zip(after, memories, strict=True):
            if memory:
                made.state[leaf] = {key: _copied(value) for key, value in memory.items()}
        made.step()
        with torch.no_grad():
            updates = by_kind(lambda xs, ps: [F.add(xs, ps, -1, own=True)], [leaf.data for leaf in after], before)[0]
        kept = [dict(made.state.get(leaf, {})) for leaf in after]
        return at.tree(updates), TorchState(at.tree(kept, base=state.memory))

    return Transform(init, update)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
